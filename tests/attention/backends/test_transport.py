"""Chunks of reflections: equal to the product of matrices written out, whatever the chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.transport import carried, chunk_product, transport_attention, transported_scores
from tests.support import close, random

SHAPES = [
    (1, 1, 1), (7, 7, 7), (63, 63, 63), (130, 130, 130), (5, 7, 9), (13, 13, 20), (1, 1, 30), (1, 30, 30), (30, 67, 70)
]  # fmt: skip
"""(queries, tokens with a reflection, keys)"""


def drawn(rows: int, tokens: int, length: int, dim: int = 4) -> tuple[Tensor, ...]:
    """q, k, v, w, b, level"""
    q, k, v = (random(2, 2, n, d, seed=d + n) for n, d in ((rows, dim), (length, dim), (length, 3)))
    w, level = F.normalize(random(2, 2, tokens, dim, seed=1), dim=-1), -random(2, 2, length, seed=2).abs().cumsum(-1)
    return q, k, v, w, 2 * random(2, 2, tokens, seed=3).sigmoid(), level


def written_out(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """q_i H_i H_(i-1) ... H_(j+1) k_j with the matrices H = I - b w w' themselves; the identity for tokens without one."""
    rows, length, dim = q.shape[2], k.shape[2], q.shape[3]
    H = torch.eye(dim, dtype=q.dtype).repeat(*q.shape[:2], length, 1, 1)
    H[:, :, length - w.shape[2] :] -= b[..., None, None] * w[..., :, None] * w[..., None, :]
    scores = q.new_zeros(*q.shape[:3], length)
    for row in range(rows):
        i, product = length - rows + row, torch.eye(dim, dtype=q.dtype)
        for j in range(i, -1, -1):
            scores[:, :, row, j] = torch.einsum(
                "bhd,bhde,bhe->bh", q[:, :, row], product.expand_as(H[:, :, j]), k[:, :, j]
            )
            product = product @ H[:, :, j]
    return scores


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_of_any_chunk_equal_the_product_of_matrices(shape: tuple[int, int, int]) -> None:
    q, k, _, w, b, _ = drawn(*shape)
    want = written_out(q, k, w, b)
    for chunk in (1, 4, 64, 200):
        close(transported_scores(q, k, w, b, chunk), want, rtol=1e-12)
    close(transported_scores(q, k, w, b), want, rtol=1e-12)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("high", [None, 0, 5, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_any_chunk_equals_softmax_of_the_scores(shape: tuple[int, int, int], high: int | None) -> None:
    q, k, v, w, b, level = drawn(*shape)
    rows, _, length = shape
    offset = torch.arange(length - rows, length)[:, None] - torch.arange(length)
    hidden = (offset < 0) | (offset > (length if high is None else high))
    scores = 0.3 * transported_scores(q, k, w, b)
    fallen = scores + level[:, :, length - rows :, None] - level[:, :, None]
    for chunk in (1, 4, 64, 200):
        for own, given in ((scores, None), (fallen, level)):
            want = own.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            close(transport_attention(q, k, v, w, b, 0.3, given, high, chunk), want, rtol=1e-12)


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (7, 7), (63, 130), (1, 20), (0, 5)])
def test_carried_keys(tokens: int, length: int) -> None:
    """H_last ... H_(j+1) k_j, one token at a time: each new token is a rank-one update of every key before it."""
    _, k, _, w, b, _ = drawn(1, tokens, length)
    want = k[:, :, : length - tokens]
    for t in range(tokens):
        reflector, strength = w[:, :, t, None], b[:, :, t, None, None]
        want = want - strength * (want @ reflector.mT) * reflector
        want = torch.cat([want, k[:, :, length - tokens + t, None]], 2)
    for chunk in (1, 4, 64, 200):
        close(carried(k, w, b, chunk), want, rtol=1e-12)


