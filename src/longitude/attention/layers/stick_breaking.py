"""Stick-breaking attention: weights without a softmax; the nearest keys take their parts first."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.backends.chunked import chunked
from longitude.attention.heads import HeadOptions
from longitude.attention.layers.base import Call, require_past
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.masks import Causal, Mask
from longitude.attention.mixer import MixerInputs, register_mixer, require_no_weights
from longitude.attention.not_finite import nan_where_attended
from longitude.attention.request import Request, checked_mask, require_options
from longitude.attention.terms import per_query_head
from longitude.errors import UsageError
from longitude.native.tensors import in_memory
from longitude.positions.contextual import running_sum

CACHED_ROWS = 64
"""Queries of a block on the CPU. Scores stay in a processor's cache between the passes over them."""


def stick_breaking(
    q: Float[Tensor, "B H Lq D"],
    k: Float[Tensor, "B Hkv Lk D"],
    v: Float[Tensor, "B Hkv Lk Dv"],
    *,
    mask: Mask | Bool[Tensor, "*B Lq Lk"] = Causal(),  # noqa: B008 (frozen)
    scale: float | None = None,
) -> tuple[Float[Tensor, "B H Lq Dv"], Float[Tensor, "B H Lq"]]:
    """Stick-breaking attention: each key takes a part of what the nearer keys have left.

        A_ij = sigmoid(z_ij) prod_{j<l<i} (1 - sigmoid(z_il)),   z_ij = scale q_i . k_j,   j < i
        out_i = sum_j A_ij v_j,   rest_i = prod_{l<i} (1 - sigmoid(z_il)) = 1 - sum_j A_ij

    Keys are j < i, as by default in the authors' code: the first token attends to nothing, its output is zeros and its rest 1.
    Products are sums of logarithms, in float32 or wider. Memory is a few blocks of [rows, Lk] scores.

    Args:
        q: Queries [B, H, Lq, D], the last Lq tokens of the keys.
        k: Keys [B, Hkv, Lk, D]; Hkv divides H.
        v: Values [B, Hkv, Lk, Dv].
        mask: A causal mask, as in `attend`. Keys that it hides take nothing.
        scale: Factor of q.k; None: D**-0.5.

    Returns:
        The output [B, H, Lq, Dv] and the rest [B, H, Lq], in the dtype of q.

    Raises:
        ValueError: As in `attend`, and for more queries than keys, or a mask that is not causal.

    Source:
        Tan et al. 2024, arXiv:2410.17980, https://arxiv.org/abs/2410.17980
    """
    mask = checked_mask(q, k, v, mask)
    require_options(scale, 0.0)
    rows, keys = q.shape[2], k.shape[2]
    if rows > keys:
        raise UsageError("stick_breaking", "queries that are the last of the keys", f"{rows} queries and {keys} keys")
    require_past("stick_breaking", mask)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    out, rest = _broken(Request(q, k, v, (), mask, keys - rows, 0, factor, q_order=keys - rows))
    return out.to(q.dtype), rest.to(q.dtype)


def _broken(r: Request) -> tuple[Tensor, Tensor]:
    """Output and rest of a request, in float32 or wider."""
    with torch.autocast(r.q.device.type, enabled=False):
        rows = CACHED_ROWS if in_memory(r.q) else None  # a GPU and a graph take large blocks
        return nan_where_attended(BACKENDS["reference"], r, partial(chunked, of_block=_of_block, rows=rows))


def _of_block(r: Request) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(r.q.dtype, torch.float32)
    # The last key first, so that sums run forwards: flipping keys costs less than flipping scores.
    k, v = (per_query_head(x.flip(2).to(dtype), r.heads) for x in (r.k, r.v))
    allowed = r.allowed() & (r.k_tokens() < r.q_tokens()[:, None])
    z = ((r.scale * r.q.to(dtype)) @ k.mT).masked_fill(~allowed.flip(-1), -math.inf)
    left = F.logsigmoid(-z)
    # Sums over the keys after each, without the key itself: in a difference of sums its large logarithm would cancel badly.
    before = F.pad(running_sum(left[..., :-1]), (1, 0))
    # Nothing smaller than 1e-28: exp and products take ten times as long for denormal numbers.
    weights = z.sigmoid() * before.clamp(min=0.75 * math.log(torch.finfo(dtype).tiny)).exp()
    weights = F.dropout(weights, r.dropout) if r.dropout else weights
    return weights @ v, left.sum(-1).exp()


@register_mixer("stick_breaking")
class StickBreaking(MultiHeadAttention):
    """Stick-breaking attention: the nearest keys take their parts of each query's weight first, without a softmax.

        A_ij = sigmoid(z_ij) prod_{j<l<i} (1 - sigmoid(z_il)),   z_ij = q_i . k_j / sqrt(head_dim),   j < i

    Recency is its only position. Use it if of several keys that match a query the nearest should win, without an encoding.
    Weights sum to at most 1. A token does not attend to itself, as by default in the authors' code, so the first token of a
    document gets zeros. Its cache keeps keys and values.

    Args:
        dim, num_heads, num_kv_heads, head_dim, bias, dropout, scale: As in MultiHeadAttention.
        qk_norm, qk_norm_eps, xsa, output_gate, short_conv, conv_kernel: As in MultiHeadAttention.

    Raises:
        ValueError: As MultiHeadAttention.

    Source:
        Tan et al. 2024, arXiv:2410.17980, https://arxiv.org/abs/2410.17980
    """

    source = "Tan et al. 2024, https://arxiv.org/abs/2410.17980"
    scores = rotates = widens = bidirectional = has_weights = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        **options: Unpack[HeadOptions],
    ):
        # Its own function computes it: backend and softcap would be ignored, and given twice they are a TypeError.
        super().__init__(dim, num_heads, num_kv_heads, None, backend="auto", softcap=None, **options)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Tensor:
        """Mix tokens as MultiHeadAttention does, without weights."""
        self.require(inputs.encoding)
        require_no_weights(self, inputs.return_weights)
        return super().mix_tokens(x, inputs)

    def over_keys(self, qkv: tuple[Tensor, Tensor, Tensor], call: Call, *others: Any) -> tuple[Tensor, None]:
        q, k, v = qkv
        pairs = call.pairs(q.shape[0], q.shape[2], k.shape[2], others[-1])
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        dropout, order = self.dropout if self.training else 0.0, pairs.q_order
        r = Request(q, k, v, (), pairs.mask, order, 0, scale, dropout, q_order=order, pairs=pairs)
        return _broken(r)[0].to(q.dtype), None
