"""The laws of every mixer that is a decaying matrix state: three forms, any chunk, any cut, documents, padding, gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude.recurrent import orthogonal_features, performer, retention, rwkv6, ssd

EXACT = torch.float64
BATCH, HEADS, KEYS, VALUES = 2, 4, 6, 5


def retention_case(length: int, strength: float):
    q, k = torch.randn(2, BATCH, HEADS, length, KEYS, dtype=EXACT)
    return retention, (q, k, torch.randn(BATCH, HEADS, length, VALUES, dtype=EXACT))


def rwkv6_case(length: int, strength: float):
    r, k = torch.randn(2, BATCH, HEADS, length, KEYS, dtype=EXACT)
    log_w = -strength * torch.rand(BATCH, HEADS, length, KEYS, dtype=EXACT)
    return rwkv6, (
        r,
        k,
        torch.randn(BATCH, HEADS, length, VALUES, dtype=EXACT),
        log_w,
        torch.randn(HEADS, KEYS, dtype=EXACT),
    )


def ssd_case(length: int, strength: float):
    b, c = torch.randn(2, BATCH, 2, length, KEYS, dtype=EXACT)
    x = torch.randn(BATCH, HEADS, length, VALUES, dtype=EXACT)
    return ssd, (x, -strength * torch.rand(BATCH, HEADS, length, dtype=EXACT), b, c)


def performer_case(length: int, strength: float):
    q, k = torch.randn(2, BATCH, HEADS, length, 4, dtype=EXACT)
    return performer, (
        q,
        strength * k,
        torch.randn(BATCH, HEADS, length, VALUES, dtype=EXACT),
        orthogonal_features(4, 9),
    )


CASES = [retention_case, rwkv6_case, ssd_case, performer_case]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removesuffix("_case"))


def listed(state) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def cut(inputs: tuple[Tensor, ...], part: slice) -> list[Tensor]:
    """The tokens of a part: what has a batch has a length, in its third dimension."""
    return [x[:, :, part] if x.shape[0] == BATCH and x.dim() > 2 else x for x in inputs]


def everything(function, inputs, state=None, **options) -> list[Tensor]:
    """Outputs, the state, and the gradients of all inputs and of the state before."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    before = [] if state is None else [x.clone().requires_grad_() for x in listed(state)]
    given = None if state is None else before[0] if isinstance(state, Tensor) else tuple(before)
    out, after = function(*inputs, state=given, **options)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    loss = (out * weights).sum() + sum(x.square().sum() for x in listed(after))
    return [out, *listed(after), *torch.autograd.grad(loss, [*inputs, *before])]


def assert_same(given: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(given, wanted, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(5)
@cases
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (7, 64), (63, 5), (63, 16), (130, 64)])
def test_forms_agree(case, length, chunk_size):
    torch.manual_seed(length)
    function, inputs = case(length, 2.0)
    _, state = function(*case(3, 2.0)[1])
    wanted = everything(function, inputs, state, mode="recurrent")
    assert_same(everything(function, inputs, state, chunk_size=chunk_size), wanted)
    assert_same(everything(function, inputs, state, mode="parallel"), wanted)


@pytest.mark.slow
@cases
def test_forms_agree_over_500_tokens(case):
    torch.manual_seed(0)
    function, inputs = case(500, 0.1)
    wanted = everything(function, inputs, mode="recurrent")
    for chunk_size in (3, 64, 256, 1000):
        assert_same(everything(function, inputs, chunk_size=chunk_size), wanted)
    assert_same(everything(function, inputs, mode="parallel"), wanted)


@cases
def test_a_state_goes_on_where_a_call_ended(case):
    torch.manual_seed(0)
    function, inputs = case(63, 1.0)
    whole, end = function(*inputs, chunk_size=16)
    state, pieces = None, []
    for part in (slice(0, 1), slice(1, 30), slice(30, 31), slice(31, 63)):
        out, state = function(*cut(inputs, part), state=state, chunk_size=7)
        pieces.append(out)
    assert_same([torch.cat(pieces, 2), *listed(state)], [whole, *listed(end)])