def test_golden() -> None:
    """Yang et al. 2025, two dimensions, three tokens. In the wrong order of reflections the first score is 0.395."""
    tensor = {"dtype": torch.float64}
    q = torch.tensor([[0, 0], [0, 0], [1, 2]], **tensor)[None, None]
    k = torch.tensor([[0.5, -1], [1, -1], [0.25, 0.5]], **tensor)[None, None]
    w = torch.tensor([[1, 0], [0.6, 0.8], [1, 0]], **tensor)[None, None]
    b = torch.tensor([[[1.0, 1.5, 0.5]]], **tensor)
    for chunk in (1, 2, 3):
        scores = transported_scores(q, k, w, b, chunk)[0, 0, 2]
        close(scores, torch.tensor([-0.325, -1.5, 1.25], **tensor), rtol=1e-12)
        first = carried(k, w, b, chunk)[0, 0, 0]
        close(first, torch.tensor([0.475, -0.4], **tensor), rtol=1e-12)
        out = transport_attention(q, k, torch.eye(3, **tensor)[None, None], w, b, 2**-0.5, chunk=chunk)[0, 0, 2]
        assert out.tolist() == pytest.approx([0.2231513, 0.0972222, 0.6796264], abs=1e-7)
    one, two = (torch.eye(2, **tensor) - b[0, 0, t] * torch.outer(w[0, 0, t], w[0, 0, t]) for t in (1, 2))
    assert float(q[0, 0, 2] @ two @ one @ k[0, 0, 0]) == pytest.approx(-0.325)
    assert float(q[0, 0, 2] @ one @ two @ k[0, 0, 0]) == pytest.approx(0.395)


def test_product_of_a_chunk() -> None:
    """I - W' M W is the product of its reflections, the newest on the left."""
    _, _, _, w, b, _ = drawn(1, 9, 9)
    want = one = torch.eye(4, dtype=torch.float64)
    for t in range(9):
        want = (one - b[..., t, None, None] * w[:, :, t, :, None] * w[:, :, t, None]) @ want
    close(one - w.mT @ chunk_product(w, b) @ w, want, rtol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(7, 7, 7), (63, 63, 63), (5, 9, 13)], ids=str)
def test_gradients_equal_those_of_the_matrices(shape: tuple[int, int, int]) -> None:
    q, k, v, w, b, level = (x.requires_grad_() for x in drawn(*shape))
    rows, _, length = shape
    ahead = torch.arange(length - rows, length)[:, None] < torch.arange(length)
    scores = written_out(q, k, w, b)
    fallen = 0.3 * scores + level[:, :, length - rows :, None] - level[:, :, None]
    out = fallen.masked_fill(ahead, -torch.inf).softmax(-1) @ v
    direction = torch.randn_like(out)
    want = torch.autograd.grad((out * direction).sum(), (q, k, v, w, b, level))
    for chunk in (1, 4, 64):
        got = transport_attention(q, k, v, w, b, 0.3, level, chunk=chunk)
        got = torch.autograd.grad((got * direction).sum(), (q, k, v, w, b, level))
        close(got, want, atol=1e-11, rtol=1e-10)
    direction = torch.randn_like(scores) * ~ahead
    want = torch.autograd.grad((written_out(q, k, w, b) * direction).sum(), (q, k, w, b))
    got = torch.autograd.grad((transported_scores(q, k, w, b, 4) * direction).sum(), (q, k, w, b))
    close(got, want, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v, w, b, _ = (x.to(dtype) for x in drawn(70, 70, 70))
    long = [x.float() for x in (q, k, v, w, b)]
    assert transported_scores(q, k, w, b).dtype == carried(k, w, b).dtype == torch.float32
    close(transported_scores(q, k, w, b), transported_scores(*long[:2], *long[3:]), atol=1e-5)
    out = transport_attention(q, k, v, w, b, 0.3)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps  # one rounding: a float32 that differs in its last bit may fall to the other side
    close(out.float(), transport_attention(*long, 0.3), atol=eps, rtol=eps)


def test_memory_of_attention_grows_with_the_length_alone() -> None:
    """What autograd keeps for backward: twice the length, about twice the numbers."""
    kept = []
    for length in (128, 256):
        q, k, v, w, b, level = (x.requires_grad_() for x in drawn(length, length, length))
        held: dict[int, int] = {}

        def pack(x: Tensor, held: dict[int, int] = held) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            transport_attention(q, k, v, w, b, 0.3, level, chunk=16)
        kept.append(sum(held.values()))
    assert kept[1] < 2.2 * kept[0]
