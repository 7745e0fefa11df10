"""FIRE's bias in a block of scores, in Triton: a piecewise linear function of distance times a rate of the query.

    bias[i, j] = slope_m t + level_m,  t = distance[i - j] rate_i,  m the piece that t is in: end_(m-1) < t <= end_m

`NormalizedOffset` defines it. In a block of queries and keys t stays in a small range, so most blocks have one piece. At the
end of a piece within the range the slope changes, and the function is continuous. A curve is [3, pieces]: slopes, levels, ends.
"""

import triton
import triton.language as tl


@triton.jit
def ends_of(curve, pieces, ENDS: tl.constexpr):
    """Ends [ENDS] of all pieces except the last, which has none, padded with infinity."""
    m = tl.arange(0, ENDS if ENDS else 1)
    return tl.load(curve + 2 * pieces + m, mask=m < pieces - 1, other=float("inf")) if ENDS else m


@triton.jit
def pieces_of(ends, distances, column, nearest, fast, slow, Q: tl.constexpr, K: tl.constexpr,
              ENDS: tl.constexpr):  # fmt: skip
    """Indices of the first and the last piece in a block of scores.

    column: column of the block's first query and key in the row of distances, which never decrease away from `nearest`.
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
def bend(s, t, curve, pieces, low, high):
    """Scores s with the curve at t added, in the units of its slopes and levels."""
    s += tl.load(curve + low) * t + tl.load(curve + pieces + low)
    if low < high:
        shift = 0.0
        for m in range(low, high):
            # Beyond an end the slope is another: change max(t, end) - change end, and the second part is the same for all.
            end, change = tl.load(curve + 2 * pieces + m), tl.load(curve + m + 1) - tl.load(curve + m)
            s += change * tl.maximum(t, end)
            shift += change * end
        s -= shift
    return s


@triton.jit
def add_piece(piece, of_t, of_y, of_rate, of_slopes, of_levels, curve, PIECES: tl.constexpr):
    """Adds what one piece gets from each query, of_t and of_y [Q], to gradients of rates [Q], slopes and levels [PIECES]."""
    here = tl.arange(0, PIECES) == piece
    of_rate += tl.load(curve + piece) * of_t
    of_slopes += tl.where(here, tl.sum(of_t), 0.0)
    of_levels += tl.where(here, tl.sum(of_y), 0.0)
    return of_rate, of_slopes, of_levels


@triton.jit
def unbend(s, t, curve, pieces, low, high, piece, of_t, of_y, of_rate, of_slopes, of_levels, PIECES: tl.constexpr):
    """Gradients of t where those of scores are s, [Q, K]; the other gradients with those of this block added.

    Most blocks have one piece, as the block before: its sums for each query, of_t and of_y, are held until another piece comes.
    """
    slope = tl.zeros_like(s) + tl.load(curve + low)
    of_s = s * slope
    if (piece != low) | (low != high):
        of_rate, of_slopes, of_levels = add_piece(piece, of_t, of_y, of_rate, of_slopes, of_levels, curve, PIECES)
        of_t, of_y, piece = tl.zeros_like(of_t), tl.zeros_like(of_y), low
        for m in range(low + 1, high + 1):
            within = (t > tl.load(curve + 2 * pieces + m - 1)) & ((t <= tl.load(curve + 2 * pieces + m)) | (m == high))
            own = tl.where(within, s, 0.0)
            of_s = tl.where(within, tl.load(curve + m) * s, of_s)
            own_t, own_y = tl.sum(own * t, 1), tl.sum(own, 1)
            of_rate, of_slopes, of_levels = add_piece(m, own_t, own_y, of_rate, of_slopes, of_levels, curve, PIECES)
            s = tl.where(within, 0.0, s)
    of_t += tl.sum(s * t, 1)
    of_y += tl.sum(s, 1)
    return of_s, piece, of_t, of_y, of_rate, of_slopes, of_levels