@cases
@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
@pytest.mark.parametrize("strength", [1.0, 80.0])
def test_a_document_hears_itself_only(case, mode, strength):
    """Also with decays so strong that their products underflow."""
    torch.manual_seed(0)
    function, inputs = case(40, strength)
    _, state = function(*case(3, 1.0)[1])
    reset = torch.zeros(BATCH, 40, dtype=torch.bool)
    reset[0, 0] = reset[0, 13] = reset[0, 14] = reset[1, 39] = True
    out, after = function(*inputs, state=state, reset=reset, mode=mode, chunk_size=8)
    for row, start, stop in ((0, 0, 13), (0, 13, 14), (0, 14, 40), (1, 39, 40)):
        alone, end = function(*cut(inputs, slice(start, stop)), mode="recurrent")
        torch.testing.assert_close(out[row, :, start:stop], alone[row], rtol=1e-10, atol=1e-10)
        if stop == 40:
            assert_same([x[row] for x in listed(after)], [x[row] for x in listed(end)])
    before, _ = function(*cut(inputs, slice(0, 39)), state=state)
    torch.testing.assert_close(out[1, :, :39], before[1], rtol=1e-10, atol=1e-10)


@cases
def test_gradients_across_documents(case):
    torch.manual_seed(0)
    function, inputs = case(30, 40.0)
    _, state = function(*case(3, 1.0)[1])
    reset = torch.rand(BATCH, 30) < 0.2
    wanted = everything(function, inputs, state, reset=reset, mode="recurrent")
    assert_same(everything(function, inputs, state, reset=reset, chunk_size=8), wanted)


@cases
@pytest.mark.parametrize("mode", ["chunked", "recurrent"])
def test_padding_leaves_the_state_alone(case, mode):
    torch.manual_seed(0)
    function, inputs = case(30, 2.0)
    valid = torch.ones(BATCH, 30, dtype=torch.bool)
    valid[0, :4] = valid[0, 11:13] = valid[0, 29:] = False
    out, state = function(*inputs, valid=valid, mode=mode, chunk_size=8)
    places = valid[0].nonzero().flatten()
    alone, end = function(*[x[:, :, places] if x.shape[0] == BATCH and x.dim() > 2 else x for x in inputs])
    torch.testing.assert_close(out[0, :, places], alone[0], rtol=1e-10, atol=1e-10)
    assert_same([x[0] for x in listed(state)], [x[0] for x in listed(end)])
    assert torch.isfinite(out).all()


@cases
@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_no_token_hears_a_later_one(case, mode):
    torch.manual_seed(0)
    function, inputs = case(20, 1.0)
    before, _ = function(*inputs, mode=mode, chunk_size=8)
    later = [x.clone() for x in inputs]
    for x in later:
        if x.shape[0] == BATCH and x.dim() > 2:
            x[:, :, 11:] *= 3
    after, _ = function(*later, mode=mode, chunk_size=8)
    torch.testing.assert_close(before[:, :, :11], after[:, :, :11], rtol=0, atol=1e-12)
    assert (before[:, :, 11:] - after[:, :, 11:]).abs().max() > 1e-4


@cases
def test_gradients_are_derivatives(case):
    torch.manual_seed(0)
    function, inputs = case(5, 1.0)
    inputs = [x[:1, :2] if x.shape[0] == BATCH and x.dim() > 2 else x[:2] if function is rwkv6 else x for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: function(*x, chunk_size=3)[0], inputs, fast_mode=True)


