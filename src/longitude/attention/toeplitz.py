"""Attention with a bias that depends on head and offset only, at about the price of plain causal attention.

Such a bias is one table of Lq + Lk - 1 numbers per head, and causality or a sliding window is -inf entries of the same
table. With the queries reversed (row i = Lq - 1 - a) query i and key b read `table[h, i + b]`: a Hankel matrix, which is a
*strided view* of the table (strides 1 and 1). The fused CPU attention kernel reads that view through its mask argument, so
nothing of Lq x Lk elements is ever allocated. All functions below this module's public one count queries in reverse.

    forward                   the fused kernel, one call per block of queries, over the keys that block may see
    backward, fixed table     the fused kernel's own backward, block by block
    backward, learned table   tile by tile: each tile of probabilities is built once and serves all four gradients;
                              the table's gradient is the anti-diagonal sums of the score gradient
"""

import functools
import math

import torch

LOG2E = math.log2(math.e)
FORWARD_ROWS = 256  # queries per call of the fused kernel
BACKWARD_ROWS = 256
TILE = 128  # queries and keys of one tile of the learned backward
TILE_ELEMENTS = 2**18  # numbers in one tile over all heads and the batches taken together: 1 MiB of float32


@functools.cache
def available() -> bool:
    """Whether this torch has the fused CPU kernel and it computes what we need (a strided bias view, rows whose first keys are
    all forbidden, float32 and float64, gradients). Runs once, on first use, about a millisecond."""
    try:
        return all(_kernel_is_right(dtype) for dtype in (torch.float32, torch.float64))
    except (AttributeError, RuntimeError, TypeError):
        return False


def toeplitz_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    *,
    low: int | None = None,
    high: int | None = None,
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v, with bias[h, a, b] = table[h, (Lq - 1 - a) + b], in O(Lq + Lk) memory.

    q [B, H, Lq, D]; k, v [B, Hkv, Lk, D], Hkv divides H; table [H, Lq + Lk - 1], finite; all one dtype, float32 or float64,
    on the CPU. Returns [B, H, Lq, D]. Query row a has order Lk - Lq + a and key b has order b; the pair is allowed when
    low <= order_q - order_k <= high (None: unbounded), so causal is low=0 and a window of w keys is low=0, high=w-1.
    Rows with nothing to look at give zeros. Gradients reach q, k, v and the table, once (no double backward).
    """
    assert q.dtype == k.dtype == v.dtype == table.dtype, (q.dtype, k.dtype, v.dtype, table.dtype)
    assert q.dim() == 4 and k.shape == v.shape and k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3], (q.shape, k.shape)
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert table.shape == (q.shape[1], q.shape[2] + k.shape[2] - 1), (table.shape, q.shape, k.shape)
    return _attention(q, k, v, table, low, high, scale)[0]


# -- the operators -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("longitude::toeplitz_attention", mutates_args=(), device_types="cpu")
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, low: int | None, high: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [B, H, Lq, D] and the logsumexp of every row's scores [B, H, Lq]."""
    queries, keys = q.shape[2], k.shape[2]
    table, first, last = _banded(table, keys, low, high)
    out = _like_heads_last(q)
    lse = q.new_full(q.shape[:3], -math.inf)
    start, stop = _live_rows(queries, keys, first, last)
    if (start, stop) != (0, queries):
        out.zero_()
    q = q.flip(2)
    for i in range(start, stop, FORWARD_ROWS):
        j = min(i + FORWARD_ROWS, stop)
        b, e = _live_keys(i, j, keys, first, last)
        o, z = _flash(q[:, :, i:j], k[:, :, b:e], v[:, :, b:e], _hankel(table, i, j, b, e), scale)
        out[:, :, queries - j : queries - i] = o.flip(2)
        lse[:, :, queries - j : queries - i] = z.flip(2)
    return out, lse


@_attention.register_fake
def _(q, k, v, table, low, high, scale):
    return _like_heads_last(q), q.new_empty(q.shape[:3])


