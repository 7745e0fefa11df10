"""Shapes of the attention that `benchmarks/gpu.py` measures, and how many operations they take."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS, WIDTH = 16384, 2048
"""Of all sequences of a shape, and of all heads of a token."""
MASKED = {"window 1024": {"window": 1024}, "documents of 2048": {"document": 2048}}


@dataclass(frozen=True)
class Shape:
    """Causal attention over sequences of a length; within a window, or packed documents of a size."""

    length: int
    head_dim: int
    window: int | None = None
    document: int | None = None
    tokens: int = TOKENS
    width: int = WIDTH

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def pairs(self) -> int:
        """Of one head: queries with the keys that they attend to."""
        window, document = self.window or self.length, self.document or self.length
        return sum(min(window, i % document + 1) for i in range(self.length))

    @property
    def share(self) -> float:
        """Of the pairs of plain causality."""
        return self.pairs / (self.length * (self.length + 1) // 2)


def flops(shape: Shape, backward: bool) -> float:
    """Of the pairs that the mask allows, as papers count: 4 head_dim forward, 2.5 times as many backward."""
    return 4 * shape.head_dim * shape.pairs * shape.batch * shape.heads * (3.5 if backward else 1)
