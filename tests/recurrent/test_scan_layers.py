"""Mamba, RWKV-4 and S4D as layers: equal to the published blocks, and what a model asks of a layer."""

import math
import pickle

import pytest
import torch
from torch.nn import functional as F
from transformers.initialization import guard_torch_init_functions

import longitude as lg
from longitude.recurrent import RWKV4, S4D, Mamba, RWKVChannelMix

KINDS = {"mamba": Mamba, "rwkv4": RWKV4, "s4d": S4D}


def random(module):
    """Every parameter drawn anew: no layer is compared at numbers that hide a difference."""
    for p in module.parameters():
        torch.nn.init.uniform_(p, -1, 1)
    return module


def one_at_a_time(layer, x, first=5, **options):
    """With a cache: some tokens, then one after the other."""
    cache = layer.cache_layer()
    parts = [layer(x[:, :first], cache=cache, **options)]
    parts += [layer(x[:, t : t + 1], cache=cache, **options) for t in range(first, x.shape[1])]
    return torch.cat(parts, 1)


# ---- the published blocks ----
@pytest.mark.parametrize(
    "options", [{}, {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "expand": 1}], ids=str
)
def test_mamba_is_transformers(options):
    """Outputs, gradients, and decoding with a cache; weights go over by name."""
    from transformers import DynamicCache, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, **options)
    theirs = random(MambaMixer(config, 0))
    names = {"use_bias": "bias", "use_conv_bias": "conv_bias"}
    ours = Mamba(16, state_size=4, **{"bias": False, **{names.get(k, k): v for k, v in options.items()}})
    ours.load_state_dict({**theirs.state_dict()})
    x = torch.randn(2, 13, 16, requires_grad=True)
    want = theirs(x)
    got = ours(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    by = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, by)[0] for out in (got, want)), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        steps = [theirs(x[:, :5], cache_params=cache)] + [
            theirs(x[:, t : t + 1], cache_params=cache) for t in range(5, 13)
        ]
        torch.testing.assert_close(one_at_a_time(ours, x), torch.cat(steps, 1), rtol=1e-4, atol=1e-4)


def test_rwkv4_is_transformers():
    """Outputs, and the state after them, from a state before."""
    from transformers import RwkvConfig
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    config = RwkvConfig(hidden_size=16, attention_hidden_size=32, num_hidden_layers=1)
    theirs, ours = random(RwkvSelfAttention(config, 0)), RWKV4(16, inner=32)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 13, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x)[0], rtol=1e-4, atol=1e-4)
        state = [torch.zeros(2, n, 1) for n in (16, 16, 32, 32, 32)]
        state[4] -= 1e38
        cache = ours.cache_layer()
        for some in (slice(5), slice(5, 11), slice(11, 13)):
            want, state = theirs(x[:, some], state=state, use_cache=True)
            torch.testing.assert_close(ours(x[:, some], cache=cache), want, rtol=1e-4, atol=1e-4)
        tail, *sums = cache.state
        for a, b in zip((tail[:, 0], *sums), state[1:], strict=True):
            torch.testing.assert_close(a, b[..., 0], rtol=1e-4, atol=1e-4)


def test_channel_mix_is_transformers():
    from transformers import RwkvConfig
    from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward

    theirs, ours = random(RwkvFeedForward(RwkvConfig(hidden_size=16, num_hidden_layers=1))), RWKVChannelMix(16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 13, 16)
    want = theirs(x)[0]
    torch.testing.assert_close(ours(x)[0], want, rtol=1e-4, atol=1e-3)
    first, tail = ours(x[:, :5])
    torch.testing.assert_close(torch.cat([first, ours(x[:, 5:], tail)[0]], 1), want, rtol=1e-4, atol=1e-3)


def test_s4d_is_its_formula():
    """The published block: kernel, skip, GELU, a linear map, GLU."""
    layer = S4D(6, state_size=8).double()
    x = torch.randn(2, 21, 6, dtype=torch.float64)
    A = -layer.log_A_real.exp() + 1j * layer.A_imag
    dt = layer.log_dt.exp()[:, None]
    C = torch.view_as_complex(layer.C.detach()) * (torch.exp(dt * A) - 1) / A
    K = 2 * torch.einsum("hn,hnl->hl", C, torch.exp((dt * A)[..., None] * torch.arange(21))).real
    y = torch.stack([(K[:, : t + 1].flip(1).T * x[:, : t + 1]).sum(1) for t in range(21)], 1) + layer.D * x
    torch.testing.assert_close(layer(x), F.glu(layer.output(F.gelu(y)), -1))


