"""Position at the input: NoPE, or a sinusoid or a learned vector that is added to the token's embedding."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import Positive, UsageError
from longitude.positions.base import ENCODINGS, Encoding, register
from longitude.positions.coordinates import canonical, explicit, require_positions, wide
from longitude.positions.scaling.linear import Linear

Layout = Literal["interleaved", "half"]
SinusoidFrequencies = Literal["paper", "tensor2tensor"]


ENCODINGS.aliases["none"] = "nope"


@register("nope")
class NoPosition(Encoding):
    """NoPE, no position at all: order is known from the causal mask alone.

    Without a mask such a transformer is permutation-equivariant: its input is a bag of tokens.

    Source:
        Haviv et al. 2022, arXiv 2203.16634, https://arxiv.org/abs/2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466,
        https://arxiv.org/abs/2305.19466
    """

    source = (
        "Haviv et al. 2022, https://arxiv.org/abs/2203.16634; Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466"
    )
    shared = True


class AtInput(Encoding):
    """An encoding that adds a vector of width `dim` per position to the embeddings."""

    relative = False
    shared = True
    dim: int

    def positions_of(self, x: Tensor, positions: Tensor) -> Tensor:
        """Positions [L] or [B, L] of the tokens x [B, L, dim]; ValueError for other shapes."""
        who = type(self).__name__
        if x.shape[-1] != self.dim:
            raise UsageError(who, f"x [B, L, {self.dim}]", list(x.shape))
        return explicit(canonical(who, positions, x.shape[0], x.shape[-2]), x.shape[-2], x.device)


@register("sinusoidal")
class Sinusoidal(AtInput):
    """Sines and cosines of the position: x_p + PE(p), PE(p, 2i) = sin(p w_i), PE(p, 2i+1) = cos(p w_i), w_i = base^(-2i/dim).

    The dot product PE(p) . PE(q) is sum_i cos((p - q) w_i), a function of the offset alone. That of two sums x + PE is not.
    The paper multiplies the token embedding by sqrt(dim) first. This module does not: the model must.

    Args:
        dim: width of x. If it is odd, the last cosine is dropped with the paper's frequencies; with tensor2tensor's, the last
            column is zero, as in that code.
        base: above 0.
        layout: "interleaved" is sin, cos, sin, ... as in the paper; "half" is all sines, then all cosines, as in
            tensor2tensor, fairseq and Transformer-XL.
        frequencies: "paper", or "tensor2tensor" (fairseq, too), whose slowest is exactly 1/base: w_i = base^(-i/(dim/2 - 1)).
        factor: positions are divided by it, without rounding: position interpolation, for lengths above the training length.

    Source:
        Vaswani et al. 2017, arXiv 1706.03762, https://arxiv.org/abs/1706.03762
    """

    source = "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"

    def __init__(
        self,
        dim: int,
        base: Positive = 10_000.0,
        layout: Layout = "interleaved",
        frequencies: SinusoidFrequencies = "paper",
        factor: Positive = 1.0,
    ):
        super().__init__()
        if frequencies == "tensor2tensor" and dim < 2:
            raise UsageError("Sinusoidal", "dim of 2 or more for frequencies of tensor2tensor", dim)
        self.dim, self.base, self.layout, self.frequencies, self.factor = dim, base, layout, frequencies, factor

    def table(self, positions: Tensor) -> Tensor:
        """PE of positions [...]: [..., dim], float64 if the device has it."""
        paper = self.frequencies == "paper"
        half = math.ceil(self.dim / 2) if paper else self.dim // 2
        i = torch.arange(half, device=positions.device, dtype=wide(positions.device))
        exponent = 2 * i / self.dim if paper else i / max(half - 1, 1)
        angles = positions[..., None] * (self.base**-exponent / self.factor)
        both = [angles.sin(), angles.cos()]
        codes = torch.stack(both, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(both, -1)
        return F.pad(codes, (0, self.dim - codes.shape[-1]))  # an odd dim: cut the last cosine, or add zeros

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(self.positions_of(x, positions)).to(x.dtype)

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        return {**options, "factor": scheme.factor} if isinstance(scheme, Linear) and options["factor"] == 1 else None


@register("learned")
class Learned(AtInput):
    """Learned absolute position embeddings: x_p + s P[p], with P [M, dim], M = max_length rows, s = embedding_scale.

    The attribute max_length is the number of valid positions, M or `length`; others raise. P starts as N(0, 0.02^2).

    Args:
        max_length: M, the rows of the table.
        dim: width of x.
        length: the number of positions to which the table is stretched, by linear interpolation between neighbouring rows:
            position p reads row p (M-1)/(length-1), so that the last position reads the last row. It must be fixed beforehand:
            it moves every row except the first, so keys cached with another length would be stale. None: M positions.
        embedding_scale: s, above 0: the factor by which the model multiplies its token embeddings. P gets the same factor, so
            that its rows learn at the pace of the embeddings they are added to. None: the model's factor; 1 without a model.

    Source:
        Gehring et al. 2017, arXiv 1705.03122, https://arxiv.org/abs/1705.03122
    """

    source = "Gehring et al. 2017, https://arxiv.org/abs/1705.03122"
    learned = True

    def __init__(self, max_length: int, dim: int, length: int | None = None, embedding_scale: Positive | None = None):
        super().__init__()
        embedding_scale = 1.0 if embedding_scale is None else embedding_scale
        if length is not None and length <= max_length:
            raise UsageError("Learned", f"length above max_length={max_length}", length)
        self.rows, self.dim, self.length, self.embedding_scale = max_length, dim, length, embedding_scale
        self.max_length = length or max_length
        self.table = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        """Options of a table stretched to more positions; None if some rows were not trained and so cannot be interpolated."""
        whole = options["length"] is None and options["max_length"] == original
        return {**options, "length": length} if isinstance(scheme, Linear) and whole else None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = self.positions_of(x, positions)
        require_positions(positions, self.max_length, "Learned")
        return x + (self.embedding_scale * self.codes(positions)).to(x.dtype)

    def codes(self, positions: Tensor) -> Tensor:
        """Rows of the table [..., dim] at valid positions [...], or interpolations between two rows."""
        if self.length is None:
            return self.table[positions]
        last = self.rows - 1
        # The fractional row as quotient and remainder of integers, so that no rounding selects a neighboring row.
        stretched, run = positions.long() * last, self.length - 1
        below, rest = stretched // run, (stretched % run)[..., None]
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        low, high = (table[row.clamp(max=last)] for row in (below, below + 1))
        return low + rest.to(table.dtype) / run * (high - low)
