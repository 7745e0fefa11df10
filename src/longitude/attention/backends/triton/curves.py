# type: ignore  (a language of its own)
"""FIRE's bias in a block of scores, in Triton: a piecewise linear function of a distance times a number of the query's.

    bias[i, j] = slope_m t + level_m,  t = distance[i - j] rate_i,  m the piece that t is in: end_(m-1) < t <= end_m

`NormalizedOffset` defines it. In a block of queries and keys t stays in a small range, so most blocks have one piece; at each end
of a piece within the range the slope changes, and the function goes on without a jump. A curve is [3, pieces]: slopes, levels, ends.
"""

import triton
import triton.language as tl

@triton.jit
def ends_of(curve, pieces, ENDS: tl.constexpr):
    """The ends [ENDS] of all pieces but the last, which has none; infinite ones behind them."""
    m = tl.arange(0, ENDS if ENDS else 1)
    return tl.load(curve + 2 * pieces + m, mask=m < pieces - 1, other=float("inf")) if ENDS else m


@triton.jit
def pieces_of(ends, distances, column, nearest, fast, slow, Q: tl.constexpr, K: tl.constexpr,
              ENDS: tl.constexpr):  # fmt: skip
    """The first and the last piece of a block.

    column: of the block's first query and key in the row of distances, which never fall away from the column `nearest`;
    fast, slow: the greatest and the smallest rate of the queries.
    """
    if ENDS:
        left, right = column - (K - 1), column + (Q - 1)
        near = tl.load(distances + tl.minimum(tl.maximum(nearest, left), right))
        far = tl.maximum(tl.load(distances + left), tl.load(distances + right))
        low, high = tl.minimum(near * slow, near * fast), tl.maximum(far * slow, far * fast)
        found = tl.sum((ends < low).to(tl.int32)), tl.sum((ends < high).to(tl.int32))
    else:
        found = 0, 0
    return found


@triton.jit
def bend(t, curve, pieces, first, last):
    """What is added to scores at t, in the units of slopes and levels."""
    y = tl.load(curve + first) * t + tl.load(curve + pieces + first)
    if first < last:
        shift = 0.0
        for m in range(first, last):
            # Beyond the end the slope is another: change max(t, end) - change end, whose second part is the same for all.
            end, change = tl.load(curve + 2 * pieces + m), tl.load(curve + m + 1) - tl.load(curve + m)
            y += change * tl.maximum(t, end)
            shift += change * end
        y -= shift
    return y


@triton.jit
def _add(at, of_t, of_y):
    """Sums over keys of two blocks, added to two rows of numbers, one behind the other."""
    queries: tl.constexpr = of_t.shape[0]
    at += tl.arange(0, queries)
    tl.store(at, tl.load(at) + tl.sum(of_t, 1))
    tl.store(at + queries, tl.load(at + queries) + tl.sum(of_y, 1))


@triton.jit
def unbend(t, of_y, curve, pieces, first, last, sums):
    """Gradients of t, [Q, K], where those of the bias are of_y; what slopes and levels get is added to `sums` [pieces, 2, Q]."""
    queries: tl.constexpr = of_y.shape[0]
    slope, rest = tl.load(curve + first), of_y
    slope = tl.zeros_like(t) + slope
    if first < last:
        for m in range(first, last):
            beyond = t > tl.load(curve + 2 * pieces + m)
            own = tl.where(beyond, 0.0, rest)
            _add(sums + m * 2 * queries, own * t, own)
            slope = tl.where(beyond, tl.load(curve + m + 1), slope)
            rest = tl.where(beyond, rest, 0.0)
    _add(sums + last * 2 * queries, rest * t, rest)
    return slope * of_y
