"""What is not finite reaches the queries that see it, and no others: 0 * NaN is NaN, so a weight of 0 alone hides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from longitude.attention.lengths import Part
from longitude.attention.reference import per_query_head
from longitude.attention.request import Request

ROWS = 256  # queries whose masks are looked at together


def kept_apart(parts: list[Part], out: Tensor, run: Callable[[list[Part]], Tensor]) -> Tensor:
    """The output [B, H, Lq, Dv] of `parts`, where queries that see only finite keys and values are computed again without the
    others, if any of these came through. It looks at the output alone while that is finite, and not at all where looking would
    stop the machine, or a compiler."""
    if torch.compiler.is_compiling() or type(out) is not Tensor or not out.is_cpu or _in_transform():
        return out
    if bool(out.detach().sum(dtype=torch.promote_types(out.dtype, torch.float32)).isfinite()):
        return out
    seen = torch.zeros(out.shape[:3], dtype=torch.bool)
    for part in parts:
        seen[part.batch, :, part.rows] = _sees(part.request)
    spoiled = ~out.detach().isfinite().all(-1) & ~seen
    for part in parts:
        spoiled[part.batch, :, part.rows] &= part.request.q.detach().isfinite().all(-1)
    if not bool(spoiled.any()):
        return out
    clean = run([replace(part, request=_without(part.request)) for part in parts])
    return torch.where(seen[..., None], out, clean)


def _finite(r: Request) -> Tensor:
    """Which keys and their values are finite, [B, Hkv, Lk]."""
    return r.k.detach().isfinite().all(-1) & r.v.detach().isfinite().all(-1)


def _sees(r: Request) -> Tensor:
    """Which queries see a key that is not finite, or its value, [B, H, Lq]."""
    lost = per_query_head(~_finite(r), r.heads).float()[..., None]
    rows = [(r.mask.allowed(tokens, r.k_tokens()).float() @ lost)[..., 0] > 0 for tokens in r.q_tokens().split(ROWS)]
    return torch.cat(rows, -1)


def _without(r: Request) -> Request:
    """The request with zeros for keys and values that are not finite."""
    lost = ~_finite(r)[..., None]
    return replace(r, k=r.k.masked_fill(lost, 0.0), v=r.v.masked_fill(lost, 0.0))


def _in_transform() -> bool:
    """Whether vmap or another transform of functions runs, in which numbers cannot be looked at."""
    return torch._C._are_functorch_transforms_active()
