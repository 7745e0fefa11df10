"""RWKV-4's weighted mean: published numbers, transformers' own, three modes in two forms, states, documents and padding."""

import sys

import pytest
import torch

import longitude as lg

rwkv4 = lg.recurrent.rwkv4
MODES = ["recurrent", "parallel", "chunked"]


@pytest.fixture(params=["C", "torch"])
def form(request, monkeypatch):
    """The loop in C where it can be compiled, and torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(sys.modules["longitude.recurrent.rwkv4"], "usable", lambda *_: False)
    return request.param


def numbers(length, batch=2, channels=5, dtype=torch.float64):
    """time_decay, time_first, key, value with gradients."""
    shapes = (channels,), (channels,), (batch, length, channels), (batch, length, channels)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_formula(time_decay, time_first, key, value, reset=None):
    """All pairs, as the formula says, with no care for overflow."""
    ago = torch.arange(key.shape[1])
    ago = (ago[:, None] - ago - 1).to(key.dtype)[..., None]  # t - 1 - i
    exponent = torch.where(ago >= 0, -ago * time_decay.exp(), -torch.inf)
    exponent = torch.where(ago == -1, time_first, exponent) + key[:, None]  # [B, t, i, C]
    if reset is not None:
        document = reset.cumsum(1)
        exponent = torch.where((document[:, :, None] == document[:, None])[..., None], exponent, -torch.inf)
    weights = exponent.exp()
    return (weights * value[:, None]).sum(2) / weights.sum(2)


def everything(way, given):
    """Values, the sums that a state stands for, and gradients of both."""
    out, state = way(*given)
    top, bottom, high = state
    total = (out * torch.arange(1.0, out.numel() + 1).view_as(out).sin()).sum()
    total = total + top.sin().sum() + bottom.cos().sum() + high.sum()
    return out, *state, *torch.autograd.grad(total, given)


def agree(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_published_numbers():
    key, value = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([1.0, 2, 3])
    for mode in MODES:
        out, _ = rwkv4(torch.tensor([0.2]), torch.tensor([0.5]), key[None, :, None], value[None, :, None], mode=mode)
        assert out.flatten().tolist() == pytest.approx([1, 1.549834, 2.563699], abs=1e-6)


@pytest.mark.parametrize("length", [1, 7, 63])
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_the_formula(form, mode, length):
    given = numbers(length)
    want = by_formula(*given)
    got, _ = rwkv4(*given, mode=mode, chunk_size=16)
    torch.testing.assert_close(got, want)
    cotangent = torch.randn_like(want)
    grads = (
        torch.autograd.grad(out, given, cotangent, allow_unused=True, materialize_grads=True) for out in (got, want)
    )  # one token alone decays nothing
    agree(*grads)


@pytest.mark.parametrize("flags", [(), ("reset",), ("valid",), ("reset", "valid")], ids=str)
def test_modes_are_equal(form, flags):
    """With a state from before; state and gradients included."""
    length, batch, channels = 37, 2, 5
    reset, valid = torch.rand(batch, length) < 0.1, torch.rand(batch, length) < 0.7
    options = {"reset": reset & valid, "valid": valid} if len(flags) == 2 else {"reset": reset, "valid": valid}
    options = {name: options[name] for name in flags}
    sums = [
        torch.randn(batch, channels).double(),
        torch.rand(batch, channels).double() + 1,
        torch.randn(batch, channels).double(),
    ]
    given = [*numbers(length), *(x.requires_grad_() for x in sums)]
    heard = valid[..., None] if "valid" in flags else torch.ones(())

    def way(mode, chunk=32):
        def run(w, u, k, v, *state):
            out, after = rwkv4(w, u, k, v, mode=mode, chunk_size=chunk, state=state, **options)
            assert out.isfinite().all()
            return out * heard, after

        return run

    want = everything(way("recurrent"), given)
    agree(everything(way("parallel"), given), want)
    for chunk in (1, 5, 16, 200):
        agree(everything(way("chunked", chunk), given), want)


@pytest.mark.parametrize("mode", MODES)
def test_documents_are_apart(form, mode):
    given = numbers(40)
    reset = torch.rand(2, 40) < 0.15
    out, _ = rwkv4(*given, mode=mode, chunk_size=8, reset=reset)
    torch.testing.assert_close(out, by_formula(*given, reset=reset))


@pytest.mark.parametrize("mode", MODES)
def test_padding_leaves_the_state_alone(form, mode):
    w, u, k, v = (x.detach() for x in numbers(20))
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :6] = valid[1, 11:] = valid[:, 9] = False
    out, state = rwkv4(w, u, k, v, mode=mode, chunk_size=8, valid=valid)
    assert out.isfinite().all()
    for b in range(2):
        want, alone = rwkv4(w, u, k[b : b + 1, valid[b]], v[b : b + 1, valid[b]], mode="recurrent")
        agree((out[b : b + 1, valid[b]], *(x[b : b + 1] for x in state)), (want, *alone))
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    _, after = rwkv4(w, u, k, v, mode=mode, chunk_size=8, valid=nothing, state=state)
    agree(after, state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1, 80])
def test_it_is_transformers(form, mode, scale):
    """Its state too; keys of 80 times a normal number overflow nothing."""
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", [-80.0, 80.0, 1e4])
def test_large_keys(form, mode, key):
    """Equal keys weigh by distance alone, whatever their size; gradients are finite."""
    w, u, k, v = numbers(50, dtype=torch.float32)
    large = torch.full_like(k, key).requires_grad_()
    out, _ = rwkv4(w, u, large, v, mode=mode)
    torch.testing.assert_close(out, rwkv4(w, u, torch.zeros_like(k), v, mode="recurrent")[0], rtol=1e-3, atol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (w, u, large, v)))


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 40])
def test_any_number_of_channels(channels):
    """The loop in C takes sixteen at a time."""
    given = numbers(11, channels=channels)
    agree(everything(rwkv4, given), everything(lambda *x: rwkv4(*x, mode="recurrent"), given))


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
    agree(
        everything(lambda *x: rwkv4(*x, **options), (w, u, k, v)),
        everything(lambda *x: rwkv4(*x, mode="recurrent", **options), (w, u, k, v)),
    )

    def free(mode):
        out, (top, bottom, high) = rwkv4(w, u, k, v, mode=mode, chunk_size=4, **options)
        sums = torch.stack([top, bottom]) * high.exp()
        return out, sums, *torch.autograd.grad(out.sin().sum() + sums.sin().sum(), (w, u, k, v))

    want = free("recurrent")
    for mode in ("chunked", "parallel"):
        agree(free(mode), want)


def test_gradients_of_the_state(form):
    """By finite differences, max included."""
    given = numbers(4, batch=1, channels=2)
    assert torch.autograd.gradcheck(lambda *x: rwkv4(*x, chunk_size=2)[1], given)


def test_dtypes(form):
    given = [x.detach() for x in numbers(9, dtype=torch.float32)]
    want, _ = rwkv4(*given)
    out, state = rwkv4(*(x.bfloat16() for x in given))
    assert out.dtype == torch.bfloat16 and {x.dtype for x in state} == {torch.float32}
    torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "fast"}, "mode"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"value": torch.zeros(2, 9, 4)}, r"value \[B, L, C\].*got .*value \[2, 9, 4\]"),
        ({"time_decay": torch.zeros(4)}, r"time_decay \[C\].*got time_decay \[4\]"),
        ({"time_first": torch.zeros(1, 1, 5)}, r"time_first \[C\].*time_first \[1, 1, 5\]"),
        (
            {"state": torch.zeros(2, 5, 4)},
            r"numerator \[2, 5\], denominator \[2, 5\], max \[2, 5\], got \[2, 5, 4\]",
        ),
        ({"reset": torch.zeros(2, 8, dtype=torch.bool)}, r"reset.*\[2, 9\]"),
        ({"valid": torch.ones(2, 9)}, "valid: rwkv4 expected bool"),
        ({"key": torch.zeros(2, 9, 5, dtype=torch.long)}, "key .* of torch.int64"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_input_is_named(change, says):
    names = dict(zip("time_decay time_first key value".split(), (x.detach() for x in numbers(9)), strict=True))
    with pytest.raises(ValueError, match=says):
        rwkv4(**{**names, **change})
