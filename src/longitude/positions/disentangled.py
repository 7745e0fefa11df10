"""DeBERTa's disentangled attention: queries and keys are each multiplied with a vector of the offset."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.native.derivatives import exporting
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.linear import WideLinear
from longitude.positions.terms import OffsetVectors, Scored, Term, require_shape


def log_bucket(offset: Tensor, span: int, max_distance: int) -> Tensor:
    """Buckets of offsets [...] as in DeBERTa v2, -span .. span: exact up to span/2, then logarithmically wider.

    With n = the distance and exact = span/2:  exact + ceil( ln(n/exact) / ln((max_distance - 1)/exact) * (exact - 1) ).
    """
    exact, n = span // 2, offset.abs()
    # Both logarithms in float32, as in the authors' code: the last bit decides what ceil makes of a border.
    farthest = torch.full_like(offset, max_distance - 1, dtype=torch.float32)
    log = (n.clamp(min=exact).float() / exact).log() / (farthest / exact).log() * (exact - 1)
    return torch.where(n <= exact, offset, offset.sign() * (exact + log.ceil().long()))


@dataclass(frozen=True)
class KeyVectors(Term):
    """A vector per bucket of offsets that keys read: score += scale key . table[bucket(offset)].

    Args:
        table: [heads of queries, rows, head_dim].
        row: the function from offsets [...] to rows of the table [...].
    """

    reads_positions = reads_query = True  # a rotation would turn the keys, too
    table: Tensor
    row: Callable[[Tensor], Tensor]

    def require(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_shape("KeyVectors.table", self.table, q, (q.shape[1], self.table.shape[1], q.shape[3]))

    def columns(self, r: Scored) -> int:
        """Vectors that keys are multiplied with: those of the table, or of all offsets where these are known and fewer."""
        count = self.table.shape[1]  # alone in exported graphs, whose length may be free
        return min(count, r.q.shape[2] + r.k.shape[2] - 1) if r.contiguous and not exporting() else count

    def numbers_of(self, r: Scored, pairs: int) -> int:
        (heads, _, width), (batch, rows) = self.table.shape, (r.q.shape[0], r.q.shape[2])
        columns = batch * r.k.shape[2] * self.columns(r)
        few = r.contiguous and rows * width <= self.columns(r)  # else positions may differ between sequences
        return heads * (width * pairs if few else columns)

    def dense(self, r: Scored, q: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
        i, j = r.places()
        offset, table = i[..., :, None] - j[..., None, :], self.table.to(q.dtype)
        if self.columns(r) < table.shape[1]:  # fewer offsets than rows: a row for each of them
            rows = offset[-1, 0] - offset
            table = table[:, self.row(offset[-1, 0] - torch.arange(self.columns(r), device=q.device))]
        else:
            rows = self.row(offset)
        keys = r.scale * r.k.to(q.dtype).repeat_interleave(q.shape[1] // r.k.shape[1], 1)
        # Few queries: fewer vectors than rows.
        if rows.dim() == 2 and not exporting() and rows.shape[0] * table.shape[2] <= table.shape[1]:
            return torch.einsum("bhkd,hqkd->bhqk", keys, table[:, rows])
        of_rows = keys @ table.mT  # [B, heads, Lk, rows]
        rows = rows.mT.expand(*of_rows.shape[:2], *rows.mT.shape[-2:]) if rows.dim() == 2 else rows.mT[:, None]
        return of_rows.gather(-1, rows.expand(*of_rows.shape[:3], -1)).mT

    def behind_zeros(self, width: int) -> Term:
        return replace(self, table=F.pad(self.table, (width, 0)))


@register("deberta")
class Disentangled(Encoding):
    """Disentangled attention: score(i, j) = (q_i . k_j + q_i . W_k E[i - j] + k_j . W_q E[i - j]) / sqrt(3 head_dim).

    E [2 span, dim] has a row for each offset from -span to span - 1, and offsets beyond share the outermost ones. W_k has no
    bias, W_q has one. Both are of the encoding, as in the first DeBERTa; v2 takes the layer's projections of content instead.

    Args:
        num_heads: heads of queries.
        head_dim: width of a head.
        dim: width of E.
        span: half the rows of E.
        max_distance: offsets beyond it share a row, and distances above span/2 share logarithmically wider buckets, as in v2
            (span 256, max_distance 512). None: a row for each offset.

    Source:
        He et al. 2021, arXiv 2006.03654, https://arxiv.org/abs/2006.03654
    """

    source = "He et al. 2021, https://arxiv.org/abs/2006.03654"
    learned = True

    def __init__(self, num_heads: int, head_dim: int, dim: int, span: int = 512, max_distance: int | None = None):
        super().__init__()
        if max_distance is not None and (span < 4 or span % 2 or max_distance <= span // 2 + 1):
            expected = "an even span of 4 or more, and max_distance above span/2 + 1"
            raise UsageError("Disentangled", expected, f"span={span}, max_distance={max_distance}")
        self.num_heads, self.head_dim, self.dim = num_heads, head_dim, dim
        self.span, self.max_distance = span, max_distance
        self.table = nn.Parameter(torch.empty(2 * span, dim))
        self.project_keys = WideLinear(dim, num_heads * head_dim, bias=False)
        self.project_queries = WideLinear(dim, num_heads * head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def row(self, offset: Tensor) -> Tensor:
        """Rows of E [...] at offsets [...]."""
        offset = offset.long()  # a sum with span may overflow int32
        bucket = offset if self.max_distance is None else log_bucket(offset, self.span, self.max_distance)
        return (bucket + self.span).clamp(0, 2 * self.span - 1)

    def queries(self, q: Tensor, prepared: None) -> Tensor:
        return q / math.sqrt(3)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        dtype = torch.promote_types(self.table.dtype, torch.float32)
        kind = self.table.device.type
        known = torch.amp.is_autocast_available(kind)  # not meta, on which transformers builds a model to load
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            for_queries, for_keys = (
                project(self.table.to(dtype)).to(dtype).unflatten(-1, (self.num_heads, self.head_dim)).movedim(1, 0)
                for project in (self.project_keys, self.project_queries)
            )
        reach = (self.max_distance or self.span) - 1
        return (
            OffsetVectors(lambda offset: for_queries[:, self.row(offset)], reach=reach),
            KeyVectors(for_keys / math.sqrt(3), self.row),
        )
