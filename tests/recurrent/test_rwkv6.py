"""RWKV-6: numbers worked out by hand, and the layer against its formula token by token."""

import pytest
import torch
from torch.nn import functional as F

from longitude.recurrent import RWKV6, rwkv6

EXACT = torch.float64


@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_by_hand(mode):
    """w = 1/2, u = 2, r = k = 1, v = 1, 2, 3: 2*1; 1 + 2*2; (1/2 + 2) + 2*3; a state of 1/4 + 2/2 + 3."""
    one = torch.ones(1, 1, 3, 1, dtype=EXACT)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=EXACT).view(1, 1, 3, 1)
    out, state = rwkv6(one, one, v, (one / 2).log(), torch.full((1, 1), 2.0, dtype=EXACT), mode=mode, chunk_size=2)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 5.0, 8.5], dtype=EXACT))
    torch.testing.assert_close(state.flatten(), torch.tensor([4.25], dtype=EXACT))


def test_channels_decay_alone():
    """A channel that keeps everything and one that forgets at once."""
    r = k = torch.ones(1, 1, 4, 2, dtype=EXACT)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=EXACT).view(1, 1, 4, 1)
    log_w = torch.tensor([0.0, -1000.0], dtype=EXACT).expand(1, 1, 4, 2)
    out, _ = rwkv6(r, k, v, log_w, torch.zeros(1, 2, dtype=EXACT))
    # the forgetful one still contains the token just before: its decay acts when the next one comes
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 2.0, 21.0, 211.0], dtype=EXACT))


def test_the_layer_is_its_formula():
    torch.manual_seed(0)
    layer = RWKV6(12, 3, mix_rank=2, decay_rank=5).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 7, 12, dtype=EXACT)
    wanted, before, state = [], torch.zeros(2, 12, dtype=EXACT), torch.zeros(2, 3, 4, 4, dtype=EXACT)
    for now in x.unbind(1):
        d = before - now
        inner = torch.tanh((now + d * layer.mix_x) @ layer.mix_down)
        w, k, v, r, g = (now + d * (layer.mix_by[j] + inner[:, 2 * j : 2 * j + 2] @ layer.mix_up[j]) for j in range(5))
        decay = torch.exp(-torch.exp(layer.decay + torch.tanh(w @ layer.decay_down) @ layer.decay_up)).view(2, 3, 4)
        r, k, v = (p(y).view(2, 3, 4) for p, y in ((layer.r_proj, r), (layer.k_proj, k), (layer.v_proj, v)))
        added = k[..., None] * v[..., None, :]
        out = (r[..., None] * (state + layer.bonus[..., None] * added)).sum(-2)
        state = decay[..., None] * state + added
        centred = out - out.mean(-1, keepdim=True)
        out = (centred / (centred.square().mean(-1, keepdim=True) + 64e-5).sqrt()).flatten(1)
        wanted.append(layer.o_proj(F.silu(layer.g_proj(g)) * (out * layer.norm.weight + layer.norm.bias)))
        before = now
    torch.testing.assert_close(layer(x), torch.stack(wanted, 1))


def test_initial_decays_reach_from_slow_to_fast():
    layer = RWKV6(64, 4)
    w = torch.exp(-torch.exp(layer.decay.detach()))
    assert (w.diff() < 0).all()
    torch.testing.assert_close(w[[0, -1]], torch.exp(-torch.exp(torch.tensor([-6.0, -1.0]))))
    assert not layer.mix_down.any() and not layer.decay_down.any()  # nothing depends on the data yet
