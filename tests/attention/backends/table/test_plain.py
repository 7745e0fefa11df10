"""Attention without a bias in C: chosen by one rule, equal to the reference, and never where torch knows more."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS
from longitude.attention.backends.table import band
from longitude.attention.backends.table.band import SHORTEST

HEADS, DIM = 8, 24
compiled = pytest.mark.skipif(not band.available(torch.float32), reason="needs C kernels")


def qkv(length=SHORTEST, dtype=torch.float32, learns=False, kv_heads=HEADS, batch=2, dim=DIM):
    generator = torch.Generator().manual_seed(length)
    made = (torch.randn(batch, length, h, dim, generator=generator) for h in (HEADS, kv_heads, kv_heads))
    return tuple(x.to(dtype).transpose(1, 2).requires_grad_(learns) for x in made)


def chosen(*three, **arguments):
    return next(v.backend for v in lg.explain(*three, **arguments) if v.chosen)


# ---- what it computes ------------------------------------------------------------------------------------------------
@compiled
@pytest.mark.parametrize("length", [3, 77])
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(HEADS)], ids=["none", "alibi"])
def test_bfloat16_is_rounded_once_and_to_the_nearest(encoding, length):
    """Of the same numbers, what float32 gives within half a step; NaN stays NaN."""
    narrow = qkv(length, torch.bfloat16, True)
    wide = [x.detach().float().requires_grad_() for x in narrow]
    gradient = torch.randn(narrow[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (got, *grads), (want, *wanted) = (
        [out, *torch.autograd.grad(out, three, gradient.to(out.dtype))]
        for three in (narrow, wide)
        for out in [lg.attend(*three, encoding=encoding, backend="table")]
    )
    assert ((got.float() - want).abs() <= want.abs() * 2.0**-8 * 1.01 + 1e-6).all()
    for each, exact in zip(grads, wanted, strict=True):  # delta is of an output that was rounded
        torch.testing.assert_close(each.float(), exact, atol=0.03, rtol=0.01)
    lost = narrow[2].detach().clone()
    lost[0, 0, 0, 0] = torch.nan
    assert lg.attend(*narrow[:2], lost, encoding=encoding, backend="table")[0, 0, :, 0].isnan().all()


# ---- where torch's function has rules that ours lacks ------------------------------------------------------------------
WAYS = {
    "grad": lambda *three: torch.func.vjp(lg.attend, *three)[0],
    "compile": torch.compile(lg.attend, backend="eager", fullgraph=True),
}


@compiled
@pytest.mark.parametrize("way", ["grad", pytest.param("compile", marks=pytest.mark.slow)])
def test_transforms_modes_and_graphs_stay_torchs(way, monkeypatch):
    inputs = qkv()
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    def never(r):
        raise AssertionError("our loop ran")

    with monkeypatch.context() as patched:
        assert chosen(*inputs) == "table"
        patched.setitem(BACKENDS, "table", replace(BACKENDS["table"], run=never))
        torch.testing.assert_close(WAYS[way](*inputs), expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
