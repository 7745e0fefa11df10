"""Chunks of reflections: equal to the product of matrices written out, whatever the chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.backends.table import band
from longitude.attention.backends.transport import backend
from longitude.attention.backends.transport.backend import carried, transport_attention, transported_scores
from tests.support import close, gradients, random

SHAPES = [
    (1, 1, 1), (7, 7, 7), (63, 63, 63), (70, 70, 70), (5, 7, 9), (13, 13, 20), (1, 1, 30), (1, 30, 30), (30, 67, 70)
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


@pytest.mark.one_in(11)
@pytest.mark.parametrize("high", [None, 0, 5, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_chunk_equals_the_product_of_matrices(shape: tuple[int, int, int], high: int | None) -> None:
    """Scores and attention, with a gate and without; of fewer queries, their gradients, too."""
    rows, _, length = shape
    inputs = [x.requires_grad_(rows <= 13) for x in drawn(*shape)]
    q, k, v, w, b, level = inputs
    offset = torch.arange(length - rows, length)[:, None] - torch.arange(length)
    hidden = (offset < 0) | (offset > (length if high is None else high))
    scores = written_out(q, k, w, b)
    fallen = 0.3 * scores + level[:, :, length - rows :, None] - level[:, :, None]
    plain, gated = (x.masked_fill(hidden, -torch.inf).softmax(-1) @ v for x in (0.3 * scores, fallen))

    def with_gradients(*outs: Tensor) -> list[list[Tensor]]:
        return [[out, *(gradients(out, inputs) if rows <= 13 else [])] for out in outs]

    want = with_gradients(scores, plain, gated)
    for chunk in (1, 4, 64, 200):
        got = transported_scores(q, k, w, b, chunk)
        mixed = (transport_attention(q, k, v, w, b, 0.3, gate, high, chunk) for gate in (None, level))
        close(with_gradients(got, *mixed), want, atol=1e-11, rtol=1e-10)


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


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("rows", "high"), [(1, None), (5, None), (32, 3), (33, None), (33, 0), (33, 40)])
def test_second_derivatives_of_one_block_and_of_several(rows: int, high: int | None) -> None:
    """With a gate, keys before the first query, and some inputs that want none."""
    q, k, v, w, b, level = drawn(rows, rows, rows + 4, dim=2)

    def own(q: Tensor, w: Tensor, b: Tensor, level: Tensor) -> Tensor:
        return transport_attention(q, k[:1, :1], v[:1, :1], w, b, 0.3, level, high)

    inputs = [x[:1, :1].clone().requires_grad_() for x in (q, w, b, level)]
    assert torch.autograd.gradgradcheck(own, inputs, fast_mode=True)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("rows", [3, 40, 130])
@pytest.mark.parametrize("hidden", [1, 33, 70])
@pytest.mark.parametrize("form", ["blocks", "chunks"])
def test_keys_left_out_of_any_block(rows: int, hidden: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is left out ends inside a block, is whole blocks, or begins before the first query; a window as well."""
    length = 150
    if form == "chunks":
        monkeypatch.setattr(backend, "needs_operator", lambda *_: True)
    for high in (None, 75):
        inputs = q, k, v, w, b, level = [x.requires_grad_() for x in drawn(rows, rows, length)]
        offset = torch.arange(length - rows, length)[:, None] - torch.arange(length)
        left_out = (offset < 0) | (offset > (length if high is None else high))
        left_out |= torch.arange(length) >= length - hidden
        scores = 0.3 * transported_scores(q, k, w, b) + level[:, :, length - rows :, None] - level[:, :, None]
        want = scores.masked_fill(left_out, -torch.inf).softmax(-1) @ v
        found = transport_attention(q, k, v, w, b, 0.3, level, high, hidden=hidden)
        close([found, *gradients(found, inputs)], [want, *gradients(want, inputs)], atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("form", ["blocks", "chunks"])
def test_a_query_whose_scores_are_all_minus_infinity_has_no_answer(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor have its gradients: zeros would hide what overflowed."""
    if form == "chunks":
        monkeypatch.setattr(backend, "needs_operator", lambda *_: True)
    q, k, v, w, b, _ = (x.requires_grad_() for x in drawn(40, 40, 40))
    vast = torch.tensor([1e200, *[1.0] * 39], dtype=torch.float64)[:, None]
    out = transport_attention(vast * q.detach().abs() + 0 * q, -vast * k.detach().abs() + 0 * k, v, w, 0 * b, 0.3)
    (dv,) = torch.autograd.grad(out[:, :, 0].sum(), v)
    assert out[:, :, 0].isnan().all() and out[:, :, 1:].isfinite().all() and dv[:, :, 0].isnan().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [3, 9])
@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_and_chunks_are_one_formula(width: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 and values narrower and wider than keys, in C and without it, at a length with odd blocks of every size."""
    if not compiled:
        monkeypatch.setattr(band, "functions", lambda *_: None)
    q, k, _, w, b, level = (x.float().requires_grad_() for x in drawn(301, 301, 301))
    v = random(2, 2, 301, width, seed=7).float().requires_grad_()
    for gate in (None, level):
        inputs = [q, k, v, w, b] + ([] if gate is None else [gate])
        blocks = transport_attention(q, k, v, w, b, 0.3, gate)
        monkeypatch.setattr(backend, "needs_operator", lambda *_: True)
        chunks = transport_attention(q, k, v, w, b, 0.3, gate)
        monkeypatch.undo() if compiled else monkeypatch.setattr(backend, "needs_operator", lambda *_: False)
        close([blocks, *gradients(blocks, inputs)], [chunks, *gradients(chunks, inputs)], atol=2e-4, rtol=2e-4)
