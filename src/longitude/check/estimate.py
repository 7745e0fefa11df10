"""Estimated time of the laws of a checkpoint, from a few passes of its model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from longitude.check.subject import Subject, computing_in

CALLS, TOKENS = (300.0, 3.2), (3000.0, 33.0)
"""Forward passes of all laws, and tokens in them: (at length 0, more per token of length). Counted with a Llama."""
READ = 64
"""Tokens of the longer pass of a calibration."""
LONGEST = 600.0
"""Seconds that all laws may take if no length is given."""
FEWEST = 32
"""Tokens that are compared even if that takes longer."""


@dataclass(frozen=True)
class Estimate:
    """Estimated costs of all laws on a model.

    Attributes:
        parameters: Number of parameters of the model.
        pass_seconds: Time of a forward pass of one token.
        token_seconds: Time of each further token in a pass.
    """

    parameters: int
    pass_seconds: float
    token_seconds: float

    def seconds(self, length: int) -> float:
        """Estimated seconds of all laws if this number of tokens is compared."""
        calls, tokens = (fixed + each * length for fixed, each in (CALLS, TOKENS))
        return calls * self.pass_seconds + tokens * self.token_seconds

    def longest(self) -> int:
        """The most tokens that can be compared in LONGEST seconds, at least FEWEST."""
        each = CALLS[1] * self.pass_seconds + TOKENS[1] * self.token_seconds
        return max(FEWEST, int((LONGEST - self.seconds(0)) / each))


def calibrated(subject: Subject) -> Estimate | None:
    """The estimate of a subject, from passes of 1 and 64 tokens in the dtype of its equality laws.

    None for a model that cannot run them; the laws then report why.
    """

    def of(length: int) -> float:
        tokens, times = subject.tokens(length), []
        for _ in range(2):
            begun = time.perf_counter()
            subject.logits(tokens)
            times.append(time.perf_counter() - begun)
        return min(times)

    read = min(READ, subject.length)
    try:
        with torch.no_grad(), computing_in(subject.model, subject.kind):
            one, many = of(1), of(read)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    parameters = sum(p.numel() for p in subject.model.parameters())
    return Estimate(parameters, one, max(0.0, many - one) / (read - 1))
