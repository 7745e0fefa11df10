"""The gated delta rule: the formula as matrices, its forms, and the layers of transformers' Qwen3-Next and Kimi Linear."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearConfig, KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

import longitude.recurrent.delta as delta
from longitude.recurrent import GatedDeltaNet, KimiDeltaAttention, gated_delta_rule
from longitude.recurrent.delta import unit
from longitude.testing import fill
from tests.recurrent.conftest import every_form_is, same_layer
from tests.support import close, from_fla, random, refused

HEADS, WIDTH, VALUES = 4, 6, 5


def tokens(length, heads=HEADS, key_heads=HEADS, by_channel=False, seed=0):
    q, k = (random(2, key_heads, length, WIDTH, seed=seed + n) for n in range(2))
    v = random(2, heads, length, VALUES, seed=seed + 2)
    g = -random(2, heads, length, *([WIDTH] if by_channel else []), seed=seed + 3).abs()
    beta = random(2, heads, length, seed=seed + 4).sigmoid()
    return q, k / k.norm(dim=-1, keepdim=True), v, g, beta


def by_matrices(q, k, v, g, beta):
    """S_t = (I - beta k' k) diag(e^g) S_(t-1) + beta k' v, as it is printed."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    state, out = torch.zeros(*v.shape[:2], WIDTH, VALUES, dtype=v.dtype), []
    for t in range(v.shape[2]):
        row, decay = k[:, :, t, None], g[:, :, t].exp()
        decay = torch.diag_embed(decay if decay.dim() == 3 else decay[..., None].expand(-1, -1, WIDTH))
        share = beta[:, :, t, None, None]
        state = (torch.eye(WIDTH) - share * row.mT @ row) @ decay @ state + share * row.mT @ v[:, :, t, None]
        out.append(WIDTH**-0.5 * q[:, :, t, None] @ state)
    return torch.cat(out, 2), state


@pytest.mark.one_in(5)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("length", [1, 7, 37])
def test_every_mode_is_the_formula(form, by_channel, key_heads, length):
    every_form_is(by_matrices, gated_delta_rule, tokens(length, key_heads=key_heads, by_channel=by_channel))


@pytest.mark.parametrize(("width", "values"), [(16, 16), (17, 33)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_every_width_of_the_loop(by_channel, width, values):
    """Whole vectors of columns and rows, and parts of them, documents in between: values and gradients, in both dtypes."""
    q, k = (random(2, 2, 35, width, seed=n) for n in range(2))
    v, g = random(2, 4, 35, values, seed=3), -random(2, 4, 35, *([width] if by_channel else []), seed=4).abs()
    state, beta = random(2, 4, width, values, seed=5), random(2, 4, 35, seed=6).sigmoid()
    reset = torch.zeros(2, 35, dtype=torch.bool)
    reset[0, [9, 33]] = reset[1, 0] = True
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        given = [x.to(dtype).requires_grad_() for x in (q, unit(k), v, g, beta, state)]
        found = []
        for mode in ("recurrent", "chunked"):
            out = gated_delta_rule(*given[:5], state=given[5], reset=reset, mode=mode)
            found.append((*out, *torch.autograd.grad(out, given, [torch.ones_like(x) for x in out])))
        close(*found, tolerance)


def test_a_key_replaces_what_it_held():
    """Without decay and with beta 1 the last value written under a key is read, whatever was written before."""
    key = torch.eye(4)[[0, 1, 0, 2, 1, 0]][None, None]
    v = torch.arange(6.0).view(1, 1, 6, 1)
    zero, one = torch.zeros(1, 1, 6), torch.ones(1, 1, 6)
    _, state = gated_delta_rule(key, key, v, zero, one)
    assert state.flatten().tolist() == [5.0, 4.0, 3.0, 0.0]


def test_heads_that_do_not_divide_are_refused():
    with refused("3", "4"):
        gated_delta_rule(*tokens(7, key_heads=3))


@pytest.mark.parametrize("key_heads", [4, 2])
def test_gated_deltanet_is_qwen3_nexts(key_heads):
    """Their projections hold, for each head of keys, its rows of q, k, v and z, and of b and a."""
    config = Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_value_heads=4,
        linear_num_key_heads=key_heads, linear_key_head_dim=8, linear_value_head_dim=16, vocab_size=10,
    )  # fmt: skip

    def weights(theirs):
        qkvz = theirs["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1))
        values = 16 * 4 // key_heads
        q, k, v, z = (x.flatten(0, 1) for x in qkvz.split([8, 8, values, values], 1))
        b, a = (x.flatten(0, 1) for x in theirs["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).chunk(2, 1))
        named = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "b_proj": b, "a_proj": a}
        same = {"conv1d.weight": "conv1d.weight", "o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}
        found = {f"{name}.weight": x for name, x in named.items()} | {mine: theirs[name] for mine, name in same.items()}
        return found | {name: theirs[name] for name in ("dt_bias", "A_log")}

    ours = GatedDeltaNet(32, 4, num_key_heads=key_heads, head_dim=8, expand_v=2)
    same_layer(ours, fill(Qwen3NextGatedDeltaNet(config, 0), std=0.2), config, weights)


def test_kda_is_kimi_linears():
    config = KimiLinearConfig(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_heads=4, linear_head_dim=8,
        vocab_size=10,
    )  # fmt: skip

    def weights(theirs):
        found = {name.removeprefix("forget_gate."): x for name, x in theirs.items()}
        return found | {"A_log": found["A_log"].flatten()}

    same_layer(KimiDeltaAttention(32, 4), fill(KimiLinearDeltaAttention(config, 0), std=0.2), config, weights)


def test_a_bounded_gate_is_the_function_of_flash_linear_attention(monkeypatch):
    """The decays that the rule gets, and their gradients, in float32; at first they are those of small steps."""
    naive, found = from_fla("kda.gate", "naive_kda_lowerbound_gate"), []
    rule = lambda *args, **_: (found.append(args[3]), gated_delta_rule(*args))[1]  # noqa: E731
    monkeypatch.setattr(delta, "gated_delta_rule", rule)
    own = fill(KimiDeltaAttention(32, 4, lower_bound=-5.0), std=0.4)
    x = random(2, 9, 32, dtype=torch.float32)
    own(x)
    want = naive(own.step(x).unflatten(-1, (4, 8)), own.A_log, own.dt_bias, -5.0).transpose(1, 2)
    [got] = found
    close(got, want, 1e-5)
    assert bool((got > -5).all()) and bool((got < 0).all())
    learned = own.A_log, own.dt_bias, own.f_b_proj.weight
    close(*(torch.autograd.grad(y.square().sum(), learned) for y in (got, want)), 1e-3, 1e-4)
    fresh = KimiDeltaAttention(32, 4, lower_bound=-5.0)
    close(fresh.A_log.detach(), torch.zeros(4))
    with refused(what="KimiDeltaAttention"):
        KimiDeltaAttention(32, 4, lower_bound=0.5)
