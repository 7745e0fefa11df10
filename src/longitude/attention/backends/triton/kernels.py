# type: ignore  (Triton's language)
"""Attention with a bias in Triton: a kernel forward, two backward, one for a learned table; none stores Lq x Lk numbers.

    scores[i, j] = scale q_i . k_j + table[i - j] + q_level[i] - k_level[j]       for the keys j of query i, lo_i <= j < hi_i

The keys of a query are an interval, and its ends never decrease from query to query. This covers causality, windows, prefixes,
packed documents and padding. A block of queries therefore reads an interval of blocks of keys, masked only at its ends.
Scores are in units of log 2, because the chip computes 2^x: `factor` is scale / log 2, and the table and the levels are
divided by log 2 too.

With `curves` (FIRE), the table has distances, and a piecewise linear function of distance times the query's rate is added:

    bias[i, j] = slope_m t + level_m,  t = distance[i - j] rate_i,  m the piece that t is in: end_(m-1) < t <= end_m

`NormalizedOffset` defines it. In a block of queries and keys t stays in a small range, so most blocks have one piece. At the
end of a piece within the range the slope changes, and the function is continuous. A curve is [3, pieces]: slopes, levels, ends.

There is no atomic addition. Each number of a result is summed by one program in a fixed order, so results and gradients are
bitwise reproducible. The gradient of the table is a sum along diagonals: `diagonals` adds up the blocks of one distance, and
sums the diagonals of the result once.

    Q, K            queries and keys of a block
    D, DV           width of queries and keys, and of values
    WIDE_D, WIDE_DV the next powers of two
    last            column of the table for the first query and the first key
    ENDS            ends of the pieces of a curve, up to the next power of two; 0 without curves
    nearest         column of the table with the smallest distance
    group           heads of queries per head of keys
    FAR             whether offsets within a sequence need 64 bits; those between sequences and heads always have them

Results are laid out as [B, L, heads, width]. `skip` sequences are computed by other launches, because the third dimension of
a grid ends at 65535.
"""

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
SIZES = "last width nearest pieces batch rows keys heads group interval blocks skip".split()
"""Numbers of which Triton would compile a kernel each for 1, for multiples of 16, and for others."""


# ---- parts -------------------------------------------------------------------------------------------------------------
@triton.jit
def _place(x, first, at, stride, FAR: tl.constexpr):
    """Addresses of the vectors x[first + at]. Offsets of 32 bits take fewer registers than those of 64."""
    if FAR:
        x += tl.cast(first, tl.int64) * stride
    else:
        at = first + at
    return x + at[:, None] * stride


@triton.jit
def _vectors(x, first, at, real, stride, WIDTH: tl.constexpr, WIDE: tl.constexpr, FAR: tl.constexpr):
    """x[first + at], [len(at), WIDE]; zeros where `real` is false, and beyond WIDTH."""
    column = tl.arange(0, WIDE)
    there = real[:, None] if WIDE == WIDTH else real[:, None] & (column < WIDTH)[None, :]
    x = _place(x, first, at, stride, FAR)
    return tl.load(x + column[None, :], mask=there, other=0.0)


@triton.jit
def _write(x, first, at, real, stride, values, WIDTH: tl.constexpr, WIDE: tl.constexpr, FAR: tl.constexpr):
    column = tl.arange(0, WIDE)
    there = real[:, None] & (column < WIDTH)[None, :]
    x = _place(x, first, at, stride, FAR)
    tl.store(x + column[None, :], values.to(x.dtype.element_ty), mask=there)


