"""Attention in C in half precision."""

import pytest
import torch

import longitude as lg
from tests.support import needs_c, random

HEADS = 8


@needs_c
@pytest.mark.parametrize("length", [3, 77])
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(HEADS)], ids=["none", "alibi"])
def test_bfloat16_is_rounded_once_and_to_the_nearest(encoding, length):
    """Of the same numbers, what float32 gives within half a step; NaN stays NaN."""
    narrow = [random(2, HEADS, length, 24, seed=n, dtype=torch.bfloat16).requires_grad_() for n in range(3)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    gradient = random(*narrow[0].shape, seed=4, dtype=torch.bfloat16)
    (got, *grads), (want, *wanted) = (
        [out, *torch.autograd.grad(out, three, gradient.to(out.dtype))]
        for three in (narrow, wide)
        for out in [lg.attend(*three, encoding=encoding, backend="table")]
    )
    assert ((got.float() - want).abs() <= want.abs() * 2.0**-8 * 1.01 + 1e-6).all()
    for gradient, exact in zip(grads, wanted, strict=True):  # delta is of an output that was rounded
        torch.testing.assert_close(gradient.float(), exact, atol=0.03, rtol=0.01)
    lost = narrow[2].detach().clone()
    lost[0, 0, 0, 0] = torch.nan
    assert lg.attend(*narrow[:2], lost, encoding=encoding, backend="table")[0, 0, :, 0].isnan().all()


@needs_c
@pytest.mark.parametrize(
    ("tiles", "gradients", "backend"), [(True, False, "sdpa"), (False, False, "table"), (True, True, "table")]
)
def test_bfloat16_without_gradients_is_torch_s_where_there_are_tiles(tiles, gradients, backend, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    three = [random(1, HEADS, 512, 64, dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3)]
    [chosen] = [verdict.backend for verdict in lg.explain(*three) if verdict.chosen]
    assert chosen == backend
