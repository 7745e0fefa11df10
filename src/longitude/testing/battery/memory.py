"""The law of memory: the `table` route never holds a number for each pair of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longitude.attention.masks import Causal, Mask
from longitude.testing.attend_calls import Call
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement
from longitude.testing.examples import Example
from longitude.testing.fixtures import differentiable, heads_and_tokens, learned_of
from longitude.testing.memory_use import memory_of
from longitude.testing.parts import ENCODING_LAWS

MOST = 2.1
"""Times the memory, for twice the tokens: what is linear takes at most 2, what is quadratic 4, a mask of bytes too."""


@ENCODING_LAWS.law(threshold=MOST)
def memory(
    build: Example, mask: Callable[[int], Mask] = lambda length: Causal(), length: int = 2048
) -> Measurement | None:
    """On the `table` route twice the length takes twice the memory, forward and backward, and no tensor has Lq x Lk elements.

    All that is alive at once, outputs and gradients too. Counted by the profiler at `length` and its double, in float32 with four
    heads. mask: of a length; `table` must take it.
    """
    longer: dict[str, Any] = {} if "max_length" in build.options else {"max_length": 2 * length}
    encoding = build(**longer).float()
    if encoding.max_length is not None and encoding.max_length < 2 * length:
        raise DoesNotApply(
            f"the table route is tried at {2 * length} tokens, and its positions end at {encoding.max_length}"
        )
    if encoding.length_at(0, 2 * length - 1) != encoding.length_at(2 * length - 1, 2 * length - 1):
        raise DoesNotApply("its tables follow the length, so each length is a call of its own")
    short = {name: x.float() for name, x in heads_and_tokens(8, 8, batch=1).items()}
    if (why := Call(encoding, short).refusal("table")) is not None:
        raise DoesNotApply(f"the table route does not take it: {why}")
    peaks = []
    for tokens in (length, 2 * length):
        inputs = differentiable(**{name: x.float() for name, x in heads_and_tokens(tokens, tokens, batch=1).items()})
        case, wanted = Call(encoding, inputs, mask(tokens)), [*inputs.values(), *learned_of(encoding).values()]

        def forward_and_backward() -> Any:
            out = case.forward(inputs, "table")  # noqa: B023
            return torch.autograd.grad(out.sum(), wanted, allow_unused=True)  # noqa: B023

        largest, peak = memory_of(forward_and_backward)
        if largest >= 4 * tokens**2:
            raise LawBroken(
                f"backend table, {tokens} tokens: expected no tensor of {tokens} x {tokens} elements, got {largest} bytes"
            )
        peaks.append(peak)
    return Measurement(
        peaks[1] / peaks[0], MOST, cause=f"backend table, {tokens} tokens: {peaks[0]} -> {peaks[1]} bytes"
    )
