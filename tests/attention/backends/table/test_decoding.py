"""A decoding step of a model: the first layer describes the call of decode.c, and every layer is equal to the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.backends.table.backend import DecodingStep, decoding
from longitude.attention.operation import choose_once, raw_request
from longitude.attention.request import Request, Step
from longitude.positions.composed import compose
from tests.support import built, needs_c

pytestmark = needs_c
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


def request_of(q: Any, k: Any, v: Any, encoding: Any = None, mask: Any = None, scale: float | None = None) -> Request:
    """Of the last token of a stream, as the first layer of a model makes it."""
    past = k.shape[2] - 1
    r = raw_request(q, k, v, compose(encoding), None, mask or lg.Causal(), past, 0, scale, 0.0, False)
    r.step = Step()
    return r


def tensors(kv_heads: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype) -> Any:
    g = torch.Generator().manual_seed(keys + dim)
    shapes = (3, 4, 1, dim), (3, kv_heads, keys, dim), (3, kv_heads, keys, value_dim)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


CASES = {
    "no encoding": (4, 37, 16, 16, None, lg.Causal(), None),
    "one key": (4, 1, 8, 8, "alibi", lg.Causal(), None),
    "grouped heads, wide values": (2, 129, 24, 40, "alibi", lg.Causal(), None),
    "learned bias, a scale": (1, 70, 33, 7, "t5", lg.Causal(), -0.3),
    "a window": (4, 200, 64, 64, "t5", lg.Causal() & lg.Window(31), None),
    "all keys": (2, 65, 16, 16, "alibi+t5", lg.NoMask(), 0.0),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_layer_is_the_formula(case, dtype):
    kv_heads, keys, dim, value_dim, label, mask, scale = CASES[case]
    encoding = built(label, {"num_heads": 4}) if label else None
    q, k, v = tensors(kv_heads, keys, dim, value_dim, dtype)
    first = request_of(q, k, v, encoding, mask, scale)
    backend = choose_once(first, "auto")
    assert isinstance(backend.run, DecodingStep)
    for shift in (0, 1):  # another layer's numbers, and keys as they lie in a buffer that has room
        q, k, v = (x.roll(shift, 0) for x in (first.q, first.k, first.v))
        room = torch.full((3, kv_heads, keys + 5, dim), torch.nan, dtype=dtype)
        room[:, :, :keys] = k
        sides = v.mT.contiguous().mT if shift else v  # rows whose numbers do not lie side by side are copied
        got = backend.run(first.of_layer(q, room[:, :, :keys], sides))
        wanted = BACKENDS["reference"].run(request_of(q.double(), k.double(), v.double(), encoding, mask, scale))
        assert got.dtype == dtype and got.shape == wanted.shape
        assert torch.allclose(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@torch.no_grad()
def test_a_token_without_a_number_shows():
    q, k, v = tensors(2, 9, 8, 8, torch.float32)
    k[1, 0, 3] = torch.inf
    v[2, 1, 4, 5] = torch.nan
    first = request_of(q, k, v, lg.ALiBi(4))
    got = choose_once(first, "table").run(first)
    wanted = BACKENDS["reference"].run(first)
    assert got.isnan().any()
    assert torch.equal(got.isnan(), wanted.isnan())


@torch.no_grad()
def test_what_is_no_step():
    q, k, v = tensors(4, 9, 8, 8, torch.float32)
    padded = lg.Causal() & lg.Padding(torch.arange(9) > torch.tensor([[0], [2], [-1]]))
    assert decoding(request_of(q, k, v)) is not None
    for r in (
        request_of(q, k, v, mask=padded),
        request_of(q.half(), k.half(), v.half()),
        request_of(k[:, :, -2:], k, v),
    ):
        assert decoding(r) is None
    with torch.enable_grad():
        assert decoding(request_of(q, k, v)) is None
