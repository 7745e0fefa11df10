"""Laws of place: shifted, permuted, far away, and never from the future."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, NoMask
from longitude.attention.operation import attend, refusal, requests
from longitude.positions.base import (
    Drift,
    Encoding,
    OffsetBias,
    OffsetVectors,
    PairBias,
    Term,
    Transport,
    explicit,
)
from longitude.positions.composed import compose
from longitude.testing.fixtures import (
    SHAPES,
    Example,
    LawBroken,
    Stack,
    close,
    differentiable,
    error,
    heads_and_tokens,
    learned_of,
    numbers,
    refused,
    tensors_in,
    with_gradients,
)

SHIFTS = (1, 3, 1000, 100_000)


def law_shift(build: Example) -> str | None:
    """Law 5. Where `relative`: one number added to all positions changes nothing, neither the output nor a gradient.
    Where not: it does. Positions count up by one, or with gaps.
    """
    encoding = build()
    stack, length = Stack(encoding), 9
    limit = encoding.max_length or 10**9
    inputs = differentiable(x=numbers(2, length, SHAPES["dim"]))
    wanted = {**inputs, **learned_of(stack)}
    moved = 0.0
    for positions in (0, torch.arange(length) * 3 + 2):
        home = with_gradients(lambda p=positions: stack(inputs["x"], p), wanted)
        for shift in SHIFTS:
            there = positions + shift
            if int(explicit(there, length).max()) >= limit:
                continue
            away = with_gradients(lambda p=there: stack(inputs["x"], p), wanted)
            if encoding.relative:
                close(f"positions shifted by {shift}", away, home, 1e-8)
            moved = max(moved, error(away["output"], home["output"]))
    if not encoding.relative and moved < 1e-6:
        raise LawBroken(
            f"declared relative = False, but shifts up to {SHIFTS[-1]} change the output by {moved:.0e} only"
        )
    return None


def law_permutation(build: Example) -> str | None:
    """Law 5. Tokens permuted together with their positions and order: the output is permuted. Encodings that are
    causal_only read the order itself, so it does not apply to them.
    """
    if build().causal_only:
        return "causal_only: its terms follow the order of tokens"
    stack, length = Stack(build()), 11
    x, positions = numbers(2, length, SHAPES["dim"]), torch.arange(length) * 3 + torch.arange(length) % 2
    order = torch.arange(length) * 4 % length
    with torch.no_grad():
        for what, mask, permuted in (("causal", Causal(), Causal(order=order)), ("no", NoMask(), NoMask())):
            want = stack(x, positions, mask)[:, order]
            close(f"tokens permuted, {what} mask", stack(x[:, order], positions[order], permuted), want)
    return None


def law_order(build: Example) -> str | None:
    """Law 5. Where `causal_only`, a mask that lets a query see the future is refused; elsewhere the answer is finite, and so
    is every bias: forbidding the future is the mask's job.
    """
    encoding = build()
    q, k, v, x = heads_and_tokens(7, 7)
    context = encoding.context(x)[0]
    for mask in (NoMask(), Causal(order=torch.arange(7).flip(0))):

        def call(mask: Any = mask) -> Tensor:
            return attend(q, k, v, encoding=encoding, context=context, mask=mask)

        if encoding.causal_only:
            refused(f"causal_only with {type(mask).__name__}", call, "future", "Causal()")
        elif not bool(torch.isfinite(call()).all()):
            raise LawBroken(f"the output with {type(mask).__name__} is not finite")
    token = torch.arange(9)
    for term in encoding.terms(context):
        match term:
            case OffsetBias(at):
                bias = at(token - 4)
            case PairBias(at):
                bias = at(token[:, None], token[None])
            case _:
                continue
        if not bool(torch.isfinite(bias).all()):
            raise LawBroken(f"a bias must be finite for keys in the future too, got {bias.tolist()}")
    return None


def law_causality(build: Example) -> str | None:
    """Changing token s never changes an output before s; it does change the output at s."""
    length = 13
    x = numbers(1, length, SHAPES["dim"])
    for backend in ("auto", "reference", "chunked"):
        stack = Stack(build(), backend)
        with torch.no_grad():
            before = stack(x)
            for s in (1, 6, length - 1):
                changed = x.clone()
                changed[:, s] = 30 * numbers(SHAPES["dim"], seed=s)
                after = stack(changed)
                close(f"backend {backend}, outputs before the changed token {s}", after[:, :s], before[:, :s], 1e-12)
                if error(after[:, s], before[:, s]) < 1e-3:
                    raise LawBroken(f"backend {backend}: the output at the changed token {s} did not change")
    return None


# ---- far positions ------------------------------------------------------------------------------------------------------
FAR = (100_003, 131_071)


def law_far_positions(build: Example) -> str | None:
    """Law 6. At positions 100,003 and 131,071 (or the last that exist), in a bfloat16 module under bfloat16 autocast,
    tables and biases are those of float64 to float32 accuracy: 1e-6; and attention gives what bfloat16 can show of it.
    """
    low = build().bfloat16()
    exact = deepcopy(low).double()  # the same numbers
    last = min(FAR[1], (low.max_length or FAR[1] + 1) - 1)
    positions = torch.tensor(sorted({0, 1, *(min(far, last) - back for far in FAR for back in (1, 0))}))
    half = torch.bfloat16

    with torch.no_grad(), torch.autocast("cpu", half):
        for own, length in _lengths(low, positions):
            tables, exactly = (
                low.prepare(positions[own], length, half),
                exact.prepare(positions[own], length, torch.float64),
            )
            for got, want in zip(tensors_in(tables), tensors_in(exactly), strict=True):
                _wide("a table of prepare", got)
                close("a table of prepare, under bfloat16", got, want, 1e-6)

        x, zeros = numbers(1, len(positions), SHAPES["dim"]), torch.zeros(1, len(positions), SHAPES["dim"])
        q = numbers(1, SHAPES["num_heads"], len(positions), SHAPES["head_dim"])
        for dtype, tolerance in ((torch.float32, 2e-6), (half, 2**-8)):
            want = exact.embed(zeros.double(), positions)
            close(f"embed in {dtype}", low.embed(zeros.to(dtype), positions), want, tolerance)
            for own, length in _lengths(low, positions):
                here = q[:, :, own].to(dtype)
                for what in ("queries", "keys"):
                    got = getattr(low, what)(here, low.prepare(positions[own], length, dtype))
                    exactly = exact.prepare(positions[own], length, torch.float64)
                    close(f"{what} in {dtype}", got, getattr(exact, what)(here.double(), exactly), tolerance)

        columns, columns_exact = low.context(x.to(half))[0], exact.context(x.to(half).double())[0]
        for ours, theirs in zip(low.terms(columns), exact.terms(columns_exact), strict=True):
            _same_term(ours, theirs, positions, low.learned)
    _attention_far_away(low, exact, positions)
    return None


def _lengths(encoding: Encoding, positions: Tensor) -> list[tuple[Tensor, int | None]]:
    """Which positions are prepared together, and for which length, as attention does it."""
    lengths = encoding.length_at(positions, positions)
    if lengths is None:
        return [(torch.ones_like(positions, dtype=torch.bool), None)]
    return [(lengths == length, int(length)) for length in lengths.unique()]


def _wide(what: str, x: Tensor) -> None:
    if x.is_floating_point() and torch.finfo(x.dtype).bits < 32:
        raise LawBroken(f"{what}: expected float32 or wider in a bfloat16 module, got {x.dtype}")


def _same_term(ours: Term, theirs: Term, positions: Tensor, learned: bool) -> None:
    """What a term says about far positions, in bfloat16 and exactly."""
    offset = positions[:, None] - positions
    i, j = positions[:, None], positions[None]
    match ours, theirs:
        case OffsetBias(at), OffsetBias(exactly):
            if not learned:  # a learned number is what it is, in any dtype
                _wide("OffsetBias", at(offset))
            _near("OffsetBias, under bfloat16", at(offset), exactly(offset), 1e-6)
        case PairBias(at), PairBias(exactly):
            _near("PairBias, under bfloat16", at(i, j), exactly(i, j), 2e-6)
        case OffsetVectors(keys, values), OffsetVectors(exact_keys, exact_values):
            close("OffsetVectors.keys, under bfloat16", keys(offset), exact_keys(offset), 1e-6)
            if values is not None and exact_values is not None:
                close("OffsetVectors.values, under bfloat16", values(offset), exact_values(offset), 1e-6)
        case Drift(level), Drift():
            _wide("the level of Drift", level)
        case Transport(w, b), Transport():
            _wide("Transport.w", w)
            _wide("Transport.b", b)


def _near(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """`close`, but each number by itself: its error in units of itself, or of 1 near zero."""
    unit = want.abs().clamp(min=1.0)
    close(what, got.double() / unit, want / unit, tolerance)


def _attention_far_away(low: Encoding, exact: Encoding, positions: Tensor) -> None:
    length = len(positions)
    q, k, v, x = (t.bfloat16() for t in heads_and_tokens(length, length))
    places: dict[str, Any] = {"q_positions": positions, "k_positions": positions}
    with torch.no_grad():
        context, context_exact = compose(low).context(x)[0], compose(exact).context(x.double())[0]
        want = attend(
            *(t.double() for t in (q, k, v)), encoding=exact, context=context_exact, **places, backend="reference"
        )
        for name, backend in BACKENDS.items():
            parts = requests(q, k, v, low, context, Causal(), positions, positions, None, 0.0, False)
            if refusal(backend, [part.request for part in parts]) is None:
                with torch.autocast("cpu", torch.bfloat16):
                    got = attend(q, k, v, encoding=low, context=context, **places, backend=name)
                close(f"backend {name} in bfloat16 at positions up to {int(positions.max())}", got, want, 0.03)