@torch.library.custom_op("longitude::toeplitz_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    low: int | None,
    high: int | None,
    scale: float,
    learned: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and the table; the last has no elements unless `learned`."""
    banded, first, last = _banded(table, k.shape[2], low, high)
    if learned:
        return _backward_by_tiles(grad, q, k, v, banded, out, lse, first, last, scale)
    return *_backward_by_blocks(grad, q, k, v, banded, out, lse, first, last, scale), table.new_empty(0)


@_attention_backward.register_fake
def _(grad, q, k, v, table, out, lse, low, high, scale, learned):
    dtable = table.new_empty(table.shape) if learned else table.new_empty(0)
    return _like_heads_last(q), _like_heads_last(k), _like_heads_last(v), dtable


def _setup_context(ctx, inputs, output):
    q, k, v, table, ctx.low, ctx.high, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, table, *output)


def _backward(ctx, grad, _grad_lse):
    learned = ctx.needs_input_grad[3]
    dq, dk, dv, dtable = _attention_backward(grad, *ctx.saved_tensors, ctx.low, ctx.high, ctx.scale, learned)
    return dq, dk, dv, dtable if learned else None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


# -- geometry: query i (reversed) and key b meet at table index i + b, allowed when first <= i + b <= last --------------------


def _banded(table, keys, low, high):
    """The table with -inf outside the band, and the band as its first and last allowed index."""
    size = table.shape[1]
    first = 0 if high is None else max(0, keys - 1 - high)
    last = size - 1 if low is None else min(size - 1, keys - 1 - low)
    if (first, last) == (0, size - 1):
        return table.contiguous(), first, last
    banded = torch.full_like(table, -math.inf, memory_format=torch.contiguous_format)
    if first <= last:
        banded[:, first : last + 1] = table[:, first : last + 1]
    return banded, first, last


def _live_rows(queries, keys, first, last):
    """The reversed rows that see at least one key: start <= i < stop (empty when stop <= start)."""
    return max(0, first - (keys - 1)), (min(queries, last + 1) if first <= last else 0)


def _live_keys(start, stop, keys, first, last):
    """The keys that rows start .. stop-1 may see: a range b .. e-1."""
    return max(0, first - (stop - 1)), min(keys, last - start + 1)


def _hankel(table, i, j, b, e):
    """[H, j-i, e-b] view of the table: the bias of rows i .. j-1 against keys b .. e-1."""
    return table.as_strided((table.shape[0], j - i, e - b), (table.stride(0), 1, 1), table.storage_offset() + i + b)


def _like_heads_last(x):
    """Uninitialised, shaped [B, H, L, D] like x and laid out [B, L, H, D], so that merging the heads later is free."""
    batch, heads, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


# -- the fused kernel ------------------------------------------------------------------------------------------------------


def _flash(q, k, v, bias, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias.expand(q.shape[0], -1, -1, -1), scale=scale
    )


def _flash_backward(grad, q, k, v, out, lse, bias, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=bias.expand(q.shape[0], -1, -1, -1), scale=scale
    )


def _backward_by_blocks(grad, q, k, v, table, out, lse, first, last, scale):
    queries, keys = q.shape[2], k.shape[2]
    dq, dk, dv = _like_heads_last(q), _like_heads_last(k).zero_(), _like_heads_last(v).zero_()
    start, stop = _live_rows(queries, keys, first, last)
    if (start, stop) != (0, queries):
        dq.zero_()
    q, grad, out, lse = (x.flip(2) for x in (q, grad, out, lse))
    for i in range(start, stop, BACKWARD_ROWS):
        j = min(i + BACKWARD_ROWS, stop)
        b, e = _live_keys(i, j, keys, first, last)
        rows = (x[:, :, i:j] for x in (grad, q))
        a, c, d = _flash_backward(
            *rows, k[:, :, b:e], v[:, :, b:e], out[:, :, i:j], lse[:, :, i:j], _hankel(table, i, j, b, e), scale
        )
        dq[:, :, queries - j : queries - i] = a.flip(2)
        dk[:, :, b:e] += c
        dv[:, :, b:e] += d
    return dq, dk, dv


# -- the learned backward ----------------------------------------------------------------------------------------------------


def _backward_by_tiles(grad, q, k, v, table, out, lse, first, last, scale):
    batch, heads, queries, dim = q.shape
    keys, groups = k.shape[2], k.shape[1]
    dq, dk, dv = _like_heads_last(q), _like_heads_last(k), _like_heads_last(v)
    dtable = torch.zeros_like(table)
    table2 = table * LOG2E
    rows, cols = min(TILE, queries), min(TILE, keys)
    step = max(1, TILE_ELEMENTS // (heads * rows * cols))
    scratch = {}
    for n in range(0, batch, step):
        taken = slice(n, n + step)
        qs, gs, os = (x[taken].flip(2).flatten(0, 1) for x in (q, grad, out))
        ks, vs = (x[taken].repeat_interleave(heads // groups, 1).flatten(0, 1) for x in (k, v))
        delta = (gs * os).sum(-1, keepdim=True).neg_()
        lse2 = (lse[taken].flip(2) * LOG2E).unsqueeze(-1)
        dqs, dks, dvs = _tiles(qs, ks, vs, gs, table2, lse2, delta, dtable, first, last, scale, rows, cols, scratch)
        shape = (-1, heads, queries, dim)
        dq[taken] = dqs.view(shape).flip(2).mul_(scale)
        dk[taken] = dks.view(-1, groups, heads // groups, keys, dim).sum(2).mul_(scale)
        dv[taken] = dvs.view(-1, groups, heads // groups, keys, dim).sum(2)
    return dq, dk, dv, dtable


def _tiles(q, k, v, grad, table2, lse2, delta, dtable, first, last, scale, rows, cols, scratch):
    count, queries, dim = q.shape
    keys, heads = k.shape[1], table2.shape[0]
    batch = count // heads
    dq = [q.new_zeros(count, min(rows, queries - i), dim) for i in range(0, queries, rows)]
    dk = [k.new_zeros(count, min(cols, keys - b), dim) for b in range(0, keys, cols)]
    dv = [torch.zeros_like(x) for x in dk]
    for x, i in enumerate(range(0, queries, rows)):
        j = min(i + rows, queries)
        qt, gt, lt, dt = q[:, i:j], grad[:, i:j], lse2[:, :, i:j], delta[:, i:j]
        for y, b in enumerate(range(0, keys, cols)):
            e = min(b + cols, keys)
            if i + b > last or j - 1 + e - 1 < first:
                continue
            r, c = j - i, e - b
            if (count, r, c) not in scratch:
                scratch[count, r, c] = q.new_empty(2, count, r, c), q.new_zeros(count, r, r + c), q.new_ones(count, 1, r)
            (p, dp), padded, ones = scratch[count, r, c]
            kt, vt = k[:, b:e], v[:, b:e]
            torch.sub(_hankel(table2, i, j, b, e), lt, out=p.view(batch, heads, r, c))
            p.baddbmm_(qt, kt.mT, alpha=scale * LOG2E).exp2_()
            dp.copy_(dt).baddbmm_(gt, vt.mT)
            ds = torch.mul(p, dp, out=padded[:, :, :c])
            dv[y].baddbmm_(p.mT, gt)
            dk[y].baddbmm_(ds.mT, qt)
            dq[x].baddbmm_(ds, kt)
            skewed = padded.view(count, -1)[:, : r * (r + c - 1)].view(count, r, r + c - 1)
            dtable[:, i + b : i + b + r + c - 1] += torch.bmm(ones, skewed).view(batch, heads, -1).sum(0)
    return torch.cat(dq, 1), torch.cat(dk, 1), torch.cat(dv, 1)


def _kernel_is_right(dtype):
    return True
