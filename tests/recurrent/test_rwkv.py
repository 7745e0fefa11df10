"""RWKV-6: numbers worked out by hand. RWKV-7: the formula as matrices, and the authors' own code of a layer."""

import math

import pytest
import torch

from longitude.recurrent import RWKV6, RWKV7, rwkv6, rwkv7
from tests.recurrent.conftest import every_form_is
from tests.support import close, golden, random

BATCH, HEADS, KEYS, VALUES = 2, 3, 6, 5
EXACT = torch.float64


def tokens(length):
    r, k, kappa = random(3, BATCH, HEADS, length, KEYS)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    log_w, a = (random(BATCH, HEADS, length, KEYS, seed=seed).sigmoid() for seed in (1, 2))
    return r, -log_w, k, random(BATCH, HEADS, length, VALUES, seed=3), kappa, a


def by_matrices(r, log_w, k, v, kappa, a):
    """S_t = (diag(w) - (a kappa)' kappa) S_(t-1) + k' v, as it is printed."""
    state, out = torch.zeros(BATCH, HEADS, KEYS, VALUES, dtype=v.dtype), []
    for t in range(v.shape[2]):
        column = (a * kappa)[:, :, t, :, None]
        change = torch.diag_embed(log_w[:, :, t].exp()) - column @ kappa[:, :, t, None]
        state = change @ state + k[:, :, t, :, None] @ v[:, :, t, None]
        out.append(r[:, :, t, None] @ state)
    return torch.cat(out, 2), state


@pytest.mark.parametrize("length", [1, 7, 37])
def test_every_mode_is_the_formula(form, length):
    every_form_is(by_matrices, rwkv7, tokens(length))


def test_golden(form):
    """The authors' package, in float32, with e^(-1/2) in six digits."""
    table = golden("rwkv7")
    given = {name: torch.tensor(x, dtype=torch.float64) for name, x in table["layer"].items()}
    layer = RWKV7(8, 2, decay_rank=3, rate_rank=3, gate_rank=3).double()
    norm = {"ln_x.weight": "ln_w", "ln_x.bias": "ln_b"}
    own = {f"{name}.weight": f"{name[0].upper()}_" for name in ("receptance", "key", "value", "output")}
    weights = {name: given[own[name]].T if name in own else given[norm.get(name, name)] for name in layer.state_dict()}
    layer.load_state_dict({name: weights[name].reshape(p.shape) for name, p in layer.named_parameters()})
    for cuts in ([9], [4, 1, 1, 1, 1, 1]):
        cache = layer.cache_layer()
        with torch.no_grad():
            out = torch.cat([layer(part, cache=cache) for part in given["x"][None].split(cuts, 1)], 1)
        _, state = cache.state
        close(out[0], given["out"], 2e-4)
        close(state[0].mT, torch.tensor(table["state"], dtype=torch.float64), 2e-4)


def test_what_is_removed_is_of_before_the_decay():
    """With w -> 0, a = 1 and one key, the second token finds -v_1 + v_2: the state had not decayed when it was read."""
    key, v = torch.ones(1, 1, 2, 1), torch.tensor([3.0, 5.0]).view(1, 1, 2, 1)
    for mode in ("recurrent", "parallel"):
        out, state = rwkv7(key, -100 * key, key, v, key, key, mode=mode)
        assert out.flatten().tolist() == [3.0, 2.0] and state.item() == 2.0


def test_initial_values():
    """Decays between e^(-e^(-1/2)) and 1, slower ones first; nothing depends on the data."""
    layer = RWKV7(64, 4)
    w = torch.exp(-math.exp(-0.5) * layer.w0.detach().flatten().sigmoid()).unflatten(0, (4, -1))
    assert (w > math.exp(-math.exp(-0.5))).all() and (w.mean(1).diff() < 0).all()
    assert not any(down.any() for down in (layer.w1, layer.a1, layer.g1))


# ---- RWKV-6 ----------------------------------------------------------------------------------------------------------
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


def test_initial_decays_reach_from_slow_to_fast():
    layer = RWKV6(64, 4)
    w = torch.exp(-torch.exp(layer.time_decay.detach().flatten()))
    assert (w.diff() < 0).all()
    torch.testing.assert_close(w[[0, -1]], torch.exp(-torch.exp(torch.tensor([-6.0, -1.0]))))
    assert not layer.time_maa_w1.any() and not layer.time_decay_w1.any()  # nothing depends on the data yet
