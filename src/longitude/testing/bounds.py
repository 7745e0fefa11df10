"""Laws of cost, which a clock need not be asked about: what memory a route may take."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, Mask
from longitude.attention.operation import attend, refusal, requests
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.testing.fixtures import Example, LawBroken, differentiable, heads_and_tokens, learned_of


class Memory(NamedTuple):
    """Bytes on the CPU: of the largest tensor, and the most that was alive at once beyond what was alive before."""

    largest: int
    peak: int


def memory_of(call: Callable[[], Any]) -> Memory:
    """What call() allocates on the CPU, seen by torch's profiler: inside custom operators and backward too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    sizes = [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: event["ts"])]
    assert sizes, "this build of torch does not record memory"
    return Memory(max(sizes), max(accumulate(sizes)))  # what is freed has a negative size


def law_memory(build: Example, mask: Callable[[int], Mask] = lambda length: Causal(), length: int = 2048) -> str | None:
    """Law 11. Where the `table` route takes an encoding, forward and backward never allocate a tensor of Lq x Lk elements,
    and twice the length takes twice the memory: all that is alive at once, outputs and gradients too. Counted by the profiler
    at `length` and its double, in float32 with four heads. mask: of a length; `table` must take it.
    """
    room: dict[str, Any] = {} if "max_length" in build.options else {"max_length": 2 * length}
    encoding = build(**room).float()
    if encoding.max_length is not None and encoding.max_length < 2 * length:
        return f"the table route is tried at {2 * length} tokens, and its positions end at {encoding.max_length}"
    if encoding.length_at(0, 2 * length - 1) != encoding.length_at(2 * length - 1, 2 * length - 1):
        return "its tables follow the length, so each length is a call of its own"
    if (why := _refusal(encoding)) is not None:
        return f"the table route does not take it: {why}"
    before = None
    for tokens in (length, 2 * length):
        largest, peak = memory_of(_forward_and_backward(encoding, mask(tokens), tokens))
        if largest >= 4 * tokens**2:
            raise LawBroken(
                f"backend table, {tokens} tokens: expected no tensor of {tokens} x {tokens} elements, got {largest} bytes"
            )
        # What is narrower than a number, as a mask of bytes, shows here: linear is at most 2, quadratic 4.
        if before is not None and peak > 2.1 * before:
            raise LawBroken(
                f"backend table, {tokens} tokens: expected at most twice the memory of half as many, "
                f"got {peak / before:.2f} times, {before} -> {peak} bytes"
            )
        before = peak
    return None


def _forward_and_backward(encoding: Encoding, mask: Mask, tokens: int) -> Callable[[], Any]:
    q, k, v, x = (t.float() for t in heads_and_tokens(tokens, tokens, batch=1))
    inputs = differentiable(q=q, k=k, v=v, x=x)
    wanted = [*inputs.values(), *learned_of(encoding).values()]

    def call() -> Any:
        q, k, v, x = inputs.values()
        context = compose(encoding).context(x)[0]
        out = attend(q, k, v, encoding=encoding, context=context, mask=mask, backend="table")
        return torch.autograd.grad(out.sum(), wanted, allow_unused=True)

    return call


def _refusal(encoding: Encoding) -> str | None:
    q, k, v, x = (t.float() for t in heads_and_tokens(8, 8, batch=1))
    context = compose(encoding).context(x)[0]
    parts = requests(q, k, v, encoding, context, Causal(), None, None, None, 0.0, False)
    return refusal(BACKENDS["table"], [part.request for part in parts])
