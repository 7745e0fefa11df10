"""Position as a learned bias per head and bucket of offsets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.positions.base import Columns, Encoding, OffsetBias, Term, register


def t5_bucket(offset: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False) -> Tensor:
    """T5 buckets [...], int64, of offsets query - key [...]: one per distance at first, then logarithmically wider.

    With n = the distance and exact = buckets/2:  n if n < exact, else
    exact + trunc( ln(n/exact) / ln(max_distance/exact) * (buckets - exact) ), at most buckets - 1.
    Bidirectional: the lower half of the buckets is for the past, the upper half for keys to the right. Otherwise keys to the
    right share bucket 0.
    """
    buckets = num_buckets // 2 if bidirectional else num_buckets
    right = (offset < 0).long() * buckets if bidirectional else torch.zeros_like(offset)
    n = offset.abs() if bidirectional else offset.clamp(min=0)
    exact = buckets // 2
    # float32 gives every bucket that exact arithmetic gives, for distances below twice max_distance.
    log = (n.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    return right + torch.where(n < exact, n, (exact + log.long()).clamp(max=buckets - 1))


@register("t5")
class T5Bias(Encoding):
    """T5 bias, a number per bucket of offsets: score_h(i, j) += table[bucket(i - j), h].

    T5 itself leaves out the 1/sqrt(head_dim) scaling: its models use scale=1. table [num_buckets, num_heads] starts as
    N(0, 0.02^2).

    Args:
        num_heads: heads of queries.
        num_buckets: rows of the table, 2 or more; if bidirectional, 4 or more and even.
        max_distance: all distances of this many tokens or more share the last bucket.
        bidirectional: True in encoders: keys to the right have separate buckets; False in decoders.
        shared: one table serves all layers of a stack, as in T5.

    Source:
        Raffel et al. 2020, arXiv 1910.10683, https://arxiv.org/abs/1910.10683
    """

    source = "Raffel et al. 2020, https://arxiv.org/abs/1910.10683"
    learned = True
    score_tables = ("table",)

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        shared: bool = True,
    ):
        super().__init__()
        smallest, even = (4, " and even") if bidirectional else (2, "")
        if num_buckets < smallest or (bidirectional and num_buckets % 2):
            raise UsageError("T5", f"num_buckets of {smallest} or more{even}", num_buckets)
        exact = num_buckets // smallest
        if max_distance <= exact:
            raise UsageError(
                "T5",
                f"max_distance above {exact}, as num_buckets={num_buckets} keeps {exact} single distances apart",
                max_distance,
            )
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.bidirectional, self.shared = bidirectional, shared
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            bucket = t5_bucket(offset, self.num_buckets, self.max_distance, self.bidirectional)
            return F.embedding(bucket, self.table).movedim(-1, 0)

        return (OffsetBias(at, reach=self.max_distance, of=self),)


@register("clipped")
class ClippedBias(Encoding):
    """A learned bias per offset, clipped at D: score_h(i, j) += table[h, clamp(i - j, -D, D) + D].

    table [num_heads, 2 max_distance + 1] starts at zero; column 0 belongs to the far future, the last to the far past.

    Args:
        num_heads: heads of queries.
        max_distance: D. Code that clamps offsets at r_max - 1 has max_distance = r_max - 1: the default for r_max = 128.
        shared: one table serves all layers; by default each has its own.

    Source:
        A bias for every offset: Liu et al. 2021, arXiv 2103.14030, https://arxiv.org/abs/2103.14030; clipping: Shaw et al. 2018,
        arXiv 1803.02155, https://arxiv.org/abs/1803.02155
    """

    source = "Liu et al. 2021, https://arxiv.org/abs/2103.14030; Shaw et al. 2018, https://arxiv.org/abs/1803.02155"
    learned = True
    score_tables = ("table",)

    def __init__(self, num_heads: int, max_distance: int = 127, shared: bool = False):
        super().__init__()
        self.num_heads, self.max_distance, self.shared = num_heads, max_distance, shared
        self.table = nn.Parameter(torch.empty(num_heads, 2 * max_distance + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            column = offset.clamp(-self.max_distance, self.max_distance) + self.max_distance
            return self.table.index_select(1, column.flatten()).view(-1, *column.shape)

        return (OffsetBias(at, reach=self.max_distance, of=self),)
