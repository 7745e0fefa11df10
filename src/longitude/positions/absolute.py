"""Position at the input: nothing, a sinusoid, or a learned row, added to the token's embedding."""

import math

import torch
from torch import Tensor, nn

from longitude.positions.base import Encoding, positive, register, require_positions, sizes, wide


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
    An odd dim drops the last cosine. The paper multiplies the token embedding by sqrt(dim) first; models do, this does not.

    dim: width of x. base: 10000. layout: "interleaved" is sin, cos, sin, ... as in the paper; "half" is all sines, then all
    cosines. frequencies: "paper", or "tensor2tensor", whose slowest is exactly 1/base: w_i = base^(-i/(dim/2 - 1)).
    """

    relative = False
    shared = True

    def __init__(self, dim: int, base: float = 10_000.0, layout: str = "interleaved", frequencies: str = "paper"):
        super().__init__()
        sizes("Sinusoidal", dim=dim)
        positive("Sinusoidal", base=base)
        if layout not in ("interleaved", "half"):
            raise ValueError(f"Sinusoidal: expected layout 'interleaved' or 'half', got {layout!r}")
        if frequencies not in ("paper", "tensor2tensor"):
            raise ValueError(f"Sinusoidal: expected frequencies 'paper' or 'tensor2tensor', got {frequencies!r}")
        self.dim, self.base, self.layout, self.frequencies = dim, base, layout, frequencies

    def table(self, positions: Tensor) -> Tensor:
        """positions [...] -> codes [..., dim], float64 where the device has it."""
        half = math.ceil(self.dim / 2)
        i = torch.arange(half, device=positions.device, dtype=wide(positions.device))
        exponent = 2 * i / self.dim if self.frequencies == "paper" else i / max(half - 1, 1)
        angles = positions[..., None] * self.base**-exponent
        sines, cosines = angles.sin(), angles.cos()
        if self.layout == "interleaved":
            codes = torch.stack([sines, cosines], -1).flatten(-2)
            return codes[..., : self.dim]
        return torch.cat([sines, cosines[..., : self.dim - half]], -1)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"Sinusoidal: expected x [B, L, {self.dim}], got {list(x.shape)}")
        require_positions(positions, who="Sinusoidal")
        return x + self.table(positions).to(x.dtype)


@register("learned")
class Learned(Encoding):
    """x_p + P[p], with P [max_length, dim] learned  (Gehring et al. 2017; BERT, GPT-2).

    There is no row beyond the table: positions of max_length or more raise. row_offset rows come first and stay unused
    (2 in BART). P starts as N(0, 0.02^2).
    """

    relative = False
    learned = True
    shared = True

    def __init__(self, max_length: int, dim: int, row_offset: int = 0):
        super().__init__()
        sizes("Learned", max_length=max_length, dim=dim)
        if not isinstance(row_offset, int) or row_offset < 0:
            raise ValueError(f"Learned: expected row_offset to be an int of 0 or more, got {row_offset!r}")
        self.max_length, self.dim, self.row_offset = max_length, dim, row_offset
        self.table = nn.Parameter(torch.empty(max_length + row_offset, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"Learned: expected x [B, L, {self.dim}], got {list(x.shape)}")
        require_positions(positions, self.max_length, "Learned")
        return x + self.table[positions + self.row_offset].to(x.dtype)
