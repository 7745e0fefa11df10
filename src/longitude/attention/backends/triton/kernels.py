"""Attention with a bias in Triton: one kernel forward, two backward; nothing of Lq x Lk numbers is ever stored.

    scores[i, j] = scale q_i . k_j + table[i - j] + q_level[i] - k_level[j]       for the keys j of query i, lo_i <= j < hi_i

The keys of a query are one interval, whose ends never fall from query to query: causality, windows, prefixes, packed documents
and padding are such. So a block of queries reads an interval of blocks of keys: masked at its ends, in full between them.
Scores are counted in units of log 2, because 2^x is what the chip computes: `factor` is scale / log 2, and the table and
the levels are divided by it too.

There is no atomic addition. Each number of a result is summed by one program in a fixed order, so results and gradients are the
same bit for bit from run to run. The gradient of the table is summed by programs that own a row of a workspace each.

    Q, K            queries and keys of a block
    D, DV           width of queries and keys, and of values
    WIDE_D, WIDE_DV the next powers of two
    last            column of the table that has offset 0
    group           heads of queries per head of keys

What is written is laid out [B, L, heads, width].
"""

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _vectors(x, at, real, stride, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """x[at], [len(at), WIDE]; zeros where `real` is false, and beyond WIDTH."""
    column = tl.arange(0, WIDE)
    there = real[:, None] if WIDE == WIDTH else real[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + at[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _write(x, at, real, stride, values, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    column = tl.arange(0, WIDE)
    there = real[:, None] & (column < WIDTH)[None, :]
    tl.store(x + at[:, None] * stride + column[None, :], values.to(x.dtype.element_ty), mask=there)


@triton.jit
def _scores(q, k, i, j, lo, hi, q_level, k_level, table, last, factor,
            TABLE: tl.constexpr, LEVELS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Of queries i and keys j, [Q, K], in units of log 2; -inf where a query does not attend."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if TABLE:
        s += tl.load(table + (last + i[:, None] - j[None, :]))
    if LEVELS:
        s += q_level[:, None] - k_level[None, :]
    if MASKED:
        s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, float("-inf"))
    return s


@triton.jit
def _phases(lo, hi, first, rows, Q: tl.constexpr, K: tl.constexpr):
    """The keys of a block of queries: where they begin, are all attended to, are masked again, and end."""
    newest = tl.minimum(first + Q, rows) - 1
    begin, end = tl.load(lo + first) // K * K, tl.load(hi + newest)
    full = tl.cdiv(tl.load(lo + newest), K) * K
    rest = tl.maximum(full, tl.load(hi + first) // K * K)
    return begin, full, rest, end


# ---- forward -----------------------------------------------------------------------------------------------------------
@triton.jit
def _attended(acc, top, total, start, stop, q, i, lo, hi, q_level, k, v, k_level, table, last, factor, keys, k_stride, v_stride,
              D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, K: tl.constexpr,
              TABLE: tl.constexpr, LEVELS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the keys from start to stop: the sum of weights times values, the highest score, the sum of weights."""
    for first in range(start, stop, K):
        j = first + tl.arange(0, K)
        real = j < keys
        theirs = tl.load(k_level + j, mask=real, other=0.0) if LEVELS else 0
        s = _scores(q, _vectors(k, j, real, k_stride, D, WIDE_D), i, j, lo, hi, q_level, theirs, table, last, factor,
                    TABLE, LEVELS, MASKED)  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        above = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: 2^(-inf - 0) is 0
        p = tl.exp2(s - above[:, None])
        shrink = tl.exp2(top - above)
        values = _vectors(v, j, real, v_stride, DV, WIDE_DV)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = higher
    return acc, top, total


@triton.jit
def forward(q, k, v, out, lse, lo, hi, q_level, k_level, table, factor, last, width, rows, keys, heads, group,
            q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, interval,
            D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
            TABLE: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """A block of queries of a head: out and the logsumexp of their scores."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q  # under causality the longest first
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    i = first + tl.arange(0, Q)
    real = i < rows
    q += b * q_batch + h * q_head
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    lo += b * interval
    hi += b * interval
    table += h * width
    line = (b * heads + h) * rows
    k_level += (b * heads + h) * keys
    queries = _vectors(q, i, real, q_stride, D, WIDE_D)
    own_lo, own_hi = tl.load(lo + i, mask=real, other=0), tl.load(hi + i, mask=real, other=0)
    mine = tl.load(q_level + line + i, mask=real, other=0.0) if LEVELS else 0

    begin, full, rest, end = _phases(lo, hi, first, rows, Q, K)
    acc = tl.zeros([Q, WIDE_DV], tl.float32)
    top, total = tl.full([Q], float("-inf"), tl.float32), tl.zeros([Q], tl.float32)
    for phase in tl.static_range(3):
        start = begin if phase == 0 else (full if phase == 1 else rest)
        stop = tl.minimum(full, end) if phase == 0 else (rest if phase == 1 else end)
        acc, top, total = _attended(
            acc, top, total, start, stop, queries, i, own_lo, own_hi, mine, k, v, k_level, table, last, factor, keys, k_stride,
            v_stride, D, DV, WIDE_D, WIDE_DV, K, TABLE, LEVELS, phase != 1,
        )  # fmt: skip
    nothing = own_lo >= own_hi
    acc = tl.where(nothing[:, None], 0.0, acc / total[:, None])
    _write(out + (b * rows * heads + h) * DV, i, real, heads * DV, acc, DV, WIDE_DV)
    tl.store(lse + line + i, tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2), mask=real)


# ---- backward ----------------------------------------------------------------------------------------------------------
@triton.jit
def _weights(s, lse):
    """Of scores [Q, K] and the logsumexp of each row; zeros for a row without keys."""
    return tl.exp2(s - tl.where(lse == float("-inf"), float("inf"), lse / LN2)[:, None])


@triton.jit
def _along_diagonals(x, Q: tl.constexpr, K: tl.constexpr):
    """The sums of a block [Q, K] along its diagonals, i - j from 1 - K to Q: [Q + K]."""
    row, column = tl.arange(0, Q)[:, None], tl.arange(0, Q + K)[None, :]
    j = row + K - 1 - column
    x = tl.gather(x, tl.minimum(tl.maximum(j, 0), K - 1), 1)
    return tl.sum(tl.where((j >= 0) & (j < K), x, 0.0), 0)


@triton.jit
def _of_queries(of_q, of_level, start, stop, q, grad, lse, delta, i, lo, hi, q_level, k, v, k_level, table, of_table, last,
                factor, keys, k_stride, v_stride, D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr,
                WIDE_DV: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr,
                LEARNED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the keys from start to stop to the gradients of queries, of their levels and of the table."""
    for first in range(start, stop, K):
        j = first + tl.arange(0, K)
        real = j < keys
        theirs = tl.load(k_level + j, mask=real, other=0.0) if LEVELS else 0
        k_block = _vectors(k, j, real, k_stride, D, WIDE_D)
        s = _scores(q, k_block, i, j, lo, hi, q_level, theirs, table, last, factor, TABLE, LEVELS, MASKED)
        of_p = tl.dot(grad, tl.trans(_vectors(v, j, real, v_stride, DV, WIDE_DV)), input_precision="ieee")
        of_s = _weights(s, lse) * (of_p - delta[:, None])
        of_q = tl.dot(of_s.to(k_block.dtype), k_block, of_q, input_precision="ieee")
        if LEVELS:
            of_level += tl.sum(of_s, 1)
        if LEARNED:
            at = of_table + last + tl.min(i, 0) - first - K + 1 + tl.arange(0, Q + K)
            tl.store(at, tl.load(at) + _along_diagonals(of_s, Q, K))
            tl.debug_barrier()  # the next block reads what other threads wrote
    return of_q, of_level


@triton.jit
def backward_queries(q, k, v, out, grad, lse, grad_lse, delta, lo, hi, q_level, k_level, table, of_q, of_level, of_table,
                     scale, factor, last, width, batch, rows, keys, heads, group, q_batch, q_head, q_stride,
                     k_batch, k_head, k_stride, v_batch, v_head, v_stride, interval,
                     D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, Q: tl.constexpr,
                     K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr, LEARNED: tl.constexpr):  # fmt: skip
    """Blocks of queries of one head, one after the other: their gradients, and `delta` for `backward_keys`.

    delta_i = grad_i . out_i - grad_lse_i. What the table gets of them all is summed in a row of `of_table` of its own.
    """
    h = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(rows, Q)
    of_table += (h * tl.num_programs(0) + tl.program_id(0)) * width
    table += h * width
    for tile in range(tl.program_id(0), batch * blocks, tl.num_programs(0)):
        b, first = (tile // blocks).to(tl.int64), (blocks - 1 - tile % blocks) * Q
        i = first + tl.arange(0, Q)
        real = i < rows
        line, written = (b * heads + h) * rows, b * rows * heads + h
        own_lo = tl.load(lo + b * interval + i, mask=real, other=0)
        own_hi = tl.load(hi + b * interval + i, mask=real, other=0)
        queries = _vectors(q + b * q_batch + h * q_head, i, real, q_stride, D, WIDE_D)
        of_out = _vectors(grad + written * DV, i, real, heads * DV, DV, WIDE_DV)
        answer = _vectors(out + written * DV, i, real, heads * DV, DV, WIDE_DV)
        own_lse = tl.load(lse + line + i, mask=real, other=float("inf"))
        own_delta = tl.sum(of_out.to(tl.float32) * answer.to(tl.float32), 1)
        own_delta -= tl.load(grad_lse + line + i, mask=real, other=0.0)
        tl.store(delta + line + i, own_delta, mask=real)
        mine = tl.load(q_level + line + i, mask=real, other=0.0) if LEVELS else 0

        begin, full, rest, end = _phases(lo + b * interval, hi + b * interval, first, rows, Q, K)
        acc, level = tl.zeros([Q, WIDE_D], tl.float32), tl.zeros([Q], tl.float32)
        for phase in tl.static_range(3):
            start = begin if phase == 0 else (full if phase == 1 else rest)
            stop = tl.minimum(full, end) if phase == 0 else (rest if phase == 1 else end)
            acc, level = _of_queries(
                acc, level, start, stop, queries, of_out, own_lse, own_delta, i, own_lo, own_hi, mine,
                k + b * k_batch + h // group * k_head, v + b * v_batch + h // group * v_head, k_level + (b * heads + h) * keys,
                table, of_table, last, factor, keys, k_stride, v_stride, D, DV, WIDE_D, WIDE_DV, Q, K, TABLE, LEVELS, LEARNED,
                phase != 1,
            )  # fmt: skip
        _write(of_q + written * D, i, real, heads * D, acc * scale, D, WIDE_D)
        if LEVELS:
            tl.store(of_level + line + i, level, mask=real)


@triton.jit
def _of_keys(of_k, of_v, of_level, start, stop, k, v, j, k_level, q, grad, lse, delta, lo, hi, q_level, table, last, factor,
             rows, q_stride, grad_stride, D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr,
             Q: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the queries from start to stop to the gradients of keys, values and levels of keys."""
    for first in range(start, stop, Q):
        i = first + tl.arange(0, Q)
        real = i < rows
        queries = _vectors(q, i, real, q_stride, D, WIDE_D)
        own_lo = tl.load(lo + i, mask=real, other=0) if MASKED else 0
        own_hi = tl.load(hi + i, mask=real, other=0) if MASKED else 0
        mine = tl.load(q_level + i, mask=real, other=0.0) if LEVELS else 0
        s = _scores(queries, k, i, j, own_lo, own_hi, mine, k_level, table, last, factor, TABLE, LEVELS, MASKED)
        p = _weights(s, tl.load(lse + i, mask=real, other=float("inf")))
        of_out = _vectors(grad, i, real, grad_stride, DV, WIDE_DV)
        of_v = tl.dot(tl.trans(p.to(of_out.dtype)), of_out, of_v, input_precision="ieee")
        of_p = tl.dot(of_out, tl.trans(v), input_precision="ieee")
        of_s = p * (of_p - tl.load(delta + i, mask=real, other=0.0)[:, None])
        of_k = tl.dot(tl.trans(of_s.to(queries.dtype)), queries, of_k, input_precision="ieee")
        if LEVELS:
            of_level -= tl.sum(of_s, 0)
    return of_k, of_v, of_level


@triton.jit
def backward_keys(q, k, v, grad, lse, delta, lo, hi, reached, q_level, k_level, table, of_k, of_v, of_level, scale, factor, last,
                  width, rows, keys, heads, group, q_batch, q_head, q_stride, k_batch, k_head, k_stride,
                  v_batch, v_head, v_stride, interval, blocks,
                  D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, Q: tl.constexpr,
                  K: tl.constexpr, TABLE: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """A block of keys of one head, read by all heads of its group: gradients of keys, values and levels of keys.

    reached [B, 4, blocks]: the first query that attends to one of the keys, the first that attends to all, the first after these,
    the first after all of them.
    """
    first, kv_heads = tl.program_id(0) * K, heads // group
    b, kv = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    j = first + tl.arange(0, K)
    real = j < keys
    k_block = _vectors(k + b * k_batch + kv * k_head, j, real, k_stride, D, WIDE_D)
    v_block = _vectors(v + b * v_batch + kv * v_head, j, real, v_stride, DV, WIDE_DV)
    reached += tl.where(interval > 0, b, 0) * 4 * blocks + tl.program_id(0)
    begin, end = tl.load(reached) // Q * Q, tl.load(reached + 3 * blocks)
    full = tl.cdiv(tl.load(reached + blocks), Q) * Q
    rest = tl.maximum(full, tl.load(reached + 2 * blocks) // Q * Q)
    acc_k, acc_v = tl.zeros([K, WIDE_D], tl.float32), tl.zeros([K, WIDE_DV], tl.float32)
    for member in range(group):
        h = kv * group + member
        line, written = b * heads + h, b * rows * heads + h
        theirs = tl.load(k_level + line * keys + j, mask=real, other=0.0) if LEVELS else 0
        level = tl.zeros([K], tl.float32)
        for phase in tl.static_range(3):
            start = begin if phase == 0 else (full if phase == 1 else rest)
            stop = tl.minimum(full, end) if phase == 0 else (rest if phase == 1 else end)
            acc_k, acc_v, level = _of_keys(
                acc_k, acc_v, level, start, stop, k_block, v_block, j, theirs, q + b * q_batch + h * q_head,
                grad + written * DV, lse + line * rows, delta + line * rows, lo + b * interval, hi + b * interval,
                q_level + line * rows, table + h * width, last, factor, rows, q_stride, heads * DV,
                D, DV, WIDE_D, WIDE_DV, Q, TABLE, LEVELS, phase != 1,
            )  # fmt: skip
        if LEVELS:
            tl.store(of_level + line * keys + j, level, mask=real)
    written = b * keys * kv_heads + kv
    _write(of_k + written * D, j, real, kv_heads * D, acc_k * scale, D, WIDE_D)
    _write(of_v + written * DV, j, real, kv_heads * DV, acc_v, DV, WIDE_DV)
