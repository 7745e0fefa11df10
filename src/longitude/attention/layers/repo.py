"""RePo: attention with rotations by positions that a layer computes from its tokens."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.heads import AttendOptions
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.mixer import MixerInputs, register_mixer
from longitude.positions.rotation import Angles, Layout, by_heads, rotate_by_formula
from longitude.positions.scaling import rope_frequencies


@register_mixer("repo")
class RePoAttention(MultiHeadAttention):
    """RePo, context re-positioning: RoPE at real-valued positions that each layer computes from its tokens, one per head.

        z = W (silu(W_g x) * W_c x);   score(i, j) = scale (R_(z_i) q_i) . (R_(z_j) k_j),   R_z rotates pair k by z base^(-2k/d)

    Use it to study whether a model can lay out its context itself. Order enters by the causal mask and through earlier layers
    only, so the authors keep RoPE in the first third of the layers. Query heads have the positions of their key head; in the
    authors' code, which has as many key heads as query heads, each has its own. Positions of a call are not read.

    Args:
        dim, num_heads, num_kv_heads, head_dim, bias, dropout, scale, backend: As in MultiHeadAttention.
        qk_norm, qk_norm_eps, xsa, output_gate, softcap, short_conv, conv_kernel: As in MultiHeadAttention.
        position_dim: Width of the gate; None: dim / 8, rounded up, as in the authors' code.
        layout: Which numbers are a pair: "half" (k, k + head_dim/2), as in the authors' code; "interleaved" (2k, 2k + 1).
        base: Base of the rotation.

    Raises:
        ValueError: As MultiHeadAttention, and for an odd head_dim or an encoding that rotates.

    Source:
        Li et al. 2025, arXiv:2512.14391, https://arxiv.org/abs/2512.14391
    """

    source = "Li et al. 2025, https://arxiv.org/abs/2512.14391"
    rotates = widens = rotates_values = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        position_dim: int | None = None,
        layout: Layout = "half",
        base: float = 10_000.0,
        **options: Unpack[AttendOptions],
    ):
        super().__init__(dim, num_heads, num_kv_heads, None, **options)
        self.position_dim = -(-dim // 8) if position_dim is None else position_dim
        self.layout, self.base = layout, base
        self._frequencies(None)  # validates
        self.position_gate, self.position_content = (nn.Linear(dim, self.position_dim, bias=False) for _ in range(2))
        self.position_out = nn.Linear(self.position_dim, self.num_kv_heads, bias=False)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        self.require(inputs.encoding)
        return super().mix_tokens(x, inputs)

    def heads_placed(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, heads, L, head_dim], rotated by the positions of their tokens."""
        places = self.position_out(F.silu(self.position_gate(x)) * self.position_content(x)).mT[..., None]
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = places.to(dtype) * self._frequencies(x.device).to(dtype)  # [B, kv_heads, L, pairs]
        table = Angles(angles.cos(), angles.sin())
        placed = (rotate_by_formula(y.to(dtype), by_heads(table, y.shape[1]), self.layout).to(y.dtype) for y in (q, k))
        return tuple(placed)  # type: ignore[return-value]

    def _frequencies(self, device: torch.device | None) -> Tensor:
        return rope_frequencies(self.head_dim, self.base, device=device).inverse
