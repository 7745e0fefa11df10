"""Position as a bias of the scores: a formula of the offset or of both positions, or a learned number per bucket of offsets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import Positive, UsageError, Within, check_declared, check_sizes
from longitude.positions.base import Columns, Encoding, register
from longitude.positions.coordinates import constants, wide
from longitude.positions.formulas import NormalizedOffset
from longitude.positions.linear import WideLinear, is_plain
from longitude.positions.terms import OffsetBias, PairBias, Term

FORBIDDEN = -(2.0**12)
"""Bias of a key on the other side of a one-sided head: finite, and exact in every dtype, float16 included. Relative to the
query's token, with bias 0, its softmax weight is exactly 0 in float32 and bfloat16, because exp underflows below -104. A much
lower number would absorb the digits of scores in a row that has only such keys (for example at padding), and two orders of
summation would disagree."""

Future = Literal["symmetric", "one-sided"]
Kernel = Literal["log", "power"]


class FixedBias:
    """A relative position bias defined by constants: offsets [...] -> [heads, ...].

    A subclass is a frozen dataclass (eq=False) of numbers and tuples of numbers. Equal instances are the same function, so
    attention may compute their table once.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        # not the dataclass's hash: torch.compile (2.12) hashes before __init__, when there are no fields
        return hash(tuple(vars(self).values()))


def alibi_slopes(num_heads: int, bias_max: float = 8) -> list[float]:
    """The published slopes: 2^(-8h/H), h = 1 .. H, if H is a power of two.

    Otherwise the slopes of the next lower power of two, then every second slope of the next higher one, so they are not sorted.
    MPT's code takes those of the higher power only, every second from the second on, then every second from the first on: the
    same numbers. bias_max: replaces the 8; alibi_bias_max in MPT's configs.
    """

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-bias_max * h / n) for h in range(1, n + 1)]

    check_sizes("ALiBi", num_heads=num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    return geometric(power) + geometric(2 * power)[::2][: num_heads - power]


@register("alibi")
class ALiBi(Encoding):
    """ALiBi, a bias linear in the distance: score_h(i, j) += -m_h |i - j|, with a fixed slope m_h per head.

    The bias is added after the 1/sqrt(head_dim) scaling. It is not a mask: decoders need a causal mask, too.

    Args:
        num_heads: heads of queries.
        slopes: numbers of 0 or more, one per head; None: the published ones.
        future: bias of keys in the future, for encoders. "symmetric": as above. "one-sided": the first half of the heads
            attends to the past only, the second half to the future only, each half with the published slopes for its number of
            heads, as the paper's authors propose; every head attends to the query's own token. The other side has the finite
            bias FORBIDDEN.

    Raises:
        ValueError: another number of slopes than heads, or slopes below 0.

    Source:
        Press et al. 2022, arXiv 2108.12409, https://arxiv.org/abs/2108.12409
    """

    source = "Press et al. 2022, https://arxiv.org/abs/2108.12409"
    shared = True

    def __init__(self, num_heads: int, slopes: Sequence[float] | None = None, future: Future = "symmetric"):
        super().__init__()
        one_sided, half = future == "one-sided", num_heads // 2
        if one_sided and num_heads % 2:
            raise UsageError("ALiBi", "an even num_heads for future='one-sided'", num_heads)
        if slopes is None:
            slopes = 2 * alibi_slopes(half) if one_sided else alibi_slopes(num_heads)
        self.num_heads, self.future, self.slopes = num_heads, future, _numbers(slopes, num_heads)
        # The sign of the offsets that a head attends to; 0: all.
        self.sides = [1] * half + [-1] * half if one_sided else [0] * num_heads

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (OffsetBias(LinearBias(tuple(self.slopes), tuple(self.sides))),)


@dataclass(frozen=True, eq=False)
class LinearBias(FixedBias):
    """ALiBi: -slopes_h |offset|; FORBIDDEN where sides_h * offset < 0."""

    slopes: tuple[float, ...]
    sides: tuple[int, ...]

    def __call__(self, offset: Tensor) -> Tensor:
        def per_head(numbers: Sequence[float]) -> Tensor:
            return constants(numbers, wide(offset.device), offset.device).view(-1, *[1] * offset.dim())

        bias = -per_head(self.slopes) * offset.abs()
        return bias.masked_fill(per_head(self.sides) * offset < 0, FORBIDDEN) if any(self.sides) else bias


def _numbers(slopes: Sequence[float], heads: int) -> list[float]:
    """Slopes as floats; ValueError unless they are one number of 0 or more per head."""
    try:
        numbers = [float(m) for m in slopes]
    except (TypeError, ValueError):
        raise UsageError("ALiBi", "slopes to be a sequence of numbers", repr(slopes)) from None
    if len(numbers) != heads:
        raise UsageError("ALiBi", f"{heads} slopes, one per head", len(numbers))
    named = {f"slopes[{h}]": m for h, m in enumerate(numbers)}
    check_declared("ALiBi", dict.fromkeys(named, Annotated[float, Within(0)]), named)
    return numbers


class Kerple(Encoding):
    """A kernel of the distance, with two learned numbers per head.

        kind "log":   score_h(i, j) += -p_h ln(1 + a_h |i - j|)     the paper's best
        kind "power": score_h(i, j) += -a_h |i - j|^p_h             p = 1 is ALiBi with learned slopes

    a and p [num_heads] start uniform in (0, 1) and (0, 2), as in the authors' code. They are clamped to at least 0.01, the p of
    "power" also to at most 2. The clamp passes gradients through, so that a parameter can come back from a bound. (The authors
    overwrite the parameter at each pass; torch's clamp would stop its gradient.)

    Args:
        num_heads: heads of queries.
        kind: "log" or "power".
        shared: one module serves all layers, as in the authors' code.

    Source:
        Chi et al. 2022, arXiv 2205.09921, https://arxiv.org/abs/2205.09921
    """

    source = "Chi et al. 2022, https://arxiv.org/abs/2205.09921"
    learned = True
    score_tables = ("a", "p")
    smallest = 0.01

    def __init__(self, num_heads: int, kind: Kernel = "log", shared: bool = True):
        super().__init__()
        self.num_heads, self.kind, self.shared = num_heads, kind, shared
        self.a, self.p = nn.Parameter(torch.empty(num_heads)), nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.a, 0, 1)
        nn.init.uniform_(self.p, 0, 2)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        def at(offset: Tensor) -> Tensor:
            a = _within(self.a, self.smallest).view(-1, *[1] * offset.dim())
            p = _within(self.p, self.smallest, 2.0 if self.kind == "power" else None).view(a.shape)
            distance = offset.abs().to(a.dtype)
            if self.kind == "log":
                return -p * torch.log1p(a * distance)
            # exp(p ln x), because pow takes 8 times as long. -1e5 stands for ln 0: e^(-1e5 p) and its derivative by p are 0.
            log = torch.where(offset == 0, -1e5, distance.clamp(min=1).log())
            return -a * (p * log).exp()

        return (OffsetBias(at, of=self),)


