"""Attention as a layer: projections, an encoding, a cache, and attend() between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.heads import ScoreOptions, head_sizes
from longitude.attention.layers.base import AttentionLayer, Call, attended, checked_call, normed, tables_of
from longitude.attention.mixer import MixerInputs, register_mixer
from longitude.errors import Positive
from longitude.positions.base import Encoding
from longitude.positions.composed import compose


@register_mixer("attention")
class MultiHeadAttention(AttentionLayer):
    """Self-attention (MHA, GQA, MQA): each head of keys and values serves num_heads / num_kv_heads heads of queries.

    x [B, L, dim] -> [B, L, dim]; the keywords of a call are Mixer.forward's. The layer does not call
    encoding.embed(x, positions): call it once, at the model's input.

    Args:
        dim: Width of x.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values: num_heads (None) for multi-head, 1 for multi-query, between for grouped-query.
        encoding: An Encoding, a list of them, or None.
        head_dim: Width of a head; None: dim / num_heads.
        bias: Whether the four projections have a bias.
        dropout: Dropout probability of the attention weights in training.
        scale: Factor of the scores; None: head_dim**-0.5.
        backend: As in `attend`.
        qk_norm: Whether each head of queries and keys is normalized by an RMSNorm, before the rotation. Use it when scores grow
            in training, as Qwen3 and Gemma 3 do.
        qk_norm_eps: Epsilon of these norms.
        xsa: Exclusive self attention: whether s times the part along the value of the same token is subtracted from each
            head's output, with s learned for each head, 0 at first. Use it when outputs repeat the token that attends.
        output_gate: Whether the output of attention is multiplied by sigmoid(W x) before o_proj. Use it when heads should be
            able to add nothing, instead of attending to the first token.
        softcap: As in `attend`. Use it when you compare with weights of Gemma 2, which have no qk_norm.
        short_conv: Places of short causal convolutions, each added to its input: "input", "qkv" or "kv", "output". Use
            them when no encoding tells neighbors apart, as under NoPE.
        conv_kernel: Tokens under a convolution, the token itself included; None: 4.

    Raises:
        ValueError: For sizes that do not divide, and options that `attend` does not support.

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, https://arxiv.org/abs/1706.03762; grouped heads: Ainslie et al. 2023,
        arXiv:2305.13245, https://arxiv.org/abs/2305.13245; gate: Qiu et al. 2025, arXiv:2505.06708,
        https://arxiv.org/abs/2505.06708; exclusive: Zhai 2026, arXiv:2603.09078,
        https://arxiv.org/abs/2603.09078; convolutions: Allen-Zhu 2025, arXiv:2512.17351, https://arxiv.org/abs/2512.17351.
    """

    widens = True
    rotates_values = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Encoding | Sequence[Encoding] | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        qk_norm_eps: Positive = 1e-6,
        xsa: bool = False,
        **options: Unpack[ScoreOptions],
    ):
        num_kv_heads, head_dim = head_sizes("MultiHeadAttention", dim, num_heads, num_kv_heads, head_dim)
        inner, kv = num_heads * head_dim, num_kv_heads * head_dim
        channels = {"input": dim, "qkv": inner + 2 * kv, "kv": 2 * kv, "output": dim}
        super().__init__(dim, inner, channels, **options)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else None
        self.xsa_strength = nn.Parameter(torch.zeros(num_heads)) if xsa else None
        self.q_proj = nn.Linear(dim, inner, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(inner, dim, bias=bias)
        self.encoding = compose(encoding)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.xsa_strength is not None:
            nn.init.zeros_(self.xsa_strength)

    def products(self, keys: float) -> float:
        return 2 * keys * self.num_heads * self.head_dim

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """Project, rotate, cache, attend, project."""
        cache = inputs.cache
        x, call, encoding = checked_call(self, x, inputs)
        if self.short_conv:
            x = self.convolve("input", x, call, inputs)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.short_conv:
            q, k, v = self.convolve_heads(q, k, v, call, inputs)
        heads = *x.shape[:2], -1, self.head_dim
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        token_values = v
        q, k = self.heads_placed(x, q, k)
        tables: Any = None
        if encoding.stable_keys and encoding.transforms:
            tables = inputs.tables or tables_of(encoding, call, inputs, q)
            q, k = encoding.queries_and_keys(q, k, tables)
            v = encoding.transform_values(v, tables) if encoding.rotate_values else v
        columns, carry = (
            self.columns_of(x, call, encoding, cache) if encoding.reads_tokens or self.choosing else ({}, None)
        )
        k_positions = call.positions
        if cache is not None:
            k, v, columns = cache.extend(k, v, call.positions, columns, carry, encoding)
            k_positions = cache.positions
        if q.dtype != k.dtype or v.dtype != k.dtype:  # a cache may store keys in a wider dtype
            q, v = q.to(k.dtype), v.to(k.dtype)
        finish, weigh = None, inputs.return_weights
        if self.choosing:
            call, columns, finish = self.narrowed(x, x, call, columns)
        out, weights = self.over_keys((q, k, v), call, encoding, columns, k_positions, self.scale, weigh, inputs.step)
        out = out if finish is None else finish(out)
        if encoding.rotate_values and encoding.stable_keys:  # else `attended` has rotated values and output
            out = encoding.restore_outputs(out, tables)
        if self.xsa_strength is not None:
            out = exclusive(out.to(x.dtype), token_values, self.xsa_strength)
        return self.result(out, weights, x, call, inputs)

    def convolve_heads(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, inputs: MixerInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projections [B, L, heads head_dim] after the convolutions "qkv" or "kv"."""
        sizes = q.shape[-1], k.shape[-1], v.shape[-1]
        if "kv" in self.short_conv:
            k, v = self.convolve("kv", torch.cat([k, v], -1), call, inputs).split(sizes[1:], -1)
        elif "qkv" in self.short_conv:
            q, k, v = self.convolve("qkv", torch.cat([q, k, v], -1), call, inputs).split(sizes, -1)
        return q, k, v

    def heads_placed(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, unchanged; a subclass may rotate them by positions that it computes from x."""
        return q, k

    over_keys = attended
    """Attend from the call's queries to all keys: [B, H, L, head_dim], and the weights if requested."""


def exclusive(
    out: Float[Tensor, "B H L D"], v: Float[Tensor, "B Hkv L D"], strength: Float[Tensor, " H"]
) -> Float[Tensor, "B H L D"]:
    """Outputs y - s (y.u) u, with u the unit vector of the same token's value in the head of keys that the head reads."""
    dtype = torch.promote_types(out.dtype, torch.float32)  # in float16 the norm of a value of zeros has no floor
    unit = F.normalize(v.to(dtype), dim=-1).repeat_interleave(out.shape[1] // v.shape[1], 1)
    along = (out.to(dtype) * unit).sum(-1, keepdim=True)
    return (out.to(dtype) - strength.to(dtype)[:, None, None] * along * unit).to(out.dtype)
