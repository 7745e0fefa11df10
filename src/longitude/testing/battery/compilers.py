"""Laws of torch.compile, torch.export and torch.func. No C++ compiler is needed: graphs run in torch's own kernels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from longitude.attention.operation import attend
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.terms import Transport
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement
from longitude.testing.examples import DIM, ENCODING_LAWS, Example, MixerExample, shared_law
from longitude.testing.fixtures import LayerStack, Named, close, heads_and_tokens, learned_of, numbers

SLOW_OR_OLD = "There is a performance drop|`torch.jit"
"""Warnings to ignore: that vmap runs an operator row by row, and that torch's forward mode uses torch.jit."""


@shared_law(threshold=1e-9)
def transforms(build: MixerExample, length: int = 9) -> None:
    """torch.func.grad, vmap(grad) over the rows of a batch, and jvp give what autograd gives for each sequence alone.

    vmap over rows that have their own documents gives what each gives.
    """
    net, x, direction = LayerStack(build), numbers(3, length, DIM), numbers(length, DIM, seed=9)
    learned = {name: p.detach() for name, p in learned_of(net).items()}

    def loss(learned: Named, sequence: Tensor) -> Tensor:
        return (functional_call(net, learned, sequence[None])[0] * direction).sum()

    want = [net.answer(sequence[None], direction=direction) for sequence in x]
    by_row = [{name: answer[f"gradient of {name}"] for name in learned} for answer in want]
    tangents = {name: numbers(*p.shape, seed=n) for n, (name, p) in enumerate(learned.items())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SLOW_OR_OLD)
        close("grad", grad(loss)(learned, x[0]), by_row[0])
        close("grad of the input", grad(loss, argnums=1)(learned, x[0]), want[0]["gradient of x"][0])
        together = vmap(grad(loss), (None, 0))(learned, x)
        forward = jvp(lambda learned: loss(learned, x[0]), (learned,), (tangents,))[1]
        documents = torch.stack([torch.arange(length) // (n + 2) - n % 2 for n in range(3)])
        mapped = vmap(lambda sequence, documents: net(sequence[None], 0, documents[None])[0])(x, documents)
        close("vmap over documents", mapped, net(x, 0, documents))
    for n, want_of_row in enumerate(by_row):
        close(f"vmap(grad), sequence {n}", {name: rows[n] for name, rows in together.items()}, want_of_row)
    along = [(tangents[name] * by_row[0][name]).sum() for name in learned]
    close("jvp", forward, sum(along, torch.zeros(())).to(forward))


LENGTHS = range(2, 42, 2)


@ENCODING_LAWS.law(name="compile", threshold=2)
def compiled_at_many_lengths(build: Example) -> Measurement:
    """torch.compile(fullgraph=True) makes at most 2 graphs for 20 lengths, with the same output and gradients.

    With dynamic=True it makes one, also of attend itself with a list of encodings.
    """
    encoding = build()
    if any(isinstance(term, Transport) for term in encoding.terms(compose(encoding).context(numbers(1, 2, DIM))[0])):
        raise DoesNotApply("Transport: attention walks its tokens chunk by chunk, so each length is a graph")
    require_one_table(encoding, 42)
    from torch._dynamo.testing import CompileCounter

    stack = LayerStack(build.in_attention()).float()
    with compiled(stack, graphs := CompileCounter()) as forward:
        for length in LENGTHS:
            x = numbers(2, length, DIM).float()
            close(f"compiled, length {length}", stack.answer(x, 0, forward=forward), stack.answer(x, 0), 1e-4)
    attention = _Attention(encoding.float())
    with compiled(attention, single := CompileCounter(), dynamic=True) as forward:
        for length in (7, 12):
            tensors = [x.float() for x in heads_and_tokens(length, length).values()]
            close(f"attend, dynamic=True, length {length}", forward(*tensors), attention(*tensors), 1e-5)
    if single.frame_count != 1:
        raise LawBroken(f"attend, dynamic=True: expected one graph of two lengths, got {single.frame_count}")
    return Measurement(graphs.frame_count, 2, cause=f"{graphs.frame_count} graphs for {len(LENGTHS)} lengths")


@shared_law(threshold=1e-4)
def compiled_training(build: MixerExample) -> None:
    """Compiled with its backward, as in training, it gives the same output and gradients.

    Gradients are those of tokens and of every parameter. A mixer is also called with documents, which keep NaN to themselves.
    """
    net = LayerStack(build, layers=1 if isinstance(build.encoding, Example) else 2).float()
    x = numbers(2, 21, DIM).float()
    positions = torch.arange(21).expand(2, 21)
    documents = torch.tensor([[0] * 9 + [1] * 12, [-1] * 4 + [0] * 17])
    ways = [("", (x, 0), None), (" with documents", (x, positions, documents), (documents >= 0)[..., None].float())]
    with compiled(net, "aot_eager") as forward:
        for what, arguments, seen in ways[: 1 if isinstance(build.encoding, Example) else 2]:
            got, want = (net.answer(*arguments, forward=f, seen=seen) for f in (forward, net))
            close(f"compiled{what}", got, want)
        if not isinstance(build.encoding, Example):
            spoiled, others = x.clone(), documents >= torch.tensor([[1], [0]])
            spoiled[0, 3] = spoiled[1, :4] = math.nan  # in the first document, and at padding
            seen = others[..., None].float()
            got, want = (
                net.answer(tokens, positions, documents, forward=f, seen=seen)
                for tokens, f in ((spoiled, forward), (x, net))
            )
            for name in ("output", "gradient of x"):
                close(f"compiled, NaN in other documents, {name}", got[name][others], want[name][others])


@shared_law(threshold=1e-9)
def compiled_transforms(build: MixerExample) -> None:
    """torch.func.jvp and grad inside a graph (torch.compile(fullgraph=True)) give what they give outside of it.

    The input has two documents: an operator that has no rule for tangents would be a constant there, and its tangent zero.
    """
    net, length = LayerStack(build, layers=1).requires_grad_(False), 9
    require_one_table(net.encoding, length)
    x, direction = numbers(1, length, DIM), numbers(1, length, DIM, seed=9)
    documents = torch.arange(length)[None] // 5

    def forward(x: Tensor) -> Tensor:
        return net(x, 0, documents)

    def both(x: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
        return *jvp(forward, (x,), (direction,)), grad(lambda x: (forward(x) * direction).sum())(x)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SLOW_OR_OLD)
        want = both(x, direction)
        with compiled(both, "aot_eager") as graph:
            for name, got, exact in zip(("output", "tangent", "gradient"), graph(x, direction), want, strict=True):
                close(name, got, exact)


@contextmanager
def compiled(module: Any, backend: Any, **options: Any) -> Iterator[Any]:
    """The module compiled into whole graphs; torch's cache of graphs is empty before and after."""
    from torch._dynamo import reset

    reset()
    try:
        yield torch.compile(module, backend=backend, fullgraph=True, **options)
    finally:
        reset()


class _Attention(torch.nn.Module):
    def __init__(self, encoding: Encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        context = compose(self.encoding).context(x)[0] if self.encoding.reads_tokens else None
        return attend(q, k, v, encoding=[self.encoding], context=context)


@ENCODING_LAWS.law(threshold=1e-9)
def export(build: Example) -> None:
    """torch.export supports attention with the encoding at every length, in torch's operators, which run without this package.

    A branch on a size would be a guard, which torch does not allow for an unbounded length.
    """
    encoding = build()
    require_one_table(encoding, 2**20)
    attention = _Attention(encoding)
    free = {2: torch.export.Dim("length", min=2)}
    shapes = (free, free, free, {1: free[2]})
    short, long = (tuple(heads_and_tokens(n, n).values()) for n in (7, 63))
    exported = torch.export.export(attention, short, dynamic_shapes=shapes, strict=True)
    calls = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    if foreign := sorted(name for name in calls if name.startswith("longitude")):
        raise LawBroken(f"expected operators of torch alone, got {', '.join(foreign)}")
    close("exported", exported.module()(*long), attention(*long))


def require_one_table(encoding: Encoding, length: int) -> None:
    """DoesNotApply where the queries of one call may have tables of different lengths."""
    follow = compose(encoding).length_at
    if follow(0, length - 1) != follow(length - 1, length - 1):
        raise DoesNotApply("its tables follow the length, so each length is a call of its own")
