"""RWKV-4: the weighted mean and the layer against their formulas and transformers'."""

import math

import pytest
import torch
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention, rwkv_linear_attention_cpu

import longitude as lg
from longitude.recurrent import RWKV4
from longitude.recurrent.ops import c_loops as loops
from longitude.testing import fill
from tests.checkpoints.recurrent_models import in_float64
from tests.support import close

rwkv4 = lg.recurrent.rwkv4
MODES = ["recurrent", "parallel", "chunked"]


def numbers(length, batch=2, channels=5, dtype=torch.float64):
    """time_decay, time_first, key, value with gradients."""
    shapes = (channels,), (channels,), (batch, length, channels), (batch, length, channels)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def everything(way, given):
    """Values, the sums that a state stands for, and gradients of both."""
    out, state = way(*given)
    top, bottom, high = state
    total = (out * torch.arange(1.0, out.numel() + 1).view_as(out).sin()).sum()
    total = total + top.sin().sum() + bottom.cos().sum() + high.sum()
    return out, *state, *torch.autograd.grad(total, given)


def test_published_numbers():
    key, value = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([1.0, 2, 3])
    for mode in MODES:
        out, _ = rwkv4(torch.tensor([0.2]), torch.tensor([0.5]), key[None, :, None], value[None, :, None], mode=mode)
        assert out.flatten().tolist() == pytest.approx([1, 1.549834, 2.563699], abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1, 80])
def test_it_is_transformers(form, mode, scale):
    """Its state too; keys of 80 times a normal number overflow nothing."""
    w, u, k, v = (x.detach() for x in numbers(130, dtype=torch.float32))
    parts, state, want, theirs = [], None, [], None
    for some in torch.arange(130).split([1, 63, 66]):
        here = w, u, scale * k[:, some], v[:, some]
        out, state = rwkv4(*here, mode=mode, chunk_size=16, state=state)
        parts.append(out)
        out, theirs = rwkv_linear_attention_cpu(*here, state=theirs, return_state=True)
        want.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), torch.cat(want, 1), rtol=1e-4, atol=1e-4)
    for ours, other in zip(state, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-3)
        assert ours.shape == (2, 5) and ours.dtype == torch.float32


@pytest.mark.parametrize("flag", [None, "reset", "valid"])
def test_keys_that_tie_with_the_decayed_max(flag):
    """max_{t-1} - w = k_t exactly: the loop in C shares the gradient of the state's max as torch.maximum does, and what does not
    depend on who is the largest is the same in each form."""
    w, u, k, v = numbers(9)
    w = torch.zeros_like(w).requires_grad_()  # decays by e^-1: keys that fall by 1 tie at every token
    u = torch.zeros_like(u).requires_grad_()
    k = -torch.arange(9.0, dtype=k.dtype)[None, :, None].expand_as(k).clone().requires_grad_()
    options = {} if flag is None else {flag: torch.arange(9).expand(2, 9) % 4 != 2}
    assert (k[:, :-1] - 1 == k[:, 1:]).all()
    if loops.loops("wkv.c", torch.float64) is not None:
        close(
            everything(lambda *x: rwkv4(*x, **options), (w, u, k, v)),
            everything(lambda *x: rwkv4(*x, mode="recurrent", **options), (w, u, k, v)),
            atol=1e-10,
            rtol=1e-10,
        )

    def free(mode):
        out, (top, bottom, high) = rwkv4(w, u, k, v, mode=mode, chunk_size=4, **options)
        sums = torch.stack([top, bottom]) * high.exp()
        return out, sums, *torch.autograd.grad(out.sin().sum() + sums.sin().sum(), (w, u, k, v))

    want = free("recurrent")
    for mode in ("chunked", "parallel"):
        close(free(mode), want, atol=1e-10, rtol=1e-10)


def test_rwkv4_is_transformers():
    """Outputs, all gradients, and the state after them, from a state before."""
    config = RwkvConfig(hidden_size=16, attention_hidden_size=32, num_hidden_layers=1)
    theirs, ours = fill(RwkvSelfAttention(config, 0)), RWKV4(16, inner=32)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 13, 16)
    with in_float64():
        exact, answers = x.double().requires_grad_(), []
        for layer, forward in ((ours.double(), ours), (theirs.double(), lambda x: theirs(x)[0])):
            learned = [layer.get_parameter(name) for name, _ in ours.named_parameters()]
            answers.append((out := forward(exact), *torch.autograd.grad(out.sin().sum(), [exact, *learned])))
        close(*answers, atol=1e-10)
    ours.float(), theirs.float()
    with torch.no_grad():
        state = [torch.zeros(2, n, 1) for n in (16, 16, 32, 32, 32)]
        state[4] -= 1e38
        cache = ours.cache_layer()
        for some in (slice(5), slice(5, 11), slice(11, 13)):
            want, state = theirs(x[:, some], state=state, use_cache=True)
            torch.testing.assert_close(ours(x[:, some], cache=cache), want, rtol=1e-4, atol=1e-4)
        tail, *sums = cache.state
        torch.testing.assert_close([tail[:, 0], *sums], [x[..., 0] for x in state[1:]], rtol=1e-4, atol=1e-4)


def test_initial_values_are_the_published():
    """The authors' code at ratios of a half, the middle layer of many. transformers fills time_first with ones."""
    layer, place = RWKV4(9), torch.arange(9) / 9
    assert layer.time_decay[[0, -1]].tolist() == [-5, 3]
    close(layer.time_decay.detach(), -5 + 8 * (torch.arange(9) / 8) ** 1.35, 1e-5)
    close(layer.time_first.detach(), math.log(0.3) + torch.tensor([0.0, 0.5, -0.5]).repeat(3), 1e-6)
    mixes = {"key": place**0.5, "value": place**0.5 + 0.15, "receptance": place**0.25}
    for name, mix in mixes.items():
        close(layer.get_parameter(f"time_mix_{name}").detach().flatten(), mix, 1e-6)
