"""No kernel reads or writes a number outside of the tensors that it was called with, as memcheck sees on a GPU.

The interpreter computes real addresses: each that is not masked must be of a number of an argument.
"""

import traceback

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.attention.backends.triton import backend, launch
from longitude.positions.rotation import Angles
from tests.attention.backends.one_request import masks, problem, small_blocks_of

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer's memcheck does it there")


@pytest.fixture
def outside(monkeypatch):
    """The places in kernels that read or wrote outside, while the test runs."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    own, found, arguments = [], set(), GridExecutor._init_args_hst

    def note(self, positional, named):
        made = arguments(self, positional, named)
        own[:] = [
            (x.data_ptr(), x.data_ptr() + sum(s * (n - 1) for s, n in zip(x.stride(), x.shape)) * x.itemsize)
            for x in (*made[0], *made[1].values())
            if isinstance(x, torch.Tensor) and x.numel()
        ]
        return made

    def checked(name, mask_at):
        before = getattr(InterpreterBuilder, name)

        def call(self, pointers, *rest):
            mask = np.broadcast_to(rest[mask_at].data, pointers.data.shape)
            at = pointers.data[mask].astype(np.int64)
            inside = np.zeros(at.shape, bool)
            for first, last in own:
                inside |= (first <= at) & (at <= last)
            if not inside.all():
                place = [x for x in traceback.extract_stack() if x.filename.endswith(("kernels.py", "rotate.py"))]
                found.add(f"{name} in {place[-1].name}, line {place[-1].lineno}")
            return before(self, pointers, *rest)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    monkeypatch.setattr(GridExecutor, "_init_args_hst", note)
    checked("create_masked_load", 0)
    checked("create_masked_store", 1)
    return found


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "blocks_of", small_blocks_of)
    monkeypatch.setattr(launch, "EDGE", 32)  # as large as the largest block, as it is on a chip


@pytest.mark.slow
@pytest.mark.parametrize("case", ["causal", "window", "padded documents", "band"])
@pytest.mark.parametrize(("rows", "keys"), [(37, 101), (1, 50), (48, 48), (70, 70)])
@pytest.mark.parametrize("names", ["nope", "t5", "alibi+t5", "fox+t5", "fire"])
def test_of_attention(names, rows, keys, case, outside):
    mask = masks(keys)[case] & lg.Causal() if case == "band" else masks(keys)[case]
    r, wanted = problem(rows, keys, names=names, mask=mask, dtype=torch.float16, dv=24, heads=2, kv_heads=1)
    torch.autograd.grad(backend.attention(r)[0].float().sum(), wanted, allow_unused=True)
    assert not outside


@pytest.mark.slow
def test_of_rotation(outside):
    from longitude.positions.gpu.rotate import rotate

    for length, width, pairs, layout in ((1, 10, 5, "half"), (37, 20, 7, "interleaved"), (33, 16, 8, "half")):
        q, k = torch.randn(2, 3, length, width), torch.randn(2, 1, length, width)
        rotate((q, k), Angles(torch.rand(length, pairs), torch.rand(length, pairs)), layout)
    assert not outside


@pytest.mark.slow
def test_a_number_outside_is_seen(outside, monkeypatch):
    """A table one number too short is: the last block of queries reads 27 numbers beyond the offsets."""
    for edge in (27, 26):
        r, wanted = problem(37, 53, names="t5", dtype=torch.float16, heads=2, kv_heads=1)
        monkeypatch.setattr(launch, "EDGE", edge)
        torch.autograd.grad(backend.attention(r)[0].float().sum(), wanted, allow_unused=True)
        assert any(" in _strip," in place for place in outside) == (edge < 27), outside
