"""Documents where a compiler follows and nobody may look at them: each token's blocks out of a table of all blocks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.attention.layers.hierarchical.centres import bias_at, offset_terms, tables_at
from longitude.attention.layers.hierarchical.rule import Rule, weighted
from longitude.positions.composed import Composed


def over_tabled_blocks(
    rule: Rule,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B Hkv L D"],
    v: Float[Tensor, "B Hkv L Dv"],
    places: Int[Tensor, "B L"],
    begins: Bool[Tensor, "B L"],
    encoding: Composed,
) -> tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]]:
    """`over_blocks` for every token, the runs apart that begin at `begins`, in a fixed sequence of operations: the blocks of
    each size from each token on, of which a query picks those that its own run begins with. O(L log L) memory.
    """
    batch, length = q.shape[0], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    order = torch.arange(length, device=q.device).expand(batch, -1)
    start = torch.where(begins, order, 0).cummax(1).values
    prefix = (order - start - rule.window + 1).clamp(min=0)

    keys, values = k.to(wide), v.to(wide)
    picked: tuple[list[Tensor], ...] = [], [], [], []
    levels = max(1, (length - rule.window).bit_length()) if length > rule.window else 1
    for level in range(levels):
        first = (start + (((prefix >> level) - 1) << level)).clamp(0, length - 1)
        last = (first + (1 << level) - 1).clamp(max=length - 1)

        def at(x: Tensor, first: Tensor = first) -> Tensor:
            return x.gather(2, first[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        centre, digit = places.gather(1, first) + places.gather(1, last), prefix >> level & 1 == 1
        for found, x in zip(picked, (at(keys), at(values), centre, digit), strict=True):
            found.append(x)
        half = 1 << level  # beyond the end stands anything: no query picks it
        keys = rule.merges[0](level + 1, keys, keys.roll(-half, 2))
        values = rule.merges[1](level + 1, values, values.roll(-half, 2))

    keys, values = (torch.stack(x, 3) for x in picked[:2])  # [B, Hkv, L, levels, D]
    twice, seen = (torch.stack(x, 2) for x in picked[2:])  # [B, L, levels]
    if encoding.transforms:
        tables = tables_at(encoding, twice.flatten(1), wide)
        keys = encoding.keys(keys.flatten(2, 3), tables).view(keys.shape)
    rows = q.to(wide).unflatten(1, (keys.shape[1], -1))  # [B, Hkv, H/Hkv, L, D]
    scores = rule.scale * torch.einsum("bgrld,bglnd->bgrln", rows, keys)
    scores = scores + rule.sizes(torch.arange(levels, device=q.device), wide)
    if terms := offset_terms(encoding):
        bias = bias_at(terms, 2 * places[..., None] - twice, wide)  # [H, B, L, levels]
        scores = scores + bias.unflatten(0, (keys.shape[1], -1)).permute(2, 0, 1, 3, 4)
    weights, lse = weighted(scores, seen[:, None, None], rule.dropout)
    return torch.einsum("bgrln,bglnd->bgrld", weights, values).flatten(1, 2), lse.flatten(1, 2)
