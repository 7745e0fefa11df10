"""Laws of compilers: torch.compile and torch.export follow it. No C++ compiler is needed: the graphs run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import Causal
from longitude.attention.operation import attend
from longitude.positions.base import Encoding, Transport
from longitude.testing.attend_calls import Call
from longitude.testing.engine import DoesNotApply, Measurement
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, encoding=self.encoding, mask=Causal(), backend="sdpa")


@ENCODING_LAWS.law(threshold=1e-5)
def export(build: Example) -> None:
    """Where an encoding adds nothing to the scores, the `sdpa` backend exports with torch.export at a free length."""
    encoding = build().float()
    short, long = ({name: x.float() for name, x in heads_and_tokens(n, n).items()} for n in (7, 63))
    if Call(encoding, short).terms():
        raise DoesNotApply("its terms are no part of plain attention")
    require_one_table(encoding, 500)
    if encoding.regions():
        raise DoesNotApply("its attention runs in parts, which are merged by a logsumexp that `sdpa` does not return")
    attention = _Attention(encoding)
    free = {2: torch.export.Dim("length", min=2, max=500)}
    given, longer = ([tensors[name] for name in "qkv"] for tensors in (short, long))
    exported = torch.export.export(attention, tuple(given), dynamic_shapes=(free, free, free)).module()
    close("exported", exported(*longer), attention(*longer))


def require_one_table(encoding: Encoding, length: int) -> None:
    """DoesNotApply where the queries of one call may have tables of different lengths."""
    if encoding.length_at(0, length - 1) != encoding.length_at(length - 1, length - 1):
        raise DoesNotApply("its tables follow the length, so each length is a call of its own")
