"""PyTorch's scaled_dot_product_attention, without a bias or with a small dense one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.base import NO_FORWARD_MODE, Backend, terms_bytes
from longitude.attention.backends.table.band import is_faster_in_c
from longitude.attention.request import Request
from longitude.attention.spans import by_spans, pieces, with_wide_values
from longitude.attention.terms import bias_of, drift_level, per_query_head
from longitude.native.derivatives import exporting, in_forward_mode
from longitude.positions.terms import Drift, OffsetBias, PairBias

SHORT_BYTES = 2**26  # of the largest dense bias


def sdpa_is_plain(r: Request) -> bool:
    """Whether a request has no terms, and no mask or only torch's is_causal (a query attends to keys up to its index)."""
    return len(r.terms) == 0 and (r.sees_all or r.square)


def sdpa(r: Request) -> Tensor:
    if r.v.shape[3] < r.k.shape[3] and r.rows > 1:
        return sdpa(with_wide_values(r))[..., : r.v.shape[3]]
    return by_spans(r, fused) if r.pairs.beyond_band and sdpa_by_spans(r) else fused(r)


class Added(NamedTuple):
    """Arguments of torch's scaled_dot_product_attention besides q, k and v.

    bias: additive bias or mask, [B or 1, H or 1, Lq, Lk]. causal: is_causal, instead of a mask. some: queries that attend to
    any key; None: all. grouped: whether query heads share keys. folded: whether the query heads that share keys become rows.
    """

    bias: Tensor | None
    causal: bool
    some: Tensor | None
    grouped: bool
    folded: bool


def added(r: Request) -> Added:
    plain, grouped = sdpa_is_plain(r), r.k.shape[1] != r.q.shape[1]
    causal = plain and not r.sees_all
    bias, some = (None, None) if plain else dense_bias(r)
    # With one query, the query heads that share a key head become rows of one product: their keys are read once.
    folded = grouped and r.rows == 1 and not causal
    if folded and bias is not None and bias.shape[1] > 1:
        bias = by_key_head(bias, r)
    return Added(bias, causal, some, grouped, folded)


def fused(r: Request) -> Tensor:
    """One call of scaled_dot_product_attention."""
    bias, causal, some, grouped, folded = r.once(added)
    q, scale = by_key_head(r.q, r) if folded else r.q, r.scale
    if causal and scale <= 0:  # torch's CPU kernel hides the future by -inf before it scales, and gives NaN
        q, scale = (-q, -scale) if scale else (0 * q, 1.0)
    # While compiling, these may be symbolic, and torch accepts only a bool; the tracer needs keyword arguments.
    shared = True if grouped and not folded else False  # noqa: SIM210
    options = {"is_causal": True if causal else False, "scale": scale, "enable_gqa": shared}  # noqa: SIM210
    out = F.scaled_dot_product_attention(q, r.k, r.v, attn_mask=bias, dropout_p=r.dropout, **options)
    out = not_zeros(out.flatten(1, 2)[:, :, None] if folded else out, r, causal, some)
    return out if some is None else out.masked_fill(~some, 0.0)


def not_zeros(out: Tensor, r: Request, causal: bool, some: Tensor | None) -> Tensor:
    """Set NaN for queries with scores that are all -inf or all NaN, for which torch's CPU kernel returns zeros.

    It returns zeros for all-NaN scores if they are fewer than fit its vectors. Zeros alone prove nothing: values may be zero,
    and dropout may leave no weight. some: queries with keys by the mask; None: all.
    """
    if torch.compiler.is_compiling() or type(out) is not Tensor or not out.is_cpu:
        return out
    first = (out.detach() if out.requires_grad else out).select(3, 0)
    # Return early without zeros: every decoded token comes here. For few numbers tolist() takes half as long as all().
    if torch._C._are_functorch_transforms_active():  # where values cannot choose a branch
        pass
    elif out.shape[2] == 1 and first.numel() <= 64:
        if not any([0.0] in heads for heads in first.tolist()):
            return out
    elif first.all():
        return out
    zeros = first == 0
    finite = per_query_head(r.k.detach().isfinite().all(-1), r.heads).to(r.q.dtype)  # [B, H, Lk]
    if causal:
        last = torch.arange(out.shape[2], device=out.device).clamp(max=r.length - 1)  # queries may outnumber the keys
        sound = finite.cummax(-1)[0][..., last]
    elif r.sees_all:
        sound = finite.amax(-1, keepdim=True)
    else:
        sound = (r.allowed().to(finite.dtype) @ finite[..., None])[..., 0]
    if some is not None:
        zeros = zeros & some[..., 0]
    lost = zeros & ((sound == 0) | ~r.q.detach().isfinite().all(-1))
    return out * torch.where(lost, math.nan, 1.0).to(out.dtype)[..., None]


