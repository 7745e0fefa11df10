"""Documents and padding of a recurrence: a number that is not finite stays in its document, in every mode and with every loop.

Chunks and scans end a document by a factor of 0, and 0 * NaN is NaN. So they get finite numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from longitude.not_finite import all_finite, gradients_apart, lost_after, not_finite, of_tokens

Back = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


def apart(
    axis: int,
    tokens: Sequence[Tensor],
    states: Sequence[Tensor],
    reset: Bool[Tensor, "B L"] | None,
    valid: Bool[Tensor, "B L"] | None,
) -> tuple[list[Tensor], list[Tensor], Back]:
    """Tokens and states to compute with, and a function of the outputs and the states after: NaN where they depend on one.

    axis: of the tokens, in all of them and in the outputs; the batch is in front. A token that is not finite counts as zeros, and
    its output and those behind it in its document become NaN, as does the state after them. Padding counts as zeros, and its
    outputs are zeros.
    """
    tokens, states = [*tokens], [*states]
    if valid is not None:
        tokens = [x.where(of_tokens(valid, x, axis), 0) for x in tokens]
    like, lost = tokens[0], None
    if reset is not None and not all_finite(*tokens, *states):
        bad = not_finite(tokens, axis)
        before = torch.zeros_like(bad[:, 0])
        for x in states:
            before = before | ~x.isfinite().flatten(1).all(1)
        lost = lost_after(torch.cat([before[:, None], bad], 1), F.pad(reset.cumsum(1), (1, 0)))[:, 1:]
        tokens = [x.masked_fill(of_tokens(bad, x, axis), 0) for x in tokens]
        states = [x.masked_fill(before.view(-1, *[1] * (x.dim() - 1)), 0) for x in states]

    def back(out: Tensor, after: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if reset is not None:  # else one document, which what is not finite runs through by itself
            [out] = gradients_apart((out,), like, axis)
        if lost is not None:
            last = lost[:, -1]
            after = [torch.where(last.view(-1, *[1] * (x.dim() - 1)), math.nan, x) for x in after]  # some are complex
            out = out.masked_fill(of_tokens(lost, out, axis), math.nan)
        return out if valid is None else out.where(of_tokens(valid, out, axis), 0), [*after]

    return tokens, states, back
