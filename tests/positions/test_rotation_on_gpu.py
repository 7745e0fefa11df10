"""Rotation in Triton is the formula, interpreted where there is no GPU (tests/conftest.py)."""

from contextlib import nullcontext

import pytest
import torch

from longitude.positions.rotation import RotaryTable, one_by_one, rotate_by_formula
from tests.support import close

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")


@pytest.fixture(autouse=True)
def _on_the_gpu():
    """All that a test makes, masks too."""
    with torch.device("cuda") if torch.cuda.is_available() else nullcontext():
        yield


@pytest.mark.one_in(8)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("heads_of_a_program", [1, 4])
def test_it_is_the_formula(layout, dtype, tolerance, heads_of_a_program, monkeypatch):
    """Both tensors in one launch, or one; part of the head; a table of each row; heads brought forward, or shared."""
    from longitude.positions.gpu import rotate

    monkeypatch.setattr(rotate, "ENOUGH", 0 if heads_of_a_program > 1 else 2**12)
    for batch, heads, kv_heads, length, width, pairs, by_row in ((2, 3, 1, 1, 20, 6, True), (1, 2, 2, 17, 8, 3, False)):
        q = torch.randn(batch, heads, length, width).to(dtype)
        k = torch.randn(batch, length, kv_heads, width).to(dtype).transpose(1, 2)
        angle = 9 * torch.randn(*((batch, 1) if by_row else ()), length, pairs)
        table = RotaryTable(angle.cos(), angle.sin())
        for given in ((q, k), (q,), (k.expand(-1, heads, -1, -1) if kv_heads == 1 else k, q)):
            got = rotate.rotate(given, table, layout)
            want = one_by_one(given, table, layout, rotate_by_formula)
            close(got, want, tolerance * 9)