def test_initial_values_are_the_published():
    mamba = Mamba(32)
    torch.testing.assert_close(mamba.A_log.exp(), torch.arange(1.0, 17).expand(64, 16))
    step = F.softplus(mamba.dt_proj.bias)
    assert step.min() > 1e-3 * 0.999 and step.max() < 0.1 * 1.001 and mamba.D.eq(1).all() and mamba.dt_rank == 2
    assert mamba.dt_proj.weight.abs().max() <= 2**-0.5
    lin, inv = S4D(4, state_size=8), S4D(4, state_size=8, init="inv")
    assert lin.A_imag[0].tolist() == pytest.approx([0, math.pi, 2 * math.pi, 3 * math.pi])
    assert inv.A_imag[0].tolist() == pytest.approx([8 / math.pi * (8 / (2 * n + 1) - 1) for n in range(4)])
    assert lin.log_A_real.exp().eq(0.5).all() and lin.log_dt.exp().min() >= 1e-3 and lin.log_dt.exp().max() <= 0.1
    rwkv = RWKV4(8)
    assert rwkv.time_decay[[0, -1]].tolist() == [-5, 3]
    undecayed = {
        n for layer in (mamba, lin, rwkv) for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)
    }
    assert undecayed == {*Mamba.undecayed, *S4D.undecayed, *RWKV4.undecayed}


# ---- what a model asks of a layer ----
@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_padding_and_a_cache(kind, mode):
    """Packed and padded on both sides, whole or one at a time: each document as it is alone."""
    layer = random(KINDS[kind](16, mode=mode, chunk_size=4)).double()
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    documents = torch.tensor([[-1] * 3 + [0] * 9 + [1] * 12, [5] * 7 + [-1] * 2 + [5] * 4 + [2] * 6 + [-1] * 5])
    whole = layer(x, documents=documents)
    cache = layer.cache_layer()
    steps = [layer(x[:, t : t + 1], documents=documents[:, : t + 1], cache=cache) for t in range(24)]
    assert whole.isfinite().all()
    for b in range(2):
        for document in set(documents[b].tolist()) - {-1}:
            here = documents[b] == document
            alone = layer(x[b : b + 1, here])[0]
            torch.testing.assert_close(whole[b, here], alone)
            torch.testing.assert_close(torch.cat(steps, 1)[b, here], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_parameters(kind):
    """Meta, then empty, then loaded: the same layer. So is a pickled one."""
    layer = random(KINDS[kind](16))
    x = torch.randn(2, 9, 16)
    with torch.device("meta"):
        empty = KINDS[kind](16)
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(loaded(x), layer(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))  # noqa: S301 (our own)
    loaded.to_empty(device="cpu")
    for module in loaded.modules():  # as a model's initialisation does, the layer itself last
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
    loaded.reset_parameters()
    assert all(p.isfinite().all() for p in loaded.parameters()) and 1e-4 < loaded(x).std() < 10


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_filled_is_not_drawn_anew(kind):
    """transformers marks parameters that it has loaded, and asks the whole layer to draw what is missing."""
    layer = random(KINDS[kind](16))
    before = {key: p.detach().clone() for key, p in layer.named_parameters()}
    for missing, parameter in layer.named_parameters():
        for other in layer.parameters():
            other._is_hf_initialized = other is not parameter
        with guard_torch_init_functions():
            layer.reset_parameters()
        assert all(torch.equal(p, before[key]) for key, p in layer.named_parameters() if key != missing), missing
        parameter.data.copy_(before[missing])


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_models_keep_wide_states(kind):
    x = torch.randn(2, 30, 16)
    layer = KINDS[kind](16)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), want, rtol=0.1, atol=0.05)
    narrow = KINDS[kind](16).bfloat16()
    narrow.load_state_dict(layer.state_dict())
    cache = narrow.cache_layer()
    out = narrow(x.bfloat16(), cache=cache)
    assert out.dtype == torch.bfloat16 and {part.dtype for part in cache.state} == {torch.float32}
    torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_mixer_is_refused(kind):
    x = torch.randn(1, 3, 16)
    other = KINDS["s4d" if kind != "s4d" else "mamba"](16)
    cache = other.cache_layer()
    other(x, cache=cache)
    with pytest.raises(ValueError, match=f"expected a state of {KINDS[kind].__name__}, got one of"):
        KINDS[kind](16)(x, cache=cache)
    with pytest.raises(ValueError, match="mask"):
        KINDS[kind](16)(x, mask=lg.NoMask())


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("mamba", {"state_size": 0}, "state_size"),
        ("mamba", {"conv_kernel": 0}, "conv_kernel"),
        ("mamba", {"chunk_size": 0}, "chunk_size"),
        ("rwkv4", {"mode": "fast"}, "mode"),
        ("rwkv4", {"inner": 0}, "inner"),
        ("s4d", {"state_size": 7}, "even state_size.*7"),
        ("s4d", {"init": "legs"}, "unknown init 'legs'.*inv, lin"),
    ],
    ids=str,
)
def test_wrong_options_are_named(kind, options, says):
    with pytest.raises(ValueError, match=says):
        lg.mixer(kind, dim=16, **options)
