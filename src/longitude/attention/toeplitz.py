"""Attention whose bias depends on head and offset only, at about the price of plain causal attention.

Such a bias is one table of Lq + Lk - 1 numbers per head, and causality or a sliding window is -inf entries of it. With
the queries reversed (i = Lq - 1 - a) query i and key b read `table[h, i + b]`: a Hankel matrix, which is a *strided
view* of the table (strides 1 and 1). Nothing of Lq x Lk elements is ever allocated.

    forward     the fused CPU kernel takes the view as its mask: one call per block of queries, over the keys they see
    backward    tile by tile, in tiles that fit the cache; a tile of probabilities is built once and serves every
                gradient, the table's among them (the anti-diagonal sums of the scores' gradient)

Below the public function, i always counts queries in reverse.
"""

import functools
import math
from typing import NamedTuple

import torch

LOG2E = math.log2(math.e)
TILE_ELEMENTS = 2**17  # probabilities held at a time in the backward: more do not fit the cache


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
    """softmax(scale q k^T + bias) v with bias[h, a, b] = table[h, (Lq - 1 - a) + b], in O(Lq + Lk) memory.

    q [B, H, Lq, D]; k, v [B, Hkv, Lk, D], Hkv divides H; table [H, Lq + Lk - 1], finite. All float32 or all float64, on
    the CPU. Returns [B, H, Lq, D]. Query row a has order Lk - Lq + a and key b has order b; the pair is allowed when
    low <= order_q - order_k <= high (None: unbounded): causal is low=0, a window of w keys is low=0, high=w-1.
    A query with nothing to look at gives zeros. q, k, v and the table get gradients; double backward raises.
    """
    assert q.dtype == k.dtype == v.dtype == table.dtype, (q.dtype, k.dtype, v.dtype, table.dtype)
    assert q.dtype in (torch.float32, torch.float64), q.dtype
    assert q.dim() == 4 and k.dim() == 4 and k.shape == v.shape, (q.shape, k.shape, v.shape)
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert table.shape == (q.shape[1], q.shape[2] + k.shape[2] - 1), (table.shape, q.shape, k.shape)
    return _attention(q, k, v, table, low, high, scale)[0]


# -- the operators: compiled graphs hold these two, whatever the length ----------------------------------------------


