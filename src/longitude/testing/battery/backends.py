"""Laws of backends: equal answers on all that support a call, one graph for the backward, and memory linear in the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longitude.attention import terms
from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, Mask, Pairs
from longitude.positions.composed import compose
from longitude.positions.terms import SinkLogits
from longitude.testing.attend_calls import Call, calls_with_every_mask, documents_of, masks
from longitude.testing.battery.compilers import require_one_table
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement
from longitude.testing.examples import ENCODING_LAWS, SMALL_ENCODING, Example
from longitude.testing.fixtures import (
    Named,
    close,
    differentiable,
    heads_and_tokens,
    learned_of,
    memory_of,
    numbers,
    parameters_of,
    refused,
    small_blocks,
)

PRECISIONS = {torch.float64: 1e-10, torch.float32: 2e-4}
"""Largest relative error of a backend against `reference` in float64, by dtype."""
LENGTHS = ((1, 1), (7, 7), (63, 63), (5, 12))


@ENCODING_LAWS.law(threshold=PRECISIONS[torch.float64])
def backends(
    build: Example, lengths: tuple[tuple[int, int], ...] = LENGTHS, kinds: tuple[str, ...] | None = None
) -> None:
    """Every backend that accepts equals `reference` in float64, forward and every gradient.

    Gradients are those of queries, keys, values, the tokens that context reads, and each parameter. In float32 too, as near as
    float32 can be.
    One that refuses raises a ValueError that names those that work. lengths: queries and keys; kinds: of masks; None: all.
    """
    for rows, keys in lengths:
        tensors = heads_and_tokens(rows, keys)
        for kind, mask in masks(2, keys, compose(build()).causal_only).items():
            if kinds is not None and kind not in kinds:
                continue
            documents = documents_of(mask, tensors["x"])
            truth = Call(build().float().double(), tensors, mask, documents).answer("reference")
            # float32 where it can fail otherwise than float64 and no pair is at a kink (relu, floor) by chance.
            for dtype in list(PRECISIONS)[: 2 if 12 <= keys <= 100 else 1]:
                inputs = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
                case = Call(build().float().to(dtype), inputs, mask, documents)
                reasons = case.refusals()
                able = [name for name, why in reasons.items() if why is None]
                with torch.no_grad():  # some need no gradients to accept
                    without_gradients = case.refusals()
                for name, why in reasons.items():
                    here = f"backend {name}, {dtype}, {rows} queries, {keys} keys, mask {kind}"
                    if why is None:
                        with small_blocks(max(3, keys // 4), 2, keys):
                            close(here, case.answer(name), truth, PRECISIONS[dtype])
                        continue
                    message = refused(here, lambda: case.answer(name), why)  # noqa: B023
                    named, taken = message.rsplit("; ", 1)[1].split(" can, and 'auto' takes ")
                    if [b for b in BACKENDS if repr(b) in named] != able or taken not in map(repr, able):
                        raise LawBroken(f"{here}: expected a refusal that names {able}, which work, got {message!r}")
                    if without_gradients[name] is None:
                        with torch.no_grad():
                            got, want = case.answer(name)["output"], truth["output"]
                            close(f"{here}, without gradients", got, want, PRECISIONS[dtype])


# ---- what a call leaves behind ---------------------------------------------------------------------------------------
QUICK = ("no keys",)


@ENCODING_LAWS.law()
def autograd_graph(build: Example, kinds: tuple[str, ...] | None = QUICK) -> None:
    """Every backend's output has an autograd graph exactly if the output of `reference` has one, with the same inputs.

    Whatever the mask, also where no query has a key; whichever input or parameter alone requires a gradient. kinds: of masks;
    None: all.
    """
    for kind, case in calls_with_every_mask(build(), heads_and_tokens(6, 6), kinds):
        want = _graphs(case, "reference")
        for name in ("auto", *case.able()):
            for wanted, graph in _graphs(case, name).items():
                if graph != want[wanted]:
                    expected = f"wanting a gradient for {wanted}, expected {want[wanted]}, as `reference` has"
                    raise LawBroken(f"backend {name}, mask {kind}: {expected}, got {graph}")


def _graphs(case: Call, backend: str) -> dict[str, str]:
    """For each tensor that alone requires a gradient: whether the output has a graph. If all do: whether it gets a gradient."""
    learned = parameters_of(case.encoding)
    before = {name: p.requires_grad for name, p in learned.items()}
    graphs = {}
    try:
        for name in (*case.tensors, *learned):
            for other, p in learned.items():
                p.requires_grad_(other == name)
            tensors = {n: t.detach().requires_grad_(n == name) for n, t in case.tensors.items()}
            graphs[f"{name} alone"] = "a graph" if case.forward(tensors, backend).requires_grad else "no graph"
        for p in learned.values():
            p.requires_grad_()
        wanted = differentiable(**case.tensors) | learned
        out = case.forward(wanted, backend)
        gradients = [None] * len(wanted)
        if out.requires_grad:
            gradients = torch.autograd.grad(out.sum(), list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            graphs[f"{name} among all"] = "no gradient" if gradient is None else "a gradient"
    finally:
        for name, p in learned.items():
            p.requires_grad_(before[name])
    return graphs


@ENCODING_LAWS.law(threshold=1e-8)
def queries_without_keys(build: Example, kinds: tuple[str, ...] = ("holes", "no keys")) -> None:
    """A query without keys has zeros and a logsumexp of -inf, and adds nothing to tangents, gradients or second derivatives.

    On every backend; these are `reference`'s where each such query has a key and no share in the loss. A sink is a key that is
    always there: then the logsumexp is its logit. kinds: of masks.
    """
    for kind, case in calls_with_every_mask(build(), heads_and_tokens(6, 6), kinds):
        order = torch.arange(6)
        allowed = case.mask.allowed(order, order)
        some = allowed.any(-1)[..., None]
        exact = replace(case, mask=Causal() & Pairs(allowed | (~some & (order == 0)), 0, 0))
        sinks = any(isinstance(term, SinkLogits) for term in case.terms())
        for backend in ("reference", *case.able()):
            for asked in ({}, {"return_lse": True}, {"return_weights": True}):
                here = f"backend {backend}, mask {kind}, {', '.join(asked)}"
                try:
                    answers = case.forward(case.tensors, backend, **asked)
                except ValueError:  # it does not return these
                    continue
                for x in _columns(answers)[: 1 if sinks else 2]:
                    close(f"{here}: queries without keys", torch.where(some, 0, x), torch.zeros_like(x))
                want = _derivatives(exact, "reference", some, asked, whole=False)
                for name, got in _derivatives(case, backend, some, asked).items():
                    close(f"{here}: {name}", got, want[name])


def _columns(answers: Any) -> list[Tensor]:
    """The output and what else was returned, [B, H, L, n] each; a logsumexp with zeros where it is -inf."""
    parts = answers if isinstance(answers, tuple) else (answers,)
    return [x if x.dim() == 4 else x.masked_fill(x == -math.inf, 0.0)[..., None] for x in parts]


def _derivatives(case: Call, backend: str, some: Tensor, asked: dict[str, bool], whole: bool = True) -> Named:
    """Gradients and second derivatives of a loss over queries that have keys, and tangents, as far as the backend has any.

    whole: tangents of all queries, else of those alone.
    """

    def loss(tensors: Named) -> Tensor:
        columns = [torch.where(some, x, 0.0) for x in _columns(case.forward(tensors, backend, **asked))]
        return sum((x.sin() * numbers(*x.shape[1:], seed=n)).sum() for n, x in enumerate(columns))  # type: ignore[return-value]

    inputs = differentiable(**case.tensors)
    wanted = {**inputs, **parameters_of(case.encoding)}
    first = torch.autograd.grad(loss(inputs), list(wanted.values()), create_graph=True, allow_unused=True)
    named = {f"gradient of {name}": g for name, g in zip(wanted, first, strict=True) if g is not None}
    along = sum((g * numbers(*g.shape, seed=3)).sum() for g in named.values())
    with suppress(RuntimeError):  # torch's fused function and loops in C have none, and raise
        second = torch.autograd.grad(along, list(wanted.values()), allow_unused=True)  # type: ignore[arg-type]
        named |= {f"second derivative, {name}": g for name, g in zip(wanted, second, strict=True) if g is not None}
    directions = {name: numbers(*x.shape, seed=8) for name, x in case.tensors.items()}
    with suppress(ValueError):  # not every backend supports forward mode
        forward = lambda inputs: case.forward(inputs, backend, **asked)  # noqa: E731
        tangents = _columns(torch.func.jvp(forward, (case.tensors,), (directions,))[1])
        named |= {f"tangent {n}": x if whole else torch.where(some, x, 0.0) for n, x in enumerate(tangents)}
    return {name: x.detach() for name, x in named.items()}


# ---- memory ----------------------------------------------------------------------------------------------------------
MOST = 2.1
"""Largest growth of memory for twice the tokens: linear memory grows by at most 2, quadratic memory by 4."""


@ENCODING_LAWS.law(threshold=MOST)
def memory(
    build: Example, mask: Callable[[int], Mask] = lambda length: Causal(), length: int = 2048
) -> Measurement | None:
    """On the `table` route twice the length takes twice the memory, forward and backward, and no tensor has Lq x Lk elements.

    All that is alive at once, outputs and gradients too. Counted by the profiler at `length` and its double, in float32 with four
    heads. mask: of a length; `table` must take it.
    """
    longer: dict[str, Any] = {} if "max_length" in build.options else {"max_length": 2 * length}
    longer |= {name: 8 * n for name, n in SMALL_ENCODING.items() if build.has(name) and name not in build.options}
    encoding = build(**longer).float()
    if (last := encoding.max_length or 2 * length) < 2 * length:
        raise DoesNotApply(f"the table route is tried at {2 * length} tokens, and its positions end at {last}")
    require_one_table(encoding, 2 * length)
    if any(region.block > 1 for region in compose(encoding).regions()):
        raise DoesNotApply("the table route keeps, for the gradient of each block, all keys before it: L² / block")
    short = {name: x.float() for name, x in heads_and_tokens(8, 8, batch=1).items()}
    if (why := Call(encoding, short).refusals()["table"]) is not None:
        raise DoesNotApply(f"the table route does not take it: {why}")
    peaks = []
    for tokens in (length, 2 * length):
        inputs = differentiable(**{name: x.float() for name, x in heads_and_tokens(tokens, tokens, batch=1).items()})
        case, wanted = Call(encoding, inputs, mask(tokens)), [*inputs.values(), *learned_of(encoding).values()]

        def forward_and_backward() -> Any:
            out = case.forward(inputs, "table")  # noqa: B023
            return torch.autograd.grad(out.sum(), wanted, allow_unused=True)  # noqa: B023

        terms._table.cache_clear()  # one of the two lengths may have been computed before
        largest, peak = memory_of(forward_and_backward)
        if largest >= 4 * tokens**2:
            raise LawBroken(f"backend table: expected no tensor of {tokens} x {tokens} elements, got {largest} bytes")
        peaks.append(peak)
    cause = f"backend table, {tokens} tokens: {peaks[0]} -> {peaks[1]} bytes"
    return Measurement(peaks[1] / peaks[0], MOST, cause=cause)
