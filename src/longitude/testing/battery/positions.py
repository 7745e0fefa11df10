"""Laws of positions: shifted, permuted, ordered, far away."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from longitude.attention.masks import Band, Causal, NoMask, Pairs
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.coordinates import explicit
from longitude.positions.terms import Drift, OffsetBias, OffsetVectors, PairBias, Temperature, Term, Transport
from longitude.testing.attend_calls import Call
from longitude.testing.engine import DoesNotApply, LawBroken
from longitude.testing.examples import DIM, ENCODING_LAWS, SHAPES, Example
from longitude.testing.fixtures import LayerStack, Named, close, error, heads_and_tokens, numbers, refused, tensors_in

SHIFTS = (1, 3, 1000, 100_000)


@ENCODING_LAWS.law(threshold=1e-8)
def shift(build: Example) -> None:
    """If `relative`: a constant added to all positions changes neither the output nor a gradient.

    If not `relative`, it changes the output. Positions count up by one, or with gaps.
    """
    encoding, length = build(), 9
    stack = LayerStack(build.in_attention(), encoding=encoding)
    limit = encoding.max_length or 10**9
    x, moved = numbers(2, length, DIM), 0.0
    for positions in (0, torch.arange(length) * 3 + 2):
        home = stack.answer(x, positions)
        for shift in SHIFTS:
            there = positions + shift
            if int(explicit(there, length).max()) >= limit:
                continue
            away = stack.answer(x, there)
            if encoding.relative:
                close(f"positions shifted by {shift}", away, home)
            moved = max(moved, error(away["output"], home["output"]))
    if not encoding.relative and moved < 1e-6:
        raise LawBroken(f"declared relative = False, but shifts up to {SHIFTS[-1]} change the output by {moved:.0e}")


@ENCODING_LAWS.law(threshold=1e-9)
@torch.no_grad()
def permutation(build: Example) -> None:
    """Tokens permuted together with their positions and order: the output is permuted.

    Encodings that are causal_only read the order itself, so it does not apply to them.
    """
    if build().causal_only:
        raise DoesNotApply("causal_only: its terms follow the order of tokens")
    stack, length = LayerStack(build.in_attention()), 11
    stack.require_order()
    x, positions = numbers(2, length, DIM), torch.arange(length) * 3 + torch.arange(length) % 2
    order = torch.arange(length) * 4 % length
    for mask, permuted in ((Causal(), Pairs(order[:, None] >= order, 0, 0)), (NoMask(), NoMask())):
        want = stack(x, positions, mask=mask)[:, order]
        got = stack(x[:, order], positions[order], mask=permuted)
        close(f"tokens permuted, {type(mask).__name__}", got, want)


@ENCODING_LAWS.law()
def order(build: Example) -> None:
    """If `causal_only`, a mask that shows the future raises ValueError; otherwise outputs and biases are finite.

    The mask, not the encoding, hides the future.
    """
    encoding, tensors = build(), heads_and_tokens(7, 7)
    for mask in (NoMask(), Band(0, 2)):
        call = partial(Call(encoding, tensors, mask).forward, tensors, "auto")
        if encoding.causal_only:
            refused(f"causal_only with {type(mask).__name__}", call, "future", "Causal()")
        elif not bool(torch.isfinite(call()).all()):
            raise LawBroken(f"the output with {type(mask).__name__} is not finite")
    token = torch.arange(9)
    for term in encoding.terms(compose(encoding).context(tensors["x"])[0]):
        for bias in _tables_of(term, token).values() if isinstance(term, OffsetBias | PairBias) else ():
            if not bool(torch.isfinite(bias).all()):
                raise LawBroken(f"a bias must be finite for keys in the future too, got {bias.tolist()}")


# ---- far positions ------------------------------------------------------------------------------------------------------
FAR = (100_003, 131_071)
IN_BFLOAT16 = {"embed, queries and keys": 2**-8, "attention": 0.03}
"""Relative errors allowed in bfloat16 at far positions."""


@ENCODING_LAWS.law(threshold=1e-6)
@torch.no_grad()
def far_positions(build: Example) -> None:
    """At positions 100,003 and 131,071, in a bfloat16 module, tables and biases have float32 accuracy.

    Or at the last positions that exist; under bfloat16 autocast; compared with float64. Attention gives what bfloat16 can show.
    Up to the largest number of int32, positions in int32 give what they give in int64.
    """
    _in_int32(build())
    low = build().bfloat16()
    exact = deepcopy(low).double()  # the same numbers
    last = min(FAR[1], (low.max_length or FAR[1] + 1) - 1)
    positions = torch.tensor(sorted({0, 1, *(min(far, last) - back for far in FAR for back in (1, 0))}))
    half = torch.bfloat16
    with torch.autocast("cpu", half):
        for chosen, length in _lengths(low, positions):
            tables, exactly = (
                encoding.prepare(positions[chosen], length, dtype)
                for encoding, dtype in ((low, half), (exact, torch.float64))
            )
            for got, want in zip(tensors_in(tables), tensors_in(exactly), strict=True):
                _wide("a table of prepare", got)
                close("a table of prepare, under bfloat16", got, want)

        x, zeros = numbers(1, len(positions), DIM), torch.zeros(1, len(positions), DIM)
        q = numbers(1, SHAPES["num_heads"], len(positions), SHAPES["head_dim"])
        for dtype, threshold in ((torch.float32, 2e-6), (half, IN_BFLOAT16["embed, queries and keys"])):
            want = exact.embed(zeros.double(), positions)
            close(f"embed in {dtype}", low.embed(zeros.to(dtype), positions), want, threshold)
            for chosen, length in _lengths(low, positions):
                here = q[:, :, chosen].to(dtype)
                for what in ("queries", "keys"):
                    got = getattr(low, what)(here, low.prepare(positions[chosen], length, dtype))
                    exactly = exact.prepare(positions[chosen], length, torch.float64)
                    close(f"{what} in {dtype}", got, getattr(exact, what)(here.double(), exactly), threshold)

        columns = compose(low).context(x.to(half))[0]
        columns_exact = compose(exact).context(x.to(half).double())[0]
        for ours, theirs in zip(low.terms(columns), exact.terms(columns_exact), strict=True):
            of_content, want = isinstance(ours, Drift | Transport), _tables_of(theirs, positions)
            for name, got in _tables_of(ours, positions).items():
                if of_content or isinstance(ours, OffsetBias) and not low.learned:  # a learned number keeps its dtype
                    _wide(name, got)
                if not of_content:
                    _near(f"{name}, under bfloat16", got, want[name], 2e-6 if isinstance(ours, PairBias) else None)

    tensors = {name: x.bfloat16() for name, x in heads_and_tokens(len(positions), len(positions)).items()}
    options = {"q_positions": positions, "k_positions": positions}
    wide = {name: x.double() for name, x in tensors.items()}
    want = Call(exact, wide, options=options).forward(wide, "reference")
    case = Call(low, tensors, options=options)
    for name in case.able():
        with torch.autocast("cpu", half):
            got = case.forward(tensors, name)
        close(f"backend {name} in bfloat16 at positions up to {last}", got, want, IN_BFLOAT16["attention"])


def _in_int32(encoding: Encoding) -> None:
    """At the last positions that there are: no sum or product of them leaves int32."""
    last = min(2**31, encoding.max_length or 2**31) - 1
    wide = torch.tensor([0, 1, last // 2, last - 1, last])
    narrow, tensors = wide.int(), heads_and_tokens(len(wide), len(wide))
    zeros = torch.zeros(1, len(wide), DIM, dtype=torch.float64)
    close("embed, positions in int32", encoding.embed(zeros, narrow), encoding.embed(zeros, wide))
    for chosen, length in _lengths(encoding, wide):
        got, want = (tensors_in(encoding.prepare(p[chosen], length, torch.float64)) for p in (narrow, wide))
        close("tables, positions in int32", dict(enumerate(got)), dict(enumerate(want)))  # type: ignore[arg-type]
    for term in encoding.terms(compose(encoding).context(tensors["x"])[0]):
        close("terms, positions in int32", _tables_of(term, narrow), _tables_of(term, wide))
        if isinstance(term, Temperature) and term.of == "positions":
            close("a temperature, positions in int32", term.at(narrow), term.at(wide))
    got, want = (
        Call(encoding, tensors, options={"q_positions": p, "k_positions": p}).forward(tensors, "reference")
        for p in (narrow, wide)
    )
    close("attention, positions in int32", got, want)


def _lengths(encoding: Encoding, positions: Tensor) -> list[tuple[Tensor, int | None]]:
    """Which positions are prepared together, and for which length, as attention does it."""
    lengths = compose(encoding).length_at(positions, positions)
    if lengths is None:
        return [(torch.ones_like(positions, dtype=torch.bool), None)]
    return [(lengths == length, int(length)) for length in lengths.unique()]


def _wide(what: str, x: Tensor) -> None:
    if x.is_floating_point() and torch.finfo(x.dtype).bits < 32:
        raise LawBroken(f"{what}: expected float32 or wider in a bfloat16 module, got {x.dtype}")


def _tables_of(term: Term, positions: Tensor) -> Named:
    """Every tensor of a term by name, for queries and keys at these positions."""
    i, j = positions[:, None], positions[None]
    match term:
        case OffsetBias(at):
            return {"OffsetBias": at(i - j)}
        case PairBias(at):
            return {"PairBias": at(i, j)}
        case OffsetVectors(keys, values):
            return {f"OffsetVectors.{n}": at(i - j) for n, at in (("keys", keys), ("values", values)) if at is not None}
        case Drift(level):
            return {"the level of Drift": level}
        case Transport(w, b):
            return {"Transport.w": w, "Transport.b": b}
    return {}


def _near(what: str, got: Tensor, want: Tensor, threshold: float | None = None) -> None:
    """`close`, but each number by itself: its error in units of itself, or of 1 near zero."""
    unit = want.abs().clamp(min=1.0)
    close(what, got.double() / unit, want / unit, threshold)
