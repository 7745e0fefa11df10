"""Position by rotation: queries and keys turn with their place, so their product knows the offset alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from longitude.positions.base import Encoding, positive, register, require_positions, sizes, wide


class Frequencies(NamedTuple):
    """inverse [rotary_dim/2]: radians per position, float64. attention_factor: multiplies cos and sin."""

    inverse: Tensor
    attention_factor: float


def rope_frequencies(
    head_dim: int, base: float = 10_000.0, rotary_dim: int | None = None, device: torch.device | None = None
) -> Frequencies:
    """theta_k = base^(-2k/rotary_dim), k = 0 .. rotary_dim/2 - 1  (Su et al. 2021, section 3.2.2)."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    sizes("rope", head_dim=head_dim, rotary_dim=rotary_dim)
    positive("rope", base=base)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rope: expected an even rotary_dim of at most head_dim={head_dim}, got {rotary_dim}")
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=wide(device or torch.device("cpu")))
    return Frequencies(base ** (-pair / rotary_dim), 1.0)


class Turn(NamedTuple):
    """cos and sin of position * frequency, [L, rotary_dim/2] or [B, 1, L, rotary_dim/2]: one table for all heads."""

    cos: Tensor
    sin: Tensor


@register("rope")
class Rotary(Encoding):
    """Pair k of a query or key at position p turns by the angle p theta_k  (RoPE, Su et al. 2021):

        (x, y) -> (x cos - y sin, x sin + y cos),    theta_k = base^(-2k/rotary_dim)

    so that q_i . k_j depends on i - j alone, and norms stay. Values do not turn.

    layout, required, because checkpoints of both kinds exist and differ: "interleaved" turns neighbours (2k, 2k+1), as in
    the paper, GPT-J and DeepSeek; "half" turns (k, k + rotary_dim/2), as in GPT-NeoX and Llama. rotary_dim: only the first
    rotary_dim dimensions turn (default: all). angle_dtype "float64" makes angles in float64 where the device has it;
    "float32" repeats the rounding of most ports.

    Errors: ValueError for an odd or too large rotary_dim, an unknown layout, positions that are negative or no integers.
    """

    shared = True
    model_defaults = {"layout": "interleaved"}  # one complex product; q.k is the same in both layouts when trained so

    def __init__(
        self,
        head_dim: int,
        layout: str,
        base: float = 10_000.0,
        rotary_dim: int | None = None,
        angle_dtype: str = "float64",
    ):
        super().__init__()
        if layout not in ("half", "interleaved"):
            raise ValueError(
                f"rope: expected layout 'half' (GPT-NeoX, Llama) or 'interleaved' (paper, GPT-J), got {layout!r}"
            )
        if angle_dtype not in ("float64", "float32"):
            raise ValueError(f"rope: expected angle_dtype 'float64' or 'float32', got {angle_dtype!r}")
        rope_frequencies(head_dim, base, rotary_dim)  # validates
        self.head_dim, self.layout, self.base, self.angle_dtype = head_dim, layout, base, angle_dtype
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim

    def prepare(self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32) -> Turn:
        """positions [L] or [B, L] -> cos and sin, float32 or wider."""
        require_positions(positions, who="rope")
        # Numbers, not buffers: nothing to save, to move, or to round with the model.
        inverse, factor = rope_frequencies(self.head_dim, self.base, self.rotary_dim, positions.device)
        angle_dtype = getattr(torch, self.angle_dtype) if positions.device.type != "mps" else torch.float32
        # Elementwise: a matrix product may round to TF32.
        angles = positions[..., None].to(angle_dtype) * inverse.to(angle_dtype)
        if angles.dim() == 3:
            angles = angles[:, None]
        dtype = torch.promote_types(dtype, torch.float32)
        return Turn((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))

    def queries(self, q: Tensor, prepared: Turn) -> Tensor:
        if q.shape[-1] != self.head_dim:
            raise ValueError(f"rope: expected [B, H, L, {self.head_dim}], got {list(q.shape)}")
        if self.rotary_dim == self.head_dim:
            return self.turned(q, prepared)
        return torch.cat([self.turned(q[..., : self.rotary_dim], prepared), q[..., self.rotary_dim :]], -1)

    def keys(self, k: Tensor, prepared: Turn) -> Tensor:
        return self.queries(k, prepared)

    def turned(self, x: Tensor, turn: Turn) -> Tensor:
        """x [B, H, L, rotary_dim] -> the same shape and dtype, turned in float32 or wider."""
        cos, sin = turn
        wider = x.to(torch.promote_types(x.dtype, cos.dtype))
        if self.layout == "half":
            a, b = wider.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
        if torch.compiler.is_compiling():  # compilers fuse the real form and know no complex numbers
            a, b = wider.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
        pairs = torch.view_as_complex(even(wider).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2).to(x.dtype)


def even(x: Tensor) -> Tensor:
    """x itself if its memory can be read as complex numbers, else a copy."""
    readable = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return x if readable else x.clone(memory_format=torch.contiguous_format)
