"""Sizes of the attention that is drawn."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.errors import check_sizes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model.

    Args:
        length: Positions that are drawn.
        heads: Heads of queries and keys.
        head_dim: Width of a head.
        width: Width of a token; None: that of all heads.
        kv_heads: Heads of keys; None: as many as of queries.
    """

    length: int = 1024
    heads: int = 8
    head_dim: int = 64
    width: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_sizes("show", length=self.length, heads=self.heads, head_dim=self.head_dim)
        if self.length < 2:
            raise ValueError(f"--length must be at least 2, got {self.length}")

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim if self.width is None else self.width

    @property
    def known(self) -> dict[str, Any]:
        """Sizes that a model of this shape passes to an encoding."""
        return {
            "dim": self.dim,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim,
            "max_length": self.length,
        }

    def tokens(self) -> Tensor:
        """Random tokens [1, length, dim] of seed 0, with standard deviation 1, as after a norm."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, self.length, self.dim, generator=generator, dtype=torch.float64)