@triton.jit
def _strip(pointers, at: tl.constexpr, step: tl.constexpr, count: tl.constexpr):
    """What is at pointers + at, + at + step, ..., `count` times, in new last dimensions of 2, the smallest step last.

    The constants are parts of the instructions, so a thread has one address for all of them. tl.load would bring the numbers
    through shared memory into the layout of the product, in which assembly loads them.
    """
    if count > 1:
        even = _strip(pointers, at, 2 * step, count // 2)
        return tl.join(even, _strip(pointers, at + step, 2 * step, count // 2))
    elif INTERPRETED:
        return tl.load(pointers + at)
    else:
        pointers += at
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [pointers], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _biases(corner, at_i, at_j, STRIP: tl.constexpr):
    """The table at queries and keys of a block; corner: at its first ones.

    STRIP: a thread has two numbers of every 8 x 8 square in a strip of 16 rows. Squares on one diagonal hold the same numbers,
    which the compiler loads once. This fits the layout of products on Hopper; elsewhere numbers would pass through shared memory.
    """
    if STRIP:
        ROWS: tl.constexpr = max(at_i.shape[0], at_j.shape[0])
        COLUMNS: tl.constexpr = max(at_i.shape[1], at_j.shape[1])
        DOWN: tl.constexpr = 1 if at_j.shape[0] == 1 else -1
        r = tl.arange(0, ROWS // 16)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
        square = corner + DOWN * (r.to(tl.int64) - tl.arange(0, 8)[None, None, :].to(tl.int64))
        upper = _strip(square, 0, -8 * DOWN, COLUMNS // 8)
        both = tl.join(upper, _strip(square, 8 * DOWN, -8 * DOWN, COLUMNS // 8))
        both = tl.reshape(both, [ROWS // 16, 8, 8, COLUMNS // 8, 2])
        return tl.reshape(tl.permute(both, (0, 4, 1, 3, 2)), [ROWS, COLUMNS])
    else:
        return _strip(corner + (at_i - at_j), 0, 0, 1)


@triton.jit
def _scores(s, j, lo, hi, q_level, k_level, corner, at_i, at_j, masked, rate, curve, pieces, low, high,
            TABLE: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """Scores from products, in units of log 2; -inf for hidden keys if the block is `masked`.

    Tensors of queries have one dimension of the products, tensors of keys the other.
    """
    if ENDS:
        s = bend(s, _biases(corner, at_i, at_j, STRIP) * rate, curve, pieces, low, high)
    elif TABLE:
        s += _biases(corner, at_i, at_j, STRIP)
    if LEVELS:
        s += q_level - k_level
    if masked:
        s = tl.where((j >= lo) & (j < hi), s, float("-inf"))
    return s


@triton.jit
def _rates(rates, first, i, real, rows, Q: tl.constexpr, ENDS: tl.constexpr):
    """Rates of a block of queries: the greatest and the smallest, at the block's ends, and all of them."""
    if ENDS:
        newest = tl.minimum(first + Q, rows) - 1
        fast, slow = tl.load(rates + first), tl.load(rates + newest)
        rate = tl.load(rates + i, mask=real, other=1.0)
    else:
        fast, slow, rate = 0.0, 0.0, i
    return fast, slow, rate


@triton.jit
def _interval(lo, hi, first, rows, Q: tl.constexpr, K: tl.constexpr):
    """Keys of a block of queries: start, aligned to a block, and end; then the range that all queries attend to."""
    newest = tl.minimum(first + Q, rows) - 1
    return tl.load(lo + first) // K * K, tl.load(hi + newest), tl.load(lo + newest), tl.load(hi + first)


# ---- curves -------------------------------------------------------------------------------------------------------------
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
        least, most = tl.minimum(near * slow, near * fast), tl.maximum(far * slow, far * fast)
        low, high = tl.sum((ends < least).to(tl.int32)), tl.sum((ends < most).to(tl.int32))
    else:
        low, high = 0, 0
    return low, high


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
    """Gradients of rates, slopes and levels with those of this block added, where those of scores are s, [Q, K].

    Most blocks have one piece, as the block before: its sums for each query, of_t and of_y, are held until another piece comes.
    """
    if (piece != low) | (low != high):
        of_rate, of_slopes, of_levels = add_piece(piece, of_t, of_y, of_rate, of_slopes, of_levels, curve, PIECES)
        of_t, of_y, piece = tl.zeros_like(of_t), tl.zeros_like(of_y), low
        for m in range(low + 1, high + 1):
            within = (t > tl.load(curve + 2 * pieces + m - 1)) & ((t <= tl.load(curve + 2 * pieces + m)) | (m == high))
            part = tl.where(within, s, 0.0)
            part_t, part_y = tl.sum(part * t, 1), tl.sum(part, 1)
            of_rate, of_slopes, of_levels = add_piece(m, part_t, part_y, of_rate, of_slopes, of_levels, curve, PIECES)
            s = tl.where(within, 0.0, s)
    of_t += tl.sum(s * t, 1)
    of_y += tl.sum(s, 1)
    return piece, of_t, of_y, of_rate, of_slopes, of_levels


@triton.jit
def slopes_of(t, curve, pieces, low, high):
    """The curve's slope at t."""
    slope = tl.zeros_like(t) + tl.load(curve + low)
    if low < high:
        for m in range(low, high):
            slope = tl.where(t > tl.load(curve + 2 * pieces + m), tl.load(curve + m + 1), slope)
    return slope


# ---- forward -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=SIZES)
def forward(q, k, v, out, lse, lo, hi, q_level, k_level, table, curves, rates, factor, last, width, nearest, pieces, rows, keys,
            heads, group, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, interval, skip,
            D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            TABLE: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, FAR: tl.constexpr,
            STRIP: tl.constexpr):  # fmt: skip
    """A block of queries of a head: out and the logsumexp of their scores."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q  # under causality the longest first
    b, h = (skip + tl.program_id(2)).to(tl.int64), tl.program_id(1).to(tl.int64)
    at_i, at_j = tl.arange(0, Q), tl.arange(0, K)
    i = first + at_i
    real = i < rows
    line = (b * heads + h) * rows + i
    k, v = k + b * k_batch + h // group * k_head, v + b * v_batch + h // group * v_head
    lo, hi = lo + b * interval, hi + b * interval
    k_level += (b * heads + h) * keys
    table += h * width
    curve = curves + h * 3 * pieces
    ends = ends_of(curve, pieces, ENDS)
    fast, slow, rate = _rates(rates + b * rows, first, i, real, rows, Q, ENDS)
    queries = _vectors(q + b * q_batch + h * q_head, first, at_i, real, q_stride, D, WIDE_D, FAR)
    own_lo, own_hi = tl.load(lo + i, mask=real, other=0), tl.load(hi + i, mask=real, other=0)
    mine = tl.load(q_level + line, mask=real, other=0.0) if LEVELS else own_lo

    start, stop, full, rest = _interval(lo, hi, first, rows, Q, K)
    acc = tl.zeros([Q, WIDE_DV], tl.float32)
    top, total = tl.full([Q], float("-inf"), tl.float32), tl.zeros([Q], tl.float32)
    for first_j in range(start, stop, K):
        j = first_j + at_j
        exists = j < keys
        theirs = tl.load(k_level + j, mask=exists, other=0.0) if LEVELS else j
        k_block = _vectors(k, first_j, at_j, exists, k_stride, D, WIDE_D, FAR)
        products = tl.dot(queries, tl.trans(k_block), input_precision="ieee") * factor
        column = last + first - first_j
        low, high = pieces_of(ends, table, column, nearest, fast, slow, Q, K, ENDS)
        s = _scores(products, j[None, :], own_lo[:, None], own_hi[:, None], mine[:, None], theirs[None, :], table + column,
                    at_i[:, None], at_j[None, :], (first_j < full) | (first_j + K > rest), rate[:, None], curve, pieces,
                    low, high, TABLE, LEVELS, ENDS, STRIP)  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        above = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: 2^(-inf - 0) is 0
        p = tl.exp2(s - above[:, None])
        shrink = tl.exp2(top - above)
        values = _vectors(v, first_j, at_j, exists, v_stride, DV, WIDE_DV, FAR)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = higher
    nothing = own_lo >= own_hi  # its output is 0 / 1
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    _write(out + (b * rows * heads + h) * DV, first, at_i, real, heads * DV, acc, DV, WIDE_DV, FAR)
    tl.store(lse + line, tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2), mask=real)


# ---- backward ----------------------------------------------------------------------------------------------------------
@triton.jit
def _in_bits(lse):
    """The logsumexp in units of log 2; inf for a query without keys, so that its weights are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse / LN2)


@triton.jit
def _diagonals(x, Q: tl.constexpr, K: tl.constexpr):
    """The sums of x [Q, K], squares on top of each other, along the diagonals of each square: [Q / K, K] twice.

    The upper ones, from the top right corner to the middle; and the lower ones.
    """
    i, column = tl.arange(0, Q)[:, None], tl.arange(0, K)[None, :]
    # Each row is turned by its number: then a diagonal is in one column, above `i = column` one, below it another.
    x = tl.gather(x, (i - column - 1) & (K - 1), 1)
    upper = (i & (K - 1)) <= column
    above, below = tl.where(upper, x, 0.0), tl.where(upper, 0.0, x)
    return tl.sum(tl.reshape(above, [Q // K, K, K]), 1), tl.sum(tl.reshape(below, [Q // K, K, K]), 1)


@triton.jit(do_not_specialize=SIZES)
def backward_queries(q, k, v, out, grad, lse, grad_lse, delta, lo, hi, q_level, k_level, table, curves, rates, of_q,
                     of_level, of_curves, of_rates, scale, factor, last, width, nearest,
                     pieces, rows, keys, heads, group, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch,
                     v_head, v_stride, interval, D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr,
                     WIDE_DV: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr,
                     ENDS: tl.constexpr, FAR: tl.constexpr,
                     LEARNED: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """Gradients of a block of queries of a head, and `delta` for the kernels after it.

    delta_i = grad_i . out_i - grad_lse_i. LEARNED: of a curve, the sums of this block, too.
    """
    h, blocks = tl.program_id(1).to(tl.int64), tl.cdiv(rows, Q)
    b, first = (tl.program_id(0) // blocks).to(tl.int64), (blocks - 1 - tl.program_id(0) % blocks) * Q
    at_i, at_j = tl.arange(0, Q), tl.arange(0, K)
    table += h * width
    curve = curves + h * 3 * pieces
    ends = ends_of(curve, pieces, ENDS)
    PIECES: tl.constexpr = 2 * ENDS if ENDS else 1
    of_slopes, of_levels = tl.zeros([PIECES], tl.float32), tl.zeros([PIECES], tl.float32)
    i = first + at_i
    real = i < rows
    line, written = (b * heads + h) * rows + i, b * rows * heads + h
    lo, hi = lo + b * interval, hi + b * interval
    own_lo, own_hi = tl.load(lo + i, mask=real, other=0), tl.load(hi + i, mask=real, other=0)
    queries = _vectors(q + b * q_batch + h * q_head, first, at_i, real, q_stride, D, WIDE_D, FAR)
    of_out = _vectors(grad + written * DV, first, at_i, real, heads * DV, DV, WIDE_DV, FAR)
    answer = _vectors(out + written * DV, first, at_i, real, heads * DV, DV, WIDE_DV, FAR)
    bits = _in_bits(tl.load(lse + line, mask=real, other=float("inf")))
    own_delta = tl.sum(of_out.to(tl.float32) * answer.to(tl.float32), 1)
    own_delta -= tl.load(grad_lse + line, mask=real, other=0.0)
    tl.store(delta + line, own_delta, mask=real)
    mine = tl.load(q_level + line, mask=real, other=0.0) if LEVELS else own_lo
    fast, slow, rate = _rates(rates + b * rows, first, i, real, rows, Q, ENDS)

    start, stop, full, rest = _interval(lo, hi, first, rows, Q, K)
    acc, level, of_rate = tl.zeros([Q, WIDE_D], tl.float32), tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
    of_t, of_y, piece = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32), 0
    k_head_ptr, v_head_ptr = k + b * k_batch + h // group * k_head, v + b * v_batch + h // group * v_head
    for first_j in range(start, stop, K):
        j = first_j + at_j
        exists = j < keys
        theirs = tl.load(k_level + (b * heads + h) * keys + j, mask=exists, other=0.0) if LEVELS else j
        k_block = _vectors(k_head_ptr, first_j, at_j, exists, k_stride, D, WIDE_D, FAR)
        products = tl.dot(queries, tl.trans(k_block), input_precision="ieee") * factor
        column = last + first - first_j
        low, high = pieces_of(ends, table, column, nearest, fast, slow, Q, K, ENDS)
        s = _scores(products, j[None, :], own_lo[:, None], own_hi[:, None], mine[:, None], theirs[None, :], table + column,
                    at_i[:, None], at_j[None, :], (first_j < full) | (first_j + K > rest), rate[:, None], curve,
                    pieces, low, high, TABLE, LEVELS, ENDS, STRIP)  # fmt: skip
        values = _vectors(v_head_ptr, first_j, at_j, exists, v_stride, DV, WIDE_DV, FAR)
        of_p = tl.dot(of_out, tl.trans(values), input_precision="ieee")
        of_s = tl.exp2(s - bits[:, None]) * (of_p - own_delta[:, None])
        acc = tl.dot(of_s.to(k_block.dtype), k_block, acc, input_precision="ieee")
        if LEVELS:
            level += tl.sum(of_s, 1)
        if LEARNED and ENDS:
            t = _biases(table + column, at_i[:, None], at_j[None, :], STRIP) * rate[:, None]
            piece, of_t, of_y, of_rate, of_slopes, of_levels = unbend(
                of_s, t, curve, pieces, low, high, piece, of_t, of_y, of_rate, of_slopes, of_levels, PIECES)  # fmt: skip
    _write(of_q + written * D, first, at_i, real, heads * D, acc * scale, D, WIDE_D, FAR)
    if LEVELS:
        tl.store(of_level + line, level, mask=real)
    if LEARNED and ENDS:
        of_rate, of_slopes, of_levels = add_piece(piece, of_t, of_y, of_rate, of_slopes, of_levels, curve, PIECES)
        tl.store(of_rates + line, of_rate / rate, mask=real)
        at = of_curves + (h * tl.num_programs(0) + tl.program_id(0)) * 2 * PIECES + tl.arange(0, PIECES)
        tl.store(at, of_slopes)
        tl.store(at + PIECES, of_levels)


@triton.jit(do_not_specialize=SIZES)
def diagonals(q, k, v, grad, lse, delta, lo, hi, reach, q_level, k_level, table, curves, rates, of_table, factor, last, width,
              nearest, pieces, batch, rows, keys, heads, group, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch,
              v_head, v_stride, interval, D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr,
              Q: tl.constexpr, K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr,
              FAR: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """The gradient of the table in all blocks of a head with one distance, of every num_programs(2)-th sequence.

    Q is a multiple of K. reach: visible keys are more than reach[0] and at most reach[1] before their queries. of_table
    [heads, sequences, distances, 2, Q / K, K] gets the sums of `_diagonals`.
    """
    distance = (tl.program_id(0) + 1 - tl.cdiv(keys, K)) * K  # first query - first key
    h, column = tl.program_id(1).to(tl.int64), last + distance
    at_i, at_j = tl.arange(0, Q), tl.arange(0, K)
    curve = curves + h * 3 * pieces
    corner = table + h * width + column
    ends = ends_of(curve, pieces, ENDS)
    sums = tl.zeros([Q, K], tl.float32)
    newest = tl.minimum(tl.cdiv(rows, Q), tl.cdiv(keys + distance, Q))
    newest = tl.where((distance + Q > tl.load(reach)) & (distance - K < tl.load(reach + 1)), newest, 0)
    for sequence in range(tl.program_id(2), batch, tl.num_programs(2)):
        b = tl.cast(sequence, tl.int64)
        line, own_lo, own_hi = (b * heads + h) * rows, lo + b * interval, hi + b * interval
        q_ptr, of_out_ptr = q + b * q_batch + h * q_head, grad + (b * rows * heads + h) * DV
        k_ptr, v_ptr = k + b * k_batch + h // group * k_head, v + b * v_batch + h // group * v_head
        block = tl.cdiv(tl.maximum(distance, 0), Q)
        while block < newest:
            # Up to a block in which no query attends to a key: the loop over the others has no condition, so loads run ahead.
            stop, some = block, True
            while (stop < newest) & some:
                start, end, _, _ = _interval(own_lo, own_hi, stop * Q, rows, Q, K)
                some = (start < stop * Q - distance + K) & (end > stop * Q - distance)
                stop += tl.where(some, 1, 0)
            for first in range(block * Q, stop * Q, Q):
                first_j, i = first - distance, first + at_i
                j, real = first_j + at_j, i < rows
                exists = j < keys
                _, _, full, rest = _interval(own_lo, own_hi, first, rows, Q, K)
                least, most = tl.load(own_lo + i, mask=real, other=0), tl.load(own_hi + i, mask=real, other=0)
                mine = tl.load(q_level + line + i, mask=real, other=0.0) if LEVELS else least
                theirs = tl.load(k_level + (b * heads + h) * keys + j, mask=exists, other=0.0) if LEVELS else j
                fast, slow, rate = _rates(rates + b * rows, first, i, real, rows, Q, ENDS)
                low, high = pieces_of(ends, table + h * width, column, nearest, fast, slow, Q, K, ENDS)
                queries = _vectors(q_ptr, first, at_i, real, q_stride, D, WIDE_D, FAR)
                k_block = _vectors(k_ptr, first_j, at_j, exists, k_stride, D, WIDE_D, FAR)
                products = tl.dot(queries, tl.trans(k_block), input_precision="ieee") * factor
                s = _scores(products, j[None, :], least[:, None], most[:, None], mine[:, None], theirs[None, :], corner,
                            at_i[:, None], at_j[None, :], (first_j < full) | (first_j + K > rest), rate[:, None], curve,
                            pieces, low, high, TABLE, LEVELS, ENDS, STRIP)  # fmt: skip
                of_out = _vectors(of_out_ptr, first, at_i, real, heads * DV, DV, WIDE_DV, FAR)
                values = _vectors(v_ptr, first_j, at_j, exists, v_stride, DV, WIDE_DV, FAR)
                of_p = tl.dot(of_out, tl.trans(values), input_precision="ieee")
                bits = _in_bits(tl.load(lse + line + i, mask=real, other=float("inf")))
                of_s = tl.exp2(s - bits[:, None]) * (of_p - tl.load(delta + line + i, mask=real, other=0.0)[:, None])
                if ENDS:
                    t = _biases(corner, at_i[:, None], at_j[None, :], STRIP) * rate[:, None]
                    of_s *= slopes_of(t, curve, pieces, low, high) * rate[:, None]
                sums += of_s
            block = stop + 1
    upper, lower = _diagonals(sums, Q, K)
    row = (h * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0) + tl.program_id(0)
    at = of_table + row * 2 * Q + tl.arange(0, Q // K)[:, None] * K + at_j[None, :]
    tl.store(at, upper)
    tl.store(at + Q, lower)


@triton.jit(do_not_specialize=SIZES)
def backward_keys(q, k, v, grad, lse, delta, lo, hi, bounds, q_level, k_level, table, curves, rates, of_k, of_v, of_level,
                  scale, factor, last, width, nearest, pieces, rows, keys, heads, group, q_batch, q_head,
                  q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, interval, blocks, skip,
                  D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, Q: tl.constexpr,
                  K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr, ENDS: tl.constexpr, FAR: tl.constexpr,
            STRIP: tl.constexpr):  # fmt: skip
    """A block of keys of one head, read by all heads of its group: gradients of keys, values and levels of keys.

    bounds [B, 4, blocks]: the first query that attends to one of the keys, the first that attends to all, the first after these,
    the first after all of them. Blocks are [K, Q] here: what stays of keys and values is the left side of each product.
    """
    first_j, kv_heads = tl.program_id(0) * K, heads // group
    b, kv = (skip + tl.program_id(2)).to(tl.int64), tl.program_id(1).to(tl.int64)
    at_i, at_j = tl.arange(0, Q), tl.arange(0, K)
    j = first_j + at_j
    exists = j < keys
    k_block = _vectors(k + b * k_batch + kv * k_head, first_j, at_j, exists, k_stride, D, WIDE_D, FAR)
    v_block = _vectors(v + b * v_batch + kv * v_head, first_j, at_j, exists, v_stride, DV, WIDE_DV, FAR)
    bounds += tl.where(interval > 0, b, 0) * 4 * blocks + tl.program_id(0)
    start, stop = tl.load(bounds) // Q * Q, tl.load(bounds + 3 * blocks)
    full, rest = tl.load(bounds + blocks), tl.load(bounds + 2 * blocks)
    acc_k, acc_v = tl.zeros([K, WIDE_D], tl.float32), tl.zeros([K, WIDE_DV], tl.float32)
    for member in range(group):
        h = kv * group + member
        line, written = b * heads + h, b * rows * heads + h
        theirs = tl.load(k_level + line * keys + j, mask=exists, other=0.0) if LEVELS else j
        level = tl.zeros([K], tl.float32)
        distances, curve = table + h * width, curves + h * 3 * pieces
        ends = ends_of(curve, pieces, ENDS)
        for first in range(start, stop, Q):
            i = first + at_i
            real = i < rows
            own_lo = tl.load(lo + b * interval + i, mask=real, other=0)
            own_hi = tl.load(hi + b * interval + i, mask=real, other=0)
            mine = tl.load(q_level + line * rows + i, mask=real, other=0.0) if LEVELS else own_lo
            queries = _vectors(q + b * q_batch + h * q_head, first, at_i, real, q_stride, D, WIDE_D, FAR)
            products = tl.dot(k_block, tl.trans(queries), input_precision="ieee") * factor
            column = last + first - first_j
            fast, slow, rate = _rates(rates + b * rows, first, i, real, rows, Q, ENDS)
            low, high = pieces_of(ends, distances, column, nearest, fast, slow, Q, K, ENDS)
            s = _scores(products, j[:, None], own_lo[None, :], own_hi[None, :], mine[None, :], theirs[:, None],
                        distances + column, at_i[None, :], at_j[:, None], (first < full) | (first + Q > rest),
                        rate[None, :], curve, pieces, low, high, TABLE, LEVELS, ENDS, STRIP)  # fmt: skip
            p = tl.exp2(s - _in_bits(tl.load(lse + line * rows + i, mask=real, other=float("inf")))[None, :])
            of_out = _vectors(grad + written * DV, first, at_i, real, heads * DV, DV, WIDE_DV, FAR)
            acc_v = tl.dot(p.to(of_out.dtype), of_out, acc_v, input_precision="ieee")
            of_p = tl.dot(v_block, tl.trans(of_out), input_precision="ieee")
            of_s = p * (of_p - tl.load(delta + line * rows + i, mask=real, other=0.0)[None, :])
            acc_k = tl.dot(of_s.to(queries.dtype), queries, acc_k, input_precision="ieee")
            if LEVELS:
                level -= tl.sum(of_s, 1)
        if LEVELS:
            tl.store(of_level + line * keys + j, level, mask=exists)
    written = b * keys * kv_heads + kv
    _write(of_k + written * D, first_j, at_j, exists, kv_heads * D, acc_k * scale, D, WIDE_D, FAR)
    _write(of_v + written * DV, first_j, at_j, exists, kv_heads * DV, acc_v, DV, WIDE_DV, FAR)
