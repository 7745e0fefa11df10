"""Laws of compilers: torch.compile and torch.export follow it. No C++ compiler is needed: the graphs run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longitude.attention.operation import attend
from longitude.positions.base import Encoding, Transport
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement
from longitude.testing.examples import DIM, Example, MixerExample
from longitude.testing.fixtures import LayerStack, close, heads_and_tokens, numbers
from longitude.testing.parts import ENCODING_LAWS, shared_law

LENGTHS = range(2, 42, 2)


@ENCODING_LAWS.law(name="compile", threshold=2)
def compiled_at_many_lengths(build: Example) -> Measurement:
    """torch.compile(fullgraph=True) makes at most 2 graphs for 20 lengths, with the same output and gradients."""
    encoding = build()
    if any(isinstance(term, Transport) for term in encoding.terms(encoding.context(numbers(1, 2, DIM))[0])):
        raise DoesNotApply("Transport: attention walks its tokens chunk by chunk, so each length is a graph")
    require_one_table(encoding, 42)
    from torch._dynamo.testing import CompileCounter

    stack = LayerStack(build.in_attention()).float()
    with compiled(stack, graphs := CompileCounter()) as forward:
        for length in LENGTHS:
            x = numbers(2, length, DIM).float()
            close(f"compiled, length {length}", stack.answer(x, 0, forward=forward), stack.answer(x, 0), 1e-4)
    return Measurement(graphs.frame_count, 2, cause=f"{graphs.frame_count} graphs for {len(LENGTHS)} lengths")


@shared_law(threshold=1e-4)
def compiled_training(build: MixerExample) -> None:
    """Compiled forward and backward together, as training does, it gives the same output and gradients.

    Of tokens and of every parameter; without documents, and a mixer with them, too.
    """
    net = LayerStack(build, layers=1 if isinstance(build.encoding, Example) else 2).float()
    x = numbers(2, 21, DIM).float()
    positions = torch.arange(21).expand(2, 21)
    documents = torch.tensor([[0] * 9 + [1] * 12, [-1] * 4 + [0] * 17])
    ways = [("", (x, 0), None), (" with documents", (x, positions, documents), (documents >= 0)[..., None].float())]
    with compiled(net, "aot_eager") as forward:
        for what, given, seen in ways[: 1 if isinstance(build.encoding, Example) else 2]:
            got, want = (net.answer(*given, forward=f, seen=seen) for f in (forward, net))
            close(f"compiled{what}", got, want)


@contextmanager
def compiled(module: torch.nn.Module, backend: Any) -> Iterator[Any]:
    """The module compiled into whole graphs; what torch has compiled before and meanwhile is forgotten."""
    from torch._dynamo import reset

    reset()
    try:
        yield torch.compile(module, backend=backend, fullgraph=True)
    finally:
        reset()


class _Attention(torch.nn.Module):
    def __init__(self, encoding: Encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        context = self.encoding.context(x)[0] if self.encoding.reads_tokens else None
        return attend(q, k, v, encoding=self.encoding, context=context)


@ENCODING_LAWS.law(threshold=1e-9)
def export(build: Example) -> None:
    """torch.export takes attention with the encoding at every length, in torch's own operators, which run without this package.

    A choice by size would be a condition of the graph, which torch refuses for a length without an end.
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
    if encoding.length_at(0, length - 1) != encoding.length_at(length - 1, length - 1):
        raise DoesNotApply("its tables follow the length, so each length is a call of its own")
