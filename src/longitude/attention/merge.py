"""Merging of attention over parts of the keys, such as the parts of a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.attention.masks import kind_of
from longitude.errors import UsageError


def merge_attention(
    outs: Sequence[Float[Tensor, "B H Lq Dv"]], lses: Sequence[Float[Tensor, "B H Lq"]]
) -> tuple[Float[Tensor, "B H Lq Dv"], Float[Tensor, "B H Lq"]]:
    """Join attention of the same queries over disjoint sets of keys into attention over all of them.

        lse = log sum_p e^lse_p,    out = sum_p e^(lse_p - lse) out_p

    `attend(..., return_lse=True)` gives the parts, which may come in any order. Both results have gradients; a part without
    keys for a query gets zeros.

    Args:
        outs: The output [B, H, Lq, Dv] of each part.
        lses: The logsumexp of each part's scores, [B, H, Lq]; -inf for a query without keys in the part.

    Returns:
        The output in the dtype of outs, and its logsumexp in the dtype of lses or wider; zeros and -inf for a query without
        keys in any part.

    Raises:
        ValueError: There are no parts, or their numbers, shapes, dtypes or devices differ.
    """
    _require_parts(outs, lses)
    dtype = torch.promote_types(lses[0].dtype, torch.promote_types(outs[0].dtype, torch.float32))
    lse = torch.stack([x.to(dtype) for x in lses])
    top = lse.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)  # of a query without keys: -inf - -inf would be NaN
    weights = (lse - top).exp()
    total = weights.sum(0)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    weights = (weights / total).unsqueeze(-1)
    out = sum((weight * part for weight, part in zip(weights[1:], outs[1:], strict=True)), weights[0] * outs[0])
    return out.to(outs[0].dtype), (top + total.log()).masked_fill(nothing, -math.inf)


def with_logit(lse: Float[Tensor, "B H Lq"], logit: Float[Tensor, ...]) -> Float[Tensor, "B H Lq"]:
    """log(e^lse + e^logit). Derivatives of any order are finite if lse is -inf; those of torch.logaddexp are inf / inf."""
    nothing = lse == -math.inf
    return torch.where(nothing, logit, torch.logaddexp(lse.masked_fill(nothing, 0.0), logit))


def _require_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    lists = [x if isinstance(x, list | tuple) and all(isinstance(y, Tensor) for y in x) else [] for x in (outs, lses)]
    parts = [*zip(*lists, strict=False)]
    # No set: the hash of a length makes it a constant of a graph.
    kinds = [(out.shape, out.dtype, out.device, lse.dtype) for out, lse in parts]
    fits = len(parts) > 0 and len(outs) == len(lses)
    for kind, (out, lse) in zip(kinds, parts, strict=True):
        fits = fits and kind == kinds[0] and out.dim() == 4 and lse.shape == out.shape[:3]
        fits = fits and out.device == lse.device and out.is_floating_point() and lse.is_floating_point()
    if not fits:
        expected = (
            "a list of floating-point outputs [B, H, Lq, Dv] and a list of as many logsumexps [B, H, Lq], all alike"
        )
        got = f"{list(map(kind_of, outs))} and {list(map(kind_of, lses))}" if parts else f"{outs!r} and {lses!r}"
        raise UsageError("merge_attention", expected, got)