@torch.library.custom_op("longitude::toeplitz_attention", mutates_args=(), device_types="cpu")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    low: int | None,
    high: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [B, H, Lq, D] and lse [B, H, Lq], the logsumexp of each row's scores; any finite number (here 0) for a
    row that sees nothing gives it the probabilities exp(-inf - lse) = 0."""
    queries, keys = q.shape[2], k.shape[2]
    band = _Band.of(queries, keys, low, high)
    table = band.mask(table)
    start, stop = band.live_rows()
    out, lse = _heads_last(q), q.new_zeros(q.shape[:3])
    if (start, stop) != (0, queries):
        out.zero_()
    q = q.flip(2)
    # Short blocks waste less above the diagonal, long ones read the keys less often.
    rows = max(64, min(256, queries // 8, band.width))
    for i in range(start, stop, rows):
        j = min(i + rows, stop)
        b, e = band.live_keys(i, j)
        o, z = _fused(q[:, :, i:j], k[:, :, b:e], v[:, :, b:e], _hankel(table, i, j, b, e), scale)
        out[:, :, queries - j : queries - i] = o.flip(2)
        lse[:, :, queries - j : queries - i] = z.flip(2)
    return out, lse


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
    """Gradients of q, k, v and the table; the last is empty unless `learned`."""
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1:3]
    band = _Band.of(queries, keys, low, high)
    dq, dk, dv = _heads_last(q), _heads_last(k), _heads_last(v)
    dtable = table.new_zeros(table.shape if learned else 0)
    # Base 2 all through: torch's exp2 is four times as fast as its exp here, forty where the result is nearly zero.
    table = band.mask(table) * LOG2E
    lse = lse.flip(2).unsqueeze(-1) * LOG2E
    delta = (grad * out).sum(-1, keepdim=True).flip(2).neg_()
    tile = 64 if min(max(queries, keys), band.width) <= 256 else 128
    step = max(1, TILE_ELEMENTS // (heads * min(tile, queries) * min(tile, keys)))
    for n in range(0, batch, step):
        some = slice(n, n + step)
        grad_n, q_n = (x[some].flip(2).flatten(0, 1) for x in (grad, q))
        k_n, v_n = (x[some].repeat_interleave(heads // groups, 1).flatten(0, 1) for x in (k, v))
        grads = dq[some], dk[some], dv[some], dtable if learned else None
        _backward_by_tiles(
            grad_n, q_n, k_n, v_n, table, delta[some].flatten(0, 1), lse[some], scale, band, tile, *grads
        )
    return dq, dk, dv, dtable


@_attention.register_fake
def _(q, k, v, table, low, high, scale):
    return _heads_last(q), q.new_empty(q.shape[:3])


@_attention_backward.register_fake
def _(grad, q, k, v, table, out, lse, low, high, scale, learned):
    return _heads_last(q), _heads_last(k), _heads_last(v), table.new_empty(table.shape if learned else 0)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.low, ctx.high, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _autograd_backward(ctx, grad, _):
    learned = ctx.needs_input_grad[3]
    dq, dk, dv, dtable = _attention_backward(grad, *ctx.saved_tensors, ctx.low, ctx.high, ctx.scale, learned)
    return dq, dk, dv, dtable if learned else None, None, None, None


_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


# -- geometry --------------------------------------------------------------------------------------------------------


class _Band(NamedTuple):
    """Query i and key b meet at table index i + b, allowed when first <= i + b <= last."""

    queries: int
    keys: int
    first: int
    last: int

    @classmethod
    def of(cls, queries, keys, low, high):
        # The entry at index n has order difference keys - 1 - n.
        first = 0 if high is None else max(0, keys - 1 - high)
        last = queries + keys - 2 if low is None else min(queries + keys - 2, keys - 1 - low)
        return cls(queries, keys, first, last)

    @property
    def width(self):
        return self.last - self.first + 1

    def mask(self, table):
        """The table, contiguous, with -inf outside the band."""
        if (self.first, self.last) == (0, table.shape[1] - 1):
            return table.contiguous()
        masked = table.new_full(table.shape, -math.inf)
        if self.first <= self.last:
            masked[:, self.first : self.last + 1] = table[:, self.first : self.last + 1]
        return masked

    def live_rows(self):
        """The queries that see at least one key: start <= i < stop."""
        if self.first > self.last:
            return 0, 0
        return max(0, self.first - (self.keys - 1)), min(self.queries, self.last + 1)

    def live_keys(self, i, j):
        """The keys that some query of i .. j-1 sees: b <= key < e (none when e <= b)."""
        return max(0, self.first - (j - 1)), min(self.keys, self.last - i + 1)


def _hankel(table, i, j, b, e):
    """[H, j-i, e-b] view of a contiguous table: the bias of queries i .. j-1 against keys b .. e-1."""
    return table.as_strided((table.shape[0], j - i, e - b), (table.stride(0), 1, 1), table.storage_offset() + i + b)


def _heads_last(x):
    """Uninitialised, of x's shape [B, H, L, D] but laid out [B, L, H, D], so that merging the heads later is free."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


# -- backward --------------------------------------------------------------------------------------------------------


