"""Position at the input: nothing, a sinusoid, or a learned row, added to the token's embedding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import unknown
from longitude.positions.base import (
    Encoding,
    canonical,
    check_positive,
    check_sizes,
    explicit,
    register,
    require_positions,
    wide,
)


@register("none")
class NoPosition(Encoding):
    """No position at all: order is known from the causal mask alone (Haviv et al. 2022; Kazemnejad et al. 2023).

    Without a mask such a transformer is permutation-equivariant: it sees a bag of tokens.
    """

    shared = True


@register("sinusoidal")
class Sinusoidal(Encoding):
    """x_p + PE(p), with PE(p, 2i) = sin(p w_i), PE(p, 2i+1) = cos(p w_i), w_i = base^(-2i/dim)  (Vaswani et al. 2017).

    The dot product of two codes is sum_i cos((p - q) w_i): a function of the offset alone, although the sum x + PE is not.
    The paper multiplies the token embedding by sqrt(dim) first; models do, this does not.

    dim: width of x. base: 10000. layout: "interleaved" is sin, cos, sin, ... as in the paper; "half" is all sines, then all
    cosines, as in tensor2tensor, fairseq and Transformer-XL. frequencies: "paper", or "tensor2tensor" (fairseq, too), whose
    slowest is exactly 1/base: w_i = base^(-i/(dim/2 - 1)). An odd dim drops the last cosine of the paper's frequencies, and
    ends in a column of zeros with tensor2tensor's, as that code does.
    """

    relative = False
    shared = True

    def __init__(self, dim: int, base: float = 10_000.0, layout: str = "interleaved", frequencies: str = "paper"):
        super().__init__()
        check_sizes("Sinusoidal", dim=dim)
        check_positive("Sinusoidal", base=base)
        if layout not in ("interleaved", "half"):
            raise ValueError(f"Sinusoidal: expected layout 'interleaved' or 'half', got {layout!r}")
        if frequencies not in ("paper", "tensor2tensor"):
            raise ValueError(f"Sinusoidal: expected frequencies 'paper' or 'tensor2tensor', got {frequencies!r}")
        if frequencies == "tensor2tensor" and dim < 2:
            raise ValueError(f"Sinusoidal: expected dim of 2 or more for frequencies of tensor2tensor, got {dim}")
        self.dim, self.base, self.layout, self.frequencies = dim, base, layout, frequencies

    def table(self, positions: Tensor) -> Tensor:
        """Positions [...] -> codes [..., dim], float64 where the device has it."""
        paper = self.frequencies == "paper"
        half = math.ceil(self.dim / 2) if paper else self.dim // 2
        i = torch.arange(half, device=positions.device, dtype=wide(positions.device))
        exponent = 2 * i / self.dim if paper else i / max(half - 1, 1)
        angles = positions[..., None] * self.base**-exponent
        sines, cosines = angles.sin(), angles.cos()
        if self.layout == "interleaved":
            codes = torch.stack([sines, cosines], -1).flatten(-2)
        else:
            codes = torch.cat([sines, cosines], -1)
        return F.pad(codes, (0, self.dim - codes.shape[-1]))  # an odd dim: cut the last cosine, or add zeros

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"Sinusoidal: expected x [B, L, {self.dim}], got {list(x.shape)}")
        positions = explicit(canonical("Sinusoidal", positions, x.shape[0], x.shape[-2]), x.shape[-2], x.device)
        return x + self.table(positions).to(x.dtype)


@register("learned")
class Learned(Encoding):
    """x_p + P[p], with P [M, dim] learned, M = max_length rows  (Gehring et al. 2017; BERT, GPT-2).

    The first row_offset rows of the table stay unused (2 in BART). P starts as N(0, 0.02^2). There is no row beyond the
    table; `beyond` says what becomes of positions of M or more:

    "error":       they raise. No other answer is right without training, so it is the default.
    "clamp":       they share the last row, P[M - 1], and cannot be told apart.
    "truncate":    embed keeps the first M tokens only: what it returns is shorter, and ids, masks and labels must be cut alike,
                   by truncate(). Positions of the tokens kept must have a row.
    "interpolate": the table is stretched to `length` positions, 0 .. length-1, by linear interpolation between neighbouring
                   rows: p reads row p (M-1)/(length-1) if align is "end" (the last position reads the last row), or
                   p M/length, at most M-1, if it is "start". Every row but the first moves with `length`, which is therefore
                   said beforehand and stays: keys cached under another length would be stale.

    max_length, the property, is how many positions exist: M, `length` where interpolated, None where clamped. A model that
    truncates cannot generate past M.
    """

    relative = False
    learned = True
    shared = True

    def __init__(
        self,
        max_length: int,
        dim: int,
        row_offset: int = 0,
        beyond: str = "error",
        length: int | None = None,
        align: str = "end",
    ):
        super().__init__()
        check_sizes("Learned", max_length=max_length, dim=dim)
        if isinstance(row_offset, bool) or not isinstance(row_offset, int) or row_offset < 0:
            raise ValueError(f"Learned: expected row_offset to be an int of 0 or more, got {row_offset!r}")
        if beyond not in (ways := ("error", "clamp", "truncate", "interpolate")):
            raise unknown("way for Learned to go beyond its table", beyond, ways, f"beyond: {', '.join(ways)}.")
        if align not in ("end", "start"):
            raise ValueError(f"Learned: expected align 'end' or 'start', got {align!r}")
        if beyond != "interpolate" and (length is not None or align != "end"):
            raise ValueError(
                f"Learned: expected length and align only with beyond='interpolate', got length={length!r}, "
                f"align={align!r} with beyond={beyond!r}; leave them out"
            )
        if beyond == "interpolate":
            if length is None:
                raise ValueError(
                    "Learned: expected length, the number of positions to interpolate to, got None; say it beforehand, because "
                    "interpolation moves every row with the length, and keys cached at another length would be stale"
                )
            check_sizes("Learned", length=length)
            if length <= max_length:
                raise ValueError(
                    f"Learned: expected length above max_length={max_length}, got {length}; leave beyond out"
                )
        self.rows, self.dim, self.row_offset = max_length, dim, row_offset
        self.beyond, self.length, self.align = beyond, length, align
        self.max_length = None if beyond == "clamp" else length or max_length
        self.table = nn.Parameter(torch.empty(max_length + row_offset, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"Learned: expected x [B, L, {self.dim}], got {list(x.shape)}")
        positions = explicit(canonical("Learned", positions, x.shape[0], x.shape[-2]), x.shape[-2], x.device)
        if self.beyond == "truncate":
            x, positions = x[:, : self.rows], positions[..., : self.rows]
        require_positions(positions, self.max_length, "Learned")
        return x + self.codes(positions).to(x.dtype)

    def codes(self, positions: Tensor) -> Tensor:
        """Positions [...] that exist -> rows of the table, or between two of them, [..., dim]."""
        last = self.rows - 1
        if self.length is None:
            return self.table[positions.clamp(max=last) + self.row_offset]
        # The fractional row as a whole number and a rest, in integers, so that no rounding moves it to a neighbour.
        rise, run = (last, self.length - 1) if self.align == "end" else (self.rows, self.length)
        stretched = positions.long() * rise
        below, rest = stretched // run, (stretched % run)[..., None]
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        low, high = (table[row.clamp(max=last) + self.row_offset] for row in (below, below + 1))
        return low + rest.to(table.dtype) / run * (high - low)

    def truncate(self, *tensors: Tensor, side: str = "first") -> tuple[Tensor, ...]:
        """Cuts ids, masks, labels [B, L, ...] to the tokens that have positions: the first max_length of them, or the last,
        whose positions then count from 0 again.
        """
        if side not in ("first", "last"):
            raise ValueError(f"Learned.truncate: expected side 'first' or 'last', got {side!r}")
        if self.max_length is None:
            raise ValueError(
                "Learned.truncate: expected a last position, got beyond='clamp', where all exist; do not truncate"
            )
        lengths = {tensor.shape[1] if tensor.dim() > 1 else None for tensor in tensors}
        if None in lengths or len(lengths) > 1:
            raise ValueError(
                f"Learned.truncate: expected tensors [B, L, ...] of one length, got {[list(t.shape) for t in tensors]}"
            )
        return tuple(t[:, : self.max_length] if side == "first" else t[:, -self.max_length :] for t in tensors)
