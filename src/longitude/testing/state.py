"""Laws of the module: what it holds, learns, shares, refuses, and how it compiles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import Causal
from longitude.attention.operation import attend
from longitude.positions.base import Encoding, Transport
from longitude.registry import options_of
from longitude.testing.fixtures import (
    OTHER_SHAPES,
    SHAPES,
    Example,
    LawBroken,
    Stack,
    close,
    differentiable,
    heads_and_tokens,
    learned_of,
    numbers,
    refused,
    tensors_in,
    unchanged,
    with_gradients,
)


def law_tables(build: Example) -> str | None:
    """Law 7. Two configurations side by side never share a table: other heads and widths, each numeric option doubled, other
    parameters. A table that outlives its call under an incomplete key answers for the wrong one, or at the wrong length.
    """
    for n, (what, seed, options) in enumerate(_variants(build)):
        length = 101 + 4 * n  # one that no table was made for before
        shapes = OTHER_SHAPES if options is OTHER_SHAPES else {}
        one = Stack(build())
        two = Stack(build(seed, **options), "auto", **shapes)
        x, y = (numbers(1, length + 2, {**SHAPES, **own}["dim"]) for own in ({}, shapes))
        with torch.no_grad():  # causal: a shorter sequence is the beginning of a longer one
            two_long, one_short = two(y[:, : length + 1]), one(x[:, :length])
            two_short, one_long = two(y[:, :length]), one(x)
        close(f"side by side with {what}", one_short, one_long[:, :length])
        close(f"{what}, side by side with the first", two_short, two_long[:, :length])
    return None


def _variants(build: Example) -> list[tuple[str, int, dict[str, Any]]]:
    """Other configurations of the same kind: what differs, seed, options."""
    found: list[tuple[str, int, dict[str, Any]]] = [("other parameters", 1, {})]
    tried: list[tuple[str, dict[str, Any]]] = []
    if build.resolved(**OTHER_SHAPES) != build.resolved():
        tried.append(("other heads and widths", OTHER_SHAPES))
    for name, p in options_of(build.factory).items():
        if name not in SHAPES and isinstance(p.default, int | float) and not isinstance(p.default, bool) and p.default:
            tried.append((f"{name} doubled", {name: 2 * p.default}))
    for what, options in tried:
        try:
            build(**options)
        except ValueError:  # beside the other options, it is outside its domain
            continue
        found.append((what, 0, options))
    return found


def law_state(build: Example) -> str | None:
    """Law 7. The state is the learned parameters and nothing else, so `learned` says whether there are any; meta ->
    to_empty -> load_state_dict, copies and pickles give the same answers.
    """
    encoding = build()
    names = set(learned_of(encoding))
    if set(encoding.state_dict()) != names:
        raise LawBroken(f"expected {sorted(names)} in state_dict, the parameters; got {sorted(encoding.state_dict())}")
    if dict(encoding.named_buffers()):
        raise LawBroken(f"expected no buffers (make tables in prepare), got {[n for n, _ in encoding.named_buffers()]}")
    if encoding.learned != bool(names):
        raise LawBroken(f"declared learned = {encoding.learned}, has the parameters {sorted(names)}")

    with torch.device("meta"):
        empty = build(filled=False)
    if any(p.device.type != "meta" for p in empty.parameters()):
        raise LawBroken("a parameter was made on another device than the default one")
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(encoding.state_dict())
    pickle.dumps(encoding)
    x = numbers(2, 7, SHAPES["dim"])
    with torch.no_grad():
        want = Stack(encoding)(x)
        close("made on meta, emptied, loaded", Stack(loaded)(x), want, 1e-12)
        close("copied", Stack(deepcopy(encoding))(x), want, 1e-12)
    return None


def law_gradients(build: Example) -> str | None:
    """Law 8. Every learned parameter gets a gradient that is not zero, and equals central differences in float64 along a
    random direction; so do inputs. A fixed encoding has no parameters.
    """
    encoding = build()
    if not encoding.learned and learned_of(encoding):
        raise LawBroken(f"declared learned = False, has the parameters {sorted(learned_of(encoding))}")
    for backend in ("auto", "reference"):
        stack = Stack(encoding, backend)
        inputs = differentiable(x=numbers(2, 7, SHAPES["dim"]))
        wanted = {**inputs, **learned_of(stack)}
        answer = with_gradients(partial(stack, inputs["x"]), wanted)
        direction = numbers(*answer["output"].shape[1:], seed=9)
        for n, (name, p) in enumerate(wanted.items()):
            gradient = answer[f"gradient of {name}"]
            if not bool(gradient.any()):
                raise LawBroken(f"backend {backend}: {name} gets no gradient")
            step = 1e-6 * numbers(*p.shape, seed=100 + n)
            with torch.no_grad():
                p.add_(step)
                above = (stack(inputs["x"]) * direction).sum()
                p.sub_(2 * step)
                below = (stack(inputs["x"]) * direction).sum()
                p.add_(step)
            want = (above - below) / 2e-6
            close(f"backend {backend}: gradient of {name} and differences", (gradient * step).sum() * 1e6, want, 1e-5)
    return None


def law_wrong_input(build: Example) -> str | None:
    """Law 9. Wrong shapes, heads, dtypes, devices and options, positions that are negative, no integers or beyond max_length:
    a ValueError that says what was expected. What is refused leaves no trace: no argument, random number or setting changes.
    """
    encoding = build()
    q, k, v, x = heads_and_tokens(7, 7)
    context = encoding.context(x)[0]

    def asks(q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> Callable[[], Any]:
        return partial(attend, q, k, v, **{"encoding": encoding, "context": context, **options})

    wide = OTHER_SHAPES["head_dim"] + SHAPES["head_dim"]
    tried: dict[str, tuple[Callable[[], Any], str]] = {
        "q without heads": (asks(q[:, 0]), "expected"),
        "integer q": (asks(q.long()), "expected"),
        "heads that do not divide": (asks(q[:, :3]), "heads"),
        "q and k of two widths": (asks(q, k[..., 1:]), "expected"),
        "two dtypes": (asks(q, k.float()), "expected"),
        "two devices": (asks(q, k.to("meta")), "meta"),
        "a mask that is none": (asks(mask="causal"), "expected"),
        "an unknown backend": (asks(backend="referense"), "did you mean 'reference'"),
        "positions that are no integers": (asks(q_positions=torch.arange(7) * 1.0), "expected"),
        "negative positions": (asks(q_positions=torch.arange(7) - 1), "expected"),
        "a negative position": (asks(q_positions=-1), "expected"),
        "positions of another length": (asks(q_positions=torch.arange(8)), "expected"),
    }
    for name, column in context.items():
        tried[f"no column {name!r}"] = asks(context=None), "context"
        tried[f"column {name!r} of another length"] = asks(context={**context, name: column[:, :, 1:]}), "expected"
        tried[f"column {name!r} of another batch"] = asks(context={**context, name: column[:1]}), "expected"
    if "head_dim" in build.resolved() or hasattr(encoding, "head_dim"):
        tried["another head_dim"] = asks(numbers(2, 4, 7, wide), numbers(2, 2, 7, wide)), str(wide)
    if "num_heads" in build.resolved() or hasattr(encoding, "num_heads"):
        tried["another number of heads"] = asks(numbers(2, 6, 7, SHAPES["head_dim"])), "heads"

    prepares = bool(tensors_in(encoding.prepare(torch.arange(7))))
    bad_positions = {"no integers": torch.arange(7) * 1.0, "negative": torch.arange(7) - 1}
    if encoding.max_length is not None:
        bad_positions["beyond max_length"] = torch.arange(7) + encoding.max_length - 6
    for kind, positions in bad_positions.items():
        if encoding.at_input:
            tried[f"embed, positions {kind}"] = partial(encoding.embed, x, positions), "expected"
        if prepares:
            tried[f"prepare, positions {kind}"] = partial(encoding.prepare, positions), "expected"
    if encoding.at_input:
        tried["embed, another width"] = partial(encoding.embed, x[..., 1:], torch.arange(7)), "expected"
    if context:
        tried["context, another width"] = partial(encoding.context, x[..., 1:]), "expected"
    for option in build.resolved().keys() & SHAPES.keys():
        for wrong in (0, -1, 1.5, "8", True):
            tried[f"{option}={wrong!r}"] = partial(build, **{option: wrong}), option
    given = [q, k, v, x, *context.values(), *encoding.parameters()]
    for what, (call, said) in tried.items():
        with unchanged(what, *given):
            refused(what, call, said)
    return None


# ---- compilers ----------------------------------------------------------------------------------------------------------
def law_compile(build: Example) -> str | None:
    """Law 10. torch.compile(fullgraph=True) makes at most 2 graphs for 20 lengths, with the same output and gradients. No
    compiler is needed: the graphs run as they are.
    """
    if _walks(build()):
        return "Transport: attention walks its tokens chunk by chunk, so each length is a graph"
    if _cut(build(), 42):
        return "its tables follow the length, so each length is a call of its own"
    from torch._dynamo import reset
    from torch._dynamo.testing import CompileCounter

    stack = Stack(build()).float()
    wanted = learned_of(stack.encoding)
    reset()
    graphs = CompileCounter()
    compiled = torch.compile(stack, backend=graphs, fullgraph=True)
    try:
        for length in range(2, 42, 2):
            x = numbers(2, length, SHAPES["dim"]).float()
            got, want = (with_gradients(partial(f, x), wanted) for f in (compiled, stack))
            close(f"compiled, length {length}", got, want, 1e-4)
            if graphs.frame_count > 2:
                raise LawBroken(f"expected at most 2 graphs for 20 lengths, got {graphs.frame_count} for {length // 2}")
    finally:
        reset()
    return None


def law_compiled_training(build: Example) -> str | None:
    """Law 10. Compiled forward and backward together, as training does, it gives the same output and the same gradients, of
    tokens and of every parameter. No compiler is needed: the graphs run as they are.
    """
    from torch._dynamo import reset

    stack = Stack(build(), layers=1).float()
    inputs = differentiable(x=numbers(2, 21, SHAPES["dim"]).float())
    wanted = {**inputs, **learned_of(stack)}
    reset()
    try:
        compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
        got, want = (with_gradients(partial(f, inputs["x"]), wanted) for f in (compiled, stack))
        close("compiled", got, want, 1e-4)
    finally:
        reset()
    return None


class _Attention(torch.nn.Module):
    def __init__(self, encoding: Encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, encoding=self.encoding, mask=Causal(), backend="sdpa")


def law_export(build: Example) -> str | None:
    """Law 10. Where an encoding adds nothing to the scores, the `sdpa` backend exports with torch.export at a free length."""
    encoding = build().float()
    q, k, v, x = (t.float() for t in heads_and_tokens(7, 7))
    if encoding.terms(encoding.context(x)[0]):
        return "its terms are no part of plain attention"
    if _cut(encoding, 500):
        return "its tables follow the length, so each length is a call of its own"
    attention = _Attention(encoding)
    free = {2: torch.export.Dim("length", min=2, max=500)}
    exported = torch.export.export(attention, (q, k, v), dynamic_shapes=(free, free, free)).module()
    longer = [t.float() for t in heads_and_tokens(63, 63)[:3]]
    close("exported", exported(*longer), attention(*longer), 1e-5)
    return None


def _cut(encoding: Encoding, length: int) -> bool:
    """Whether the queries of one call may have tables of different lengths."""
    return encoding.length_at(0, length - 1) != encoding.length_at(length - 1, length - 1)


def _walks(encoding: Encoding) -> bool:
    context = encoding.context(numbers(1, 2, SHAPES["dim"]))[0]
    return any(isinstance(term, Transport) for term in encoding.terms(context))