def _backward_by_tiles(grad, q, k, v, table, delta, lse, scale, band, tile, dq, dk, dv, dtable):
    """Writes dq, dk, dv [n, heads, length, D] for n rows of the batch, adds to dtable [H, Lq + Lk - 1] (or None).

    With the queries reversed: grad, q [n*H, Lq, D], delta [n*H, Lq, 1] (minus grad . out), lse [n, H, Lq, 1].
    k, v [n*H, Lk, D]. table and lse are in base 2.
    """
    (count, queries, dim), keys = q.shape, k.shape[1]
    batch, heads = lse.shape[:2]
    key_tiles = [(b, min(b + tile, keys)) for b in range(0, keys, tile)]
    dk_tiles = [k.new_zeros(count, e - b, dim) for b, e in key_tiles]
    dv_tiles = [torch.zeros_like(x) for x in dk_tiles]
    scratch = {}
    for i in range(0, queries, tile):
        j = min(i + tile, queries)
        q_i, grad_i, lse_i, delta_i = q[:, i:j], grad[:, i:j], lse[:, :, i:j], delta[:, i:j]
        dq_i = q.new_zeros(count, j - i, dim)
        start, stop = band.live_keys(i, j)
        for t in range(start // tile, -(-stop // tile)):
            b, e = key_tiles[t]
            rows, cols = j - i, e - b
            if (rows, cols) not in scratch:
                scratch[rows, cols] = q.new_empty(2, count, rows, cols), q.new_zeros(count, rows, rows + cols)
            (p, dp), padded = scratch[rows, cols]
            torch.sub(_hankel(table, i, j, b, e), lse_i, out=p.view(batch, heads, rows, cols))
            p.baddbmm_(q_i, k[:, b:e].mT, alpha=scale * LOG2E).exp2_()
            dp.copy_(delta_i).baddbmm_(grad_i, v[:, b:e].mT)
            ds = torch.mul(p, dp, out=padded[:, :, :cols])
            dv_tiles[t].baddbmm_(p.mT, grad_i)
            dk_tiles[t].baddbmm_(ds.mT, q_i)
            dq_i.baddbmm_(ds, k[:, b:e])
            if dtable is not None:
                dtable[:, i + b : j + e - 1] += _antidiagonal_sums(padded).view(batch, heads, -1).sum(0)
        torch.mul(dq_i.view(batch, heads, j - i, dim).flip(2), scale, out=dq[:, :, queries - j : queries - i])
    for (b, e), dk_t, dv_t in zip(key_tiles, dk_tiles, dv_tiles, strict=True):
        grouped = batch, dk.shape[1], heads // dk.shape[1], e - b, dim
        torch.mul(dk_t.view(grouped).sum(2), scale, out=dk[:, :, b:e])
        torch.sum(dv_t.view(grouped), 2, out=dv[:, :, b:e])


def _antidiagonal_sums(padded):
    """[n, rows, rows + cols], zeros in the last `rows` columns -> [n, 1, rows + cols - 1], sums over row + column."""
    count, rows, width = padded.shape
    # Read with rows one shorter, row r starts r columns earlier: anti-diagonals stand upright, zeros around them.
    upright = padded.view(count, -1)[:, : rows * (width - 1)].view(count, rows, width - 1)
    return padded.new_ones(1, 1, rows).expand(count, -1, -1) @ upright


# -- the fused kernel ------------------------------------------------------------------------------------------------


def _fused(q, k, v, bias, scale):
    """The private CPU kernel: out [B, H, rows, D], logsumexp [B, H, rows]; bias [H, rows, keys], any strided view."""
    if q.shape[1] != k.shape[1] and not _takes_grouped_heads():
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias.expand(q.shape[0], -1, -1, -1), scale=scale
    )


@functools.cache
def available() -> bool:
    """Whether this torch has the fused CPU kernel and it computes what we need: a strided view as bias, rows whose
    first keys are all forbidden, float32 and float64. Looked at once, on first use, in milliseconds."""
    try:
        return all(_kernel_is_right(heads=2, kv_heads=2, dtype=dtype) for dtype in (torch.float32, torch.float64))
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def _takes_grouped_heads() -> bool:
    """The kernel learned grouped heads in 2025 (pytorch#157893); before, it read past the end of k and v."""
    return _kernel_is_right(heads=2, kv_heads=1, dtype=torch.float32)


def _kernel_is_right(heads, kv_heads, dtype):
    rows, keys, dim = 3, 600, 4  # the kernel walks the keys 512 at a time: here row 0 sees nothing in its first walk
    with torch.no_grad():
        x = torch.linspace(-2, 2, (keys + rows) * heads * dim, dtype=dtype, device="cpu").sin().view(1, heads, -1, dim)
        q, kv = x[:, :, :rows], x[:, :kv_heads, rows:]  # slices of one tensor: a read past the end stays inside it
        n = torch.arange(rows + keys - 1, device="cpu")
        table = torch.where(n < 520, -math.inf, (n * 0.1).sin()).to(dtype).expand(heads, -1).contiguous()
        bias = _hankel(table, 0, rows, 0, keys)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, kv, kv, 0.0, False, attn_mask=bias[None], scale=0.5
        )
        scores = q @ kv.mT * 0.5 + bias
        right = torch.allclose(out, scores.softmax(-1) @ kv, atol=1e-5)
        return right and torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
