"""What hierarchical attention is told once, and how it puts its two branches together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.layers.hierarchical.blocks import Merge, mean
from longitude.attention.merge import merge_attention

COMBINES = ("gate", "softmax")


@dataclass(frozen=True)
class Rule:
    """window: tokens that are seen one by one, the query's own among them. combine: "gate" or "softmax". size_term: a block
    counts as its number of tokens. merges: of keys and of values. scale, dropout, backend: as attend takes them.
    """

    window: int
    combine: str
    size_term: bool
    scale: float
    merges: tuple[Merge, Merge] = (mean, mean)
    dropout: float = 0.0
    backend: str = "auto"

    def entered(self, count: int) -> int:
        """How many tokens are in blocks when `count` have been heard."""
        return max(0, count - self.window)

    def sizes(self, level: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of blocks of these levels: ln of the number of tokens."""
        return level.to(dtype) * math.log(2) if self.size_term else level.new_zeros((), dtype=dtype)

    def combined(
        self,
        near: tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"] | None],
        far: tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]],
        gate: Float[Tensor, "B H L"] | None,
    ) -> Float[Tensor, "B H L Dv"]:
        """G near + (1 - g) far; or both as one softmax, by their logsumexps. A query without a block has g = 1."""
        if self.combine == "softmax":
            assert near[1] is not None
            return merge_attention([near[0].to(far[0].dtype), far[0]], [near[1].to(far[1].dtype), far[1]])[0]
        assert gate is not None
        g = gate.to(far[0].dtype).masked_fill(far[1] == -math.inf, 1.0)[..., None]
        return g * near[0] + (1 - g) * far[0]


def weighted(
    scores: Float[Tensor, "... n"], seen: Bool[Tensor, "... n"], dropout: float
) -> tuple[Float[Tensor, "... n"], Float[Tensor, ...]]:
    """Softmax over what is seen, and the logsumexp: zeros and -inf where nothing is."""
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & some, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~some, 0.0)
    return F.dropout(weights, dropout, training=dropout > 0), lse.masked_fill(~some[..., 0], -math.inf)