@cases
def test_states_are_float32_whatever_the_tokens_are(case):
    torch.manual_seed(0)
    function, inputs = case(130, 0.01)
    exact, _ = function(*inputs)
    half, single = [x.bfloat16() for x in inputs], [x.float() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        within = function(*single)
    torch.testing.assert_close(within, function(*single))  # float32 tolerance: bfloat16 would be thousands of times off
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, state = function(*half)
    rounded, _ = function(*[x.to(EXACT) for x in half])
    assert out.dtype == torch.bfloat16 and {x.dtype for x in listed(state)} == {torch.float32}
    assert (out - rounded).abs().max() < 0.01 * exact.abs().max()  # one rounding, at the end
    assert {x.dtype for x in listed(function(*inputs)[1])} == {EXACT}


@cases
def test_without_gradients_it_says_the_same_and_leaves_its_input_alone(case):
    torch.manual_seed(0)
    function, inputs = case(40, 1.0)
    wanted, state = function(*[x.clone().requires_grad_() for x in inputs], chunk_size=16)
    before = [x.clone() for x in inputs]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert_same(
                [*function(*inputs, chunk_size=16)[:1], *listed(function(*inputs)[1])], [wanted, *listed(state)]
            )
    assert all(torch.equal(x, same) for x, same in zip(inputs, before, strict=True))


@pytest.mark.parametrize("case", [rwkv6_case, ssd_case], ids=["rwkv6", "ssd"])
@pytest.mark.parametrize("strength", [20.0, 500.0])
def test_strong_decays_in_float32(case, strength):
    """Quotients of products of such decays would overflow, or lose what little is left."""
    torch.manual_seed(0)
    function, inputs = case(130, strength)
    single = [x.float() for x in inputs]
    wanted = everything(function, [x.to(EXACT) for x in single], mode="recurrent")
    for given, exact in zip(everything(function, single), wanted, strict=True):
        assert torch.isfinite(given).all()
        torch.testing.assert_close(given.to(EXACT), exact, rtol=1e-4, atol=1e-4 * float(exact.detach().abs().max()))


def test_the_sum_that_is_meant():
    """o_t = sum over s <= t of (product of w over s+1 .. t) (q_t . k_s) v_s, written out."""
    torch.manual_seed(0)
    function, (r, k, v, log_w, u) = rwkv6_case(9, 1.0)
    w, wanted = log_w.exp(), torch.zeros_like(v)
    for t in range(9):
        for s in range(t):
            kept = w[:, :, s + 1 : t].prod(2)
            wanted[:, :, t] += (r[:, :, t] * kept * k[:, :, s]).sum(-1, keepdim=True) * v[:, :, s]
        wanted[:, :, t] += (r[:, :, t] * u * k[:, :, t]).sum(-1, keepdim=True) * v[:, :, t]
    torch.testing.assert_close(function(r, k, v, log_w, u, chunk_size=4)[0], wanted)

    function, (x, log_decay, b, c) = ssd_case(9, 1.0)
    w, wanted = log_decay.exp(), torch.zeros_like(x)
    b, c = b.repeat_interleave(2, 1), c.repeat_interleave(2, 1)  # heads 0 and 1 read the first group
    for t in range(9):
        for s in range(t + 1):
            score = w[:, :, s + 1 : t + 1].prod(2) * (c[:, :, t] * b[:, :, s]).sum(-1)
            wanted[:, :, t] += score[..., None] * x[:, :, s]
    torch.testing.assert_close(function(x, log_decay, b[:, ::2], c[:, ::2], chunk_size=4)[0], wanted)


@cases
def test_bad_input(case):
    function, inputs = case(7, 1.0)
    name = function.__name__
    with pytest.raises(ValueError, match="chunk_size of 1 or more"):
        function(*inputs, chunk_size=0)
    with pytest.raises(ValueError, match=r"unknown mode 'chunk'.*chunked"):
        function(*inputs, mode="chunk")
    with pytest.raises(ValueError, match=f"state: {name} expected .*got .*3, 3"):
        function(*inputs, state=torch.zeros(3, 3))
    with pytest.raises(ValueError, match=f"{name}.*expected.*got"):
        function(inputs[0][0], *inputs[1:])
    with pytest.raises(ValueError, match=f"{name}.*expected.*got.*int64"):
        function(inputs[0].long(), *inputs[1:])
    with pytest.raises(ValueError, match=f"reset: {name} expected bool"):
        function(*inputs, reset=torch.zeros(BATCH, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"valid: {name} expected bool.*int64"):
        function(*inputs, valid=torch.ones(BATCH, 7, dtype=torch.long))


def test_states_of_another_mixer():
    of_performer: Any = performer(*performer_case(3, 1.0)[1])[1]
    of_ssd: Any = ssd(*ssd_case(3, 1.0)[1])[1]
    with pytest.raises(ValueError, match=r"state: retention expected state \[2, 4, 6, 5\], got .*\[2, 4, 9\]"):
        retention(*retention_case(3, 1.0)[1], state=of_performer)
    with pytest.raises(ValueError, match=r"state: performer expected S .*, z .*, largest .*got"):
        performer(*performer_case(3, 1.0)[1], state=of_ssd)
    with pytest.raises(ValueError, match="groups of B and C to divide the heads of x, got 3 and 4"):
        ssd(torch.ones(1, 4, 2, 1), torch.zeros(1, 4, 2), torch.ones(1, 3, 2, 1), torch.ones(1, 3, 2, 1))