def _within(x: Tensor, low: float, high: float | None = None) -> Tensor:
    """Clamp x, in float32 or wider, but pass its gradient through."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.detach().clamp(low, high) + (x - x.detach())  # x - x is exactly 0


@register("kerple_log")
def kerple_log(num_heads: int, shared: bool = True) -> Kerple:
    """KERPLE, a learned logarithmic bias: score_h(i, j) += -p_h ln(1 + a_h |i - j|), with a, p > 0 learned."""
    return Kerple(num_heads, "log", shared)


@register("kerple_power")
def kerple_power(num_heads: int, shared: bool = True) -> Kerple:
    """KERPLE, a learned power-law bias: score_h(i, j) += -a_h |i - j|^p_h, with a > 0, 0 < p <= 2 learned."""
    return Kerple(num_heads, "power", shared)


@register("sandwich")
class Sandwich(Encoding):
    """Sandwich, cosines of the distance: score_h(i, j) += (sum_k cos((i - j) / 10000^(2k/dim)) - dim/2) / (8h/H), k = 1 .. dim/2.

    The bias is the dot product of two sinusoidal position embeddings, shifted to 0 at offset 0 and divided by 8h/H for head h =
    1 .. H, so the first head has the strongest. It falls about logarithmically with the distance, though not monotonically.
    Nothing is learned.

    Args:
        num_heads: H, heads of queries.
        dim: width of the two embeddings, even; independent of the model's width.

    Source:
        Chi et al. 2023, arXiv 2212.10356, https://arxiv.org/abs/2212.10356
    """

    source = "Chi et al. 2023, https://arxiv.org/abs/2212.10356"
    shared = True

    def __init__(self, num_heads: int, dim: int = 128):
        super().__init__()
        if dim % 2:
            raise UsageError("Sandwich", "an even dim", dim)
        self.num_heads, self.dim = num_heads, dim

    def terms(self, context: Columns) -> tuple[Term, ...]:
        return (OffsetBias(CosineBias(self.num_heads, self.dim)),)


@dataclass(frozen=True, eq=False)
class CosineBias(FixedBias):
    """The bias of Sandwich."""

    num_heads: int
    dim: int

    def __call__(self, offset: Tensor) -> Tensor:
        distance = offset.to(wide(offset.device))
        total = torch.zeros_like(distance)
        # One by one: all cosines at once would take dim/2 times the memory of the bias.
        for k in range(1, 1 + self.dim // 2):
            total = total + (distance * 10_000 ** (-2 * k / self.dim)).cos() - 1
        head = torch.arange(1, self.num_heads + 1, dtype=distance.dtype, device=offset.device)
        return total / (8 * head / self.num_heads).view(-1, *[1] * offset.dim())


@register("fire")
class Fire(Encoding):
    """FIRE, a learned function of the offset: score_h(i, j) += mlp(psi(i - j) / (psi(max(i, L)) + eps))_h, psi(x) = ln(|cx| + 1).

    The argument of the mlp stays in [0, 1] at any length (progressive interpolation). For i below the threshold L the
    denominator is constant. Beyond it the offset is divided by a function of the query's position, which must therefore be
    absolute. For keys in the future psi measures |i - j|, and the argument may leave [0, 1]. L = |multiplier threshold|; c
    and the multiplier are learned; mlp is Linear(1, width), ReLU, Linear(width, num_heads).

    Args:
        num_heads: heads of queries.
        width: width of the mlp's hidden layer.
        c: initial value of c, above 0.
        threshold: L at initialization, in tokens.
        eps: added to the denominator.
        shared: one module serves all layers (FIRE-S in the paper); by default each layer has its own.

    Source:
        Li et al. 2024, arXiv 2310.04418, https://arxiv.org/abs/2310.04418
    """

    source = "Li et al. 2024, https://arxiv.org/abs/2310.04418"
    relative = False
    learned = True
    score_tables = ("c", "multiplier")

    def __init__(
        self,
        num_heads: int,
        width: int = 32,
        c: Positive = 0.1,
        threshold: Positive = 512.0,
        eps: Positive = 1e-6,
        shared: bool = False,
    ):
        super().__init__()
        self.num_heads, self.width, self.shared = num_heads, width, shared
        self.initial_c, self.threshold, self.eps = c, threshold, eps
        self.mlp = nn.Sequential(WideLinear(1, width), nn.ReLU(), WideLinear(width, num_heads))
        # [1], not []: torch's fully_shard does not support scalar parameters.
        self.c, self.multiplier = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, self.initial_c)
        nn.init.ones_(self.multiplier)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def terms(self, context: Columns) -> tuple[Term, ...]:
        dtype = torch.promote_types(self.c.dtype, torch.float32)  # never the model's bfloat16
        c, multiplier = self.c.to(dtype), self.multiplier.to(dtype)

        def psi(x: Tensor) -> Tensor:
            return torch.log1p((c * x.to(dtype)).abs())

        def scale_of(i: Tensor) -> Tensor:
            return psi(torch.maximum(i.to(dtype), (multiplier * self.threshold).abs())) + self.eps

        def through_layers(i: Tensor, j: Tensor) -> Tensor:
            """Bias of NormalizedOffset, computed by calling the mlp: hooks or adapters may change its layers."""
            with torch.autocast(i.device.type, enabled=False):
                share = psi(i - j) / scale_of(i)
                return self.mlp(share[..., None]).to(dtype).movedim(-1, -3)

        at = through_layers
        if is_plain(*self.mlp.modules()):
            at = NormalizedOffset(psi, scale_of, *(p.to(dtype) for p in self.mlp.parameters()))
        return (PairBias(at, numbers=2 * self.width),)


# ---- a number per bucket -----------------------------------------------------------------------------------------------
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


@dataclass(frozen=True, eq=False)
class Lookup:
    """A learned number per bucket: offsets [...] -> [heads, ...]. Equal buckets are the same function.

    entries: [heads, buckets].
    """

    bucket: Callable[[Tensor], Tensor]
    entries: Tensor

    def __call__(self, offset: Tensor) -> Tensor:
        return self.at(self.bucket(offset))

    def at(self, bucket: Tensor) -> Tensor:
        if bucket.is_cuda:  # there the gradient of index_select adds atomically
            return F.embedding(bucket, self.entries.mT).movedim(-1, 0)
        return self.entries.index_select(1, bucket.flatten()).view(-1, *bucket.shape)


@dataclass(frozen=True)
class T5Bucket:
    """`t5_bucket` with these numbers."""

    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __call__(self, offset: Tensor) -> Tensor:
        return t5_bucket(offset, self.num_buckets, self.max_distance, self.bidirectional)


@dataclass(frozen=True)
class Clip:
    """A bucket for each offset up to a distance on both sides, and all others in the last ones."""

    max_distance: int

    def __call__(self, offset: Tensor) -> Tensor:
        return offset.clamp(-self.max_distance, self.max_distance) + self.max_distance


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
            raise UsageError("T5", f"max_distance above {exact} with num_buckets={num_buckets}", max_distance)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.bidirectional, self.shared = bidirectional, shared
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def terms(self, context: Columns) -> tuple[Term, ...]:
        bucket = T5Bucket(self.num_buckets, self.max_distance, self.bidirectional)
        return (OffsetBias(Lookup(bucket, self.table.mT), reach=self.max_distance, of=self),)


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
        at = Lookup(Clip(self.max_distance), self.table)
        return (OffsetBias(at, reach=self.max_distance, of=self),)
