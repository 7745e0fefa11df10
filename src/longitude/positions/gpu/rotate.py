# type: ignore  (Triton's language)
"""Rotation of queries and keys on a GPU, in Triton: one launch reads each number once and writes it once.

It is imported on use, because it needs triton. Everything is decided by shapes: nothing is read back from the device, so a
decoding step may be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from longitude.positions.rotation import Angles, empty_like_heads, require_rows

TOKENS, HEADS = 16, 4
"""Tokens and heads per program: the heads of a program share its reads of the table."""
ENOUGH = 2**12
"""Programs that keep a chip busy; with fewer, each takes one head."""


@triton.jit
def _rotate(x, y, cos, sin, at, real, x_stride, y_stride, pairs, rest, T: tl.constexpr, PAIRS: tl.constexpr,
            REST: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Tokens of one head: (a, b) -> (a cos - b sin, a sin + b cos), and the rest copied."""
    x += at[:, None] * x_stride
    y += at[:, None] * y_stride
    kind = y.dtype.element_ty
    if HALF:
        first = tl.arange(0, PAIRS)[None, :]
        there = real[:, None] & (first < pairs)
        a = tl.load(x + first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(x + first + pairs, mask=there, other=0.0).to(tl.float32)
        tl.store(y + first, (a * cos - b * sin).to(kind), mask=there)
        tl.store(y + first + pairs, (a * sin + b * cos).to(kind), mask=there)
    else:  # both numbers of a pair at once, or a thread would read and write every other one
        both = tl.arange(0, 2 * PAIRS)[None, :]
        there = real[:, None] & (both < 2 * pairs)
        a, b = tl.split(tl.reshape(tl.load(x + both, mask=there, other=0.0).to(tl.float32), [T, PAIRS, 2]))
        rotated = tl.join(a * cos - b * sin, a * sin + b * cos)
        tl.store(y + both, tl.reshape(rotated, [T, 2 * PAIRS]).to(kind), mask=there)
    if REST > 0:
        column = tl.arange(0, REST)[None, :]
        there = real[:, None] & (column < rest)
        column += 2 * pairs
        tl.store(y + column, tl.load(x + column, mask=there, other=0.0), mask=there)


@triton.jit(do_not_specialize=["length", "q_heads", "k_heads"])
def kernel(q, k, q_out, k_out, cos, sin, length, pairs, each, q_rest, k_rest, q_heads, k_heads,
           q_batch, q_head, q_stride, k_batch, k_head, k_stride,
           q_out_batch, q_out_head, q_out_stride, k_out_batch, k_out_head, k_out_stride,
           T: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, Q_REST: tl.constexpr, K_REST: tl.constexpr,
           HALF: tl.constexpr):  # fmt: skip
    """Rotate T tokens of H heads; heads of queries come first, then those of keys.

    The grid has one dimension, because the others end at 65535. each: numbers between the tables of two rows; 0: one for all.
    """
    blocks, groups = tl.cdiv(length, T), tl.cdiv(q_heads + k_heads, H)
    place, group = tl.program_id(0) // blocks, tl.program_id(0) // blocks % groups
    b = (place // groups).to(tl.int64)
    first, at = (tl.program_id(0) % blocks).to(tl.int64) * T, tl.arange(0, T)
    real = first + at < length
    pair = tl.arange(0, PAIRS)
    angle = b * each + first * pairs + (at[:, None] * pairs + pair[None, :])
    there = real[:, None] & (pair < pairs)[None, :]
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    q += b * q_batch + first * q_stride
    k += b * k_batch + first * k_stride
    q_out += b * q_out_batch + first * q_out_stride
    k_out += b * k_out_batch + first * k_out_stride
    for member in tl.static_range(H):
        h = (group * H + member).to(tl.int64)
        if h < q_heads:
            _rotate(q + h * q_head, q_out + h * q_out_head, c, s, at, real, q_stride, q_out_stride, pairs, q_rest, T, PAIRS,
                    Q_REST, HALF)  # fmt: skip
        elif h < q_heads + k_heads:
            h -= q_heads
            _rotate(k + h * k_head, k_out + h * k_out_head, c, s, at, real, k_stride, k_out_stride, pairs, k_rest, T, PAIRS,
                    K_REST, HALF)  # fmt: skip


def rotate(tensors: tuple, table: Angles, layout: str) -> tuple:
    """Rotate one or two tensors [B, heads, L, width] of the same tokens by a float32 table [L, pairs] or [B, 1, L, pairs]."""
    require_rows("rotation in Triton", tensors, table)
    tensors = tuple(x if x.stride(3) == 1 else x.contiguous() for x in tensors)
    out = tuple(empty_like_heads(x) for x in tensors)
    q, k, q_out, k_out = tensors[0], tensors[-1], out[0], out[-1]
    (batch, q_heads, length, _), k_heads = q.shape, k.shape[1] if len(tensors) == 2 else 0
    cos, sin = (t.contiguous() for t in table)
    pairs = cos.shape[-1]
    rests = [x.shape[3] - 2 * pairs for x in (q, k)]
    blocks = triton.cdiv(length, TOKENS)
    heads = HEADS if batch * blocks * (q_heads + k_heads) >= HEADS * ENOUGH else 1
    with torch.cuda.device_of(q):  # Triton launches on torch's current device
        kernel[(blocks * triton.cdiv(q_heads + k_heads, heads) * batch,)](
            q, k, q_out, k_out, cos, sin, length, pairs, length * pairs if cos.dim() == 4 and len(cos) > 1 else 0,
            *rests, q_heads, k_heads, *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            T=TOKENS, H=heads, PAIRS=triton.next_power_of_2(pairs),
            **{name: triton.next_power_of_2(rest) if rest else 0 for name, rest in zip(("Q_REST", "K_REST"), rests)},
            HALF=layout == "half", num_warps=4,
        )  # fmt: skip
    return out
