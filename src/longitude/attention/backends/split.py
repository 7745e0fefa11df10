"""Masks of several regions, region by region: each by the cheapest backend, so that only allowed pairs are computed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from longitude.attention.backends.base import Backend, cheapest, dense_bytes
from longitude.attention.masks import AllOf, AnyOf, Causal, Global, Mask, Pairs, Prefix
from longitude.attention.merge import merge_attention
from longitude.attention.not_finite import nan_where_attended
from longitude.attention.pairs import tensors_of
from longitude.attention.request import Request
from longitude.attention.spans import Cut, assembled
from longitude.native.derivatives import readable
from longitude.positions.terms import Drift, OffsetBias, OffsetVectors, PairBias


def split(r: Request) -> tuple[Tensor, Tensor | None]:
    """The output, and the logsumexp of the scores where it is requested."""
    match pattern(r):
        case AnyOf() as joined:
            return with_globals(r, joined)
        case Prefix() as prefix:
            return assembled(r, with_prefix(r, prefix), run_region)
    raise AssertionError(r.mask)


def pattern(r: Request) -> Mask | None:
    """The part of the mask that determines how to split it."""
    for kind in (AnyOf, Prefix):
        for part in r.pairs.beyond_band:
            if isinstance(part, kind) and (kind is not AnyOf or any(isinstance(m, Global) for m in members(part))):
                return part
    return None


def other_masks(r: Request, part: Mask) -> tuple[Mask, ...]:
    """The other parts of the mask."""
    return tuple(m for m in r.mask.parts() if m is not part)


# ---- who runs a region ---------------------------------------------------------------------------------------------------
def run_region(r: Request) -> tuple[Tensor, Tensor | None]:
    """A region by the cheapest backend: its output, and its logsumexp where wanted."""
    chosen = cheapest([r])

    def run(r: Request) -> tuple[Tensor, Tensor | None]:
        return chosen.partial(r) if r.lse and chosen.partial is not None else (chosen.run(r), None)

    return nan_where_attended(chosen, r, run)


def largest(r: Request) -> Request:
    """The region that costs most."""
    match pattern(r):
        case AnyOf() as joined:
            return local(r, joined)
        case Prefix() as prefix:
            return replace(r, mask=AllOf((Causal(), *other_masks(r, prefix))))
    raise AssertionError(r.mask)


# ---- a local mask | Global(tokens): two parts for all queries, and the rows of global ones ---------------------------------
def members(joined: Mask) -> list[Mask]:
    """The masks of (a | b) | c."""
    return [m for mask in joined.masks for m in members(mask)] if isinstance(joined, AnyOf) else [joined]


def local(r: Request, joined: AnyOf) -> Request:
    """The request without its global tokens."""
    near = tuple(m for m in members(joined) if not isinstance(m, Global))
    parts = near[0].parts() if len(near) == 1 else (AnyOf(near),)
    return replace(r, mask=AllOf((*parts, *other_masks(r, joined))), lse=True)


def with_globals(r: Request, joined: AnyOf) -> tuple[Tensor, Tensor | None]:
    near, others = local(r, joined), AllOf(other_masks(r, joined))
    out, lse = run_region(near)
    assert lse is not None
    queries, keys = r.q_tokens(), r.k_tokens()
    tokens = [m for m in members(joined) if isinstance(m, Global)]

    # Global keys that are not near, in one softmax with those that are.
    (places,) = torch.nonzero(of_all_rows(chosen(tokens, keys)), as_tuple=True)
    if len(places):
        order = keys[places]
        seen = others.allowed(queries, order) & ~near.mask.allowed(queries, order)
        seen = seen & across(chosen(tokens, order)[..., None, :])
        far, far_lse = run_region(picked(replace(r, lse=True), None, places, seen))
        assert far_lse is not None
        out, lse = merge_attention([out, far], [lse, far_lse])

    # Queries that are global themselves.
    (places,) = torch.nonzero(of_all_rows(chosen(tokens, queries)), as_tuple=True)
    if len(places):
        order = queries[places]
        full, full_lse = run_region(picked(r, places, None, others.allowed(order, keys)))
        theirs = across(chosen(tokens, order)[..., None])  # [n, 1] or [B, 1, n, 1]
        out = out.index_copy(2, places, torch.where(theirs, full, out[:, :, places]))
        if full_lse is not None:
            lse = lse.index_copy(2, places, torch.where(theirs[..., 0], full_lse, lse[:, :, places]))
    return out, lse if r.lse else None


def chosen(tokens: list[Global], order: Tensor) -> Tensor:
    """Whether each token is global in any of the masks, [L] or [B, L]."""
    return torch.stack(torch.broadcast_tensors(*(m.chosen(order) for m in tokens))).any(0)


def of_all_rows(tokens: Tensor) -> Tensor:
    """Whether each token [L] is true in any row of the batch."""
    return tokens if tokens.dim() == 1 else tokens.any(0)


def across(x: Tensor) -> Tensor:
    """[n, m] stays, [B, n, m] -> [B, 1, n, m]."""
    return x if x.dim() == 2 else x[:, None]


def picked(r: Request, rows: Tensor | None, keys: Tensor | None, seen: Tensor) -> Request:
    """The request of some queries (None: all) and some keys, where seen [Lq, Lk] or [B, 1, Lq, Lk] is the mask."""
    device = r.q.device
    rows_at = torch.arange(r.rows, device=device) if rows is None else rows
    keys_at = torch.arange(r.length, device=device) if keys is None else keys
    columns = torch.cat([r.q_order + rows_at, r.k_order + keys_at])
    terms = (replace(t, level=t.level[:, :, columns]) if isinstance(t, Drift) else t for t in r.terms)
    i, j = r.places()
    return replace(
        r,
        q=r.q if rows is None else r.q[:, :, rows],
        k=r.k if keys is None else r.k[:, :, keys],
        v=r.v if keys is None else r.v[:, :, keys],
        terms=tuple(terms),
        mask=Pairs(seen, 0, len(rows_at)),
        q_positions=i[..., rows_at],
        k_positions=j[..., keys_at],
        q_order=0,
        k_order=len(rows_at),
    )


# ---- Prefix: causal attention, and the rows of the prefix over it ----------------------------------------------------------
def with_prefix(r: Request, prefix: Prefix) -> Cut:
    others = other_masks(r, prefix)
    whole, open_ = (replace(r, mask=AllOf(masks)) for masks in ((Causal(), *others), others))
    cut: Cut = []
    for batch, length in lengths(prefix, r.q.shape[0]):
        inside = max(0, min(length - r.q_order, r.rows))
        if inside < r.rows:
            rows = slice(0 if whole.square else inside, r.rows)  # a square is what fused kernels like
            cut.append((batch, rows, whole.piece(rows, slice(0, r.length), batch)))
        if inside:
            rows, keys = slice(0, inside), slice(0, max(0, min(length - r.k_order, r.length)))
            cut.append((batch, rows, open_.piece(rows, keys, batch)))
    return cut


def lengths(prefix: Prefix, batch: int) -> list[tuple[slice | list[int], int]]:
    """Rows of the batch with the same prefix, and its length."""
    lengths = prefix.length.tolist() if isinstance(prefix.length, Tensor) else [prefix.length]
    if len(set(lengths)) == 1:
        return [(slice(None), lengths[0])]
    return [([b for b in range(batch) if lengths[b] == length], length) for length in sorted(set(lengths))]


# ---- what it declares ------------------------------------------------------------------------------------------------------
def split_limits(r: Request) -> str | None:
    shape = pattern(r)
    if shape is None:
        return "the mask has no prefix and no global tokens joined to a local mask"
    if not readable(*tensors_of(r.pairs.beyond_band)):
        return "the tokens that the mask names are unknown while compiling and under torch.func.vmap"
    if isinstance(shape, AnyOf) and all(isinstance(m, Global) for m in members(shape)):
        return "global tokens need a local mask joined to them by |"
    return None


def split_memory(r: Request) -> int:
    """Bytes that a call needs: those of its largest region, and the scores of global keys."""
    if split_limits(r) is not None:
        return 0
    region, shape, far = largest(r), pattern(r), 0
    if isinstance(shape, AnyOf):
        tokens = [m for m in members(shape) if isinstance(m, Global)]
        far = int(of_all_rows(chosen(tokens, r.k_tokens())).sum()) * dense_bytes(r) // r.length
    return cheapest([region]).memory(region) + far


def split_price(r: Request) -> float:
    """A little less than what its largest region costs where several backends could take that."""
    if len(r.pairs.beyond_band) == 0 or split_limits(r) is not None:
        return math.inf
    region = largest(r)
    return max(2.0, 0.9 * cheapest([region]).price(region))


SPLIT = Backend(
    "split",
    run=lambda r: split(r)[0],
    partial=split,  # type: ignore[arg-type]
    terms=(OffsetBias, PairBias, Drift, OffsetVectors),
    any_mask=True,  # split_limits names those that it cannot split
    dropout=True,
    limits=split_limits,
    memory=split_memory,
    price=split_price,
    by_weight=lambda r: False,  # run_region asks the backend of each region
)