def by_key_head(x: Tensor, r: Request) -> Tensor:
    """[B, H, 1, n] -> [B, Hkv, H / Hkv, n]."""
    return x[:, :, 0].unflatten(1, (r.k.shape[1], -1))


def dense_bias(r: Request) -> tuple[Tensor | None, Tensor | None]:
    """Additive bias or bool mask [B or 1, H or 1, Lq, Lk], and the queries that attend to any key; None: no bias, all."""
    added = []
    for term in r.terms:
        if isinstance(term, OffsetBias):
            added.append(offset_bias(term, r))
        elif isinstance(term, PairBias):
            added.append(term.bias(r))
    if (level := drift_level(r)) is not None:
        added.append(level[..., r.q_tokens(), None] - level[..., None, r.k_tokens()])
    added = [x if x.dim() == 4 else x[None] for x in (x.to(r.q.dtype) for x in added)]
    bias = sum(added[1:], added[0]) if added else None
    if r.sees_all:
        return bias, None
    allowed = r.allowed()
    allowed = allowed[(None,) * (4 - allowed.dim())]
    some = allowed.any(-1, keepdim=True)  # a query with no key attends to all, and is then set to zero
    allowed = allowed | ~some
    return allowed if bias is None else bias.masked_fill(~allowed, -math.inf), some


def offset_bias(term: OffsetBias, r: Request) -> Tensor:
    """A bias of offsets, [H, Lq, Lk] or [B, H, Lq, Lk]. At contiguous positions each row is the row below, shifted by one."""
    q_first, k_first = r.q_positions, r.k_positions
    if not isinstance(q_first, int) or not isinstance(k_first, int) or torch.compiler.is_compiling():
        return term.bias(r)  # compilers, too: unfold would need a graph for each length
    along = bias_of(term, q_first + r.rows - 1 - k_first, q_first - k_first - r.length + 1, r.q, r.q.dtype)
    bias = along.unfold(1, r.length, 1)
    return bias.flip(1) if r.rows > 1 else bias


def sdpa_by_spans(r: Request) -> bool:
    """Whether to run span by span, without padding. Not for a single query: its dense bias is no larger than its keys."""
    return r.rows > 1 and len(r.pairs.beyond_band) > 0 and not isinstance(r.pairs.spans, str)


def sdpa_dense(r: Request) -> list[Request]:
    """The request, or those of its spans, that need a dense bias."""
    cut = pieces(r) if sdpa_by_spans(r) else [(slice(None), slice(0, r.rows), r)]
    assert not isinstance(cut, str), cut
    return [piece for _, _, piece in cut if not sdpa_is_plain(piece)]


def sdpa_bias_bytes(r: Request) -> int:
    heads = r.heads if r.terms else 1
    per_row = r.pairs.beyond_band or not r.contiguous
    return (r.q.shape[0] if per_row else 1) * heads * r.rows * r.length * r.q.element_size()


def sdpa_memory(r: Request) -> int:
    """Bytes of the dense bias and of its terms. A bias of offsets takes two float64 buffers more: offsets and product."""
    of_pairs = all(isinstance(term, PairBias) for term in r.terms)
    times = (2 if of_pairs else 2 + 2 * 8 // r.q.element_size()) if r.terms else 1
    return max([0, *(sdpa_bias_bytes(part) * times + terms_bytes(part) for part in sdpa_dense(r))])


def sdpa_limits(r: Request) -> str | None:
    if r.q.is_cpu and in_forward_mode():
        return NO_FORWARD_MODE
    for part in sdpa_dense(r):
        if r.terms and r.q.dtype in (torch.bfloat16, torch.float16):
            return f"its dense bias would be rounded to {r.q.dtype}"
        if not exporting() and (size := sdpa_bias_bytes(part)) > SHORT_BYTES:
            return f"its dense bias would take {size / 2**20:.0f} MiB, above {SHORT_BYTES // 2**20}"
    return None


def sdpa_price(r: Request) -> float:
    """Without a bias, spans cost little more than one call. So does a single query: its bias is far smaller than its keys."""
    if sdpa_is_plain(r):
        return 1.25 if is_faster_in_c(r) else 1.0
    if sdpa_by_spans(r) and not sdpa_dense(r):
        return 1.1
    return 1.1 if r.rows == 1 and r.pairs.band[1] is None else 4.0


SDPA = Backend(
    "sdpa",
    run=sdpa,
    terms=(OffsetBias, PairBias, Drift),
    any_mask=True,
    table_gradients=False,
    dropout=True,
    limits=sdpa_limits,
    memory=sdpa_memory,
    price=sdpa_price,
    by_weight=lambda r: not sdpa_by_spans(r),
)
