"""The Toeplitz kernel as operators of torch: their signatures and graphs, and how much they compute and hold."""

import math

import pytest
import torch

from longitude.attention.backends.table import backend as toeplitz, band as loop, tiles
from longitude.attention.backends.table.backend import toeplitz_attention
from longitude.attention.backends.table.band import Band
from tests.support import LargestTensor, close, random

NO_TERMS = (None,) * 5  # levels of queries and keys, vectors of keys and values; spans


def tensors(queries, keys, batch=2, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    """q, k, v and a table."""
    shapes = (batch, heads, queries, dim), *[(batch, kv_heads, keys, dim)] * 2, (heads, queries + keys - 1)
    return [random(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]


def terms_of(inputs):
    """Levels of queries and keys, and vectors of keys and values at all but the first three diagonals."""
    q, k, *_ = inputs
    vectors = 1, q.shape[2] + k.shape[2] - 4, q.shape[3]
    shapes = q.shape[:3], (*q.shape[:2], k.shape[2]), vectors, vectors
    return [random(*shape, seed=9 + n, dtype=q.dtype).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "tiles"])
@pytest.mark.parametrize(("terms", "learned"), [(True, True), (False, False)], ids=["all terms", "a fixed table"])
def test_opcheck(terms, learned, compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(loop, "functions", lambda dtype: None)
    inputs = tensors(9, 12)
    with torch.no_grad():
        inputs[3][:, :3] = 0
    inputs[3].requires_grad_(learned)
    others, near = ([*terms_of(inputs), None], 3) if terms else (NO_TERMS, 0)
    torch.library.opcheck(toeplitz._attention, (*inputs, *others, near, None, None, 0.3))
    inputs, others = ([None if x is None else x.detach() for x in xs] for xs in (inputs, others))
    out, lse, ends = toeplitz._attention(*inputs, *others, near, None, 5, 0.3)
    grad_lse = torch.ones_like(lse) if terms else None
    arguments = torch.ones_like(out), grad_lse, out, lse, ends, learned, *inputs, *others, near, None, 5, 0.3
    torch.library.opcheck(toeplitz._attention_backward, arguments)


@pytest.mark.slow
def test_compiles_to_two_graphs_over_twenty_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, table):
        return toeplitz_attention(q * 1.0, k, v, table, low=0, scale=0.3)

    in_a_graph = torch.compile(attend, backend=counter, fullgraph=True)
    for length in range(30, 70, 2):
        inputs = tensors(length, length)
        results, expected = in_a_graph(*inputs), attend(*inputs)
        close(results, expected)
        close(*(torch.autograd.grad(out.sum() + lse.sin().sum(), inputs) for out, lse in (results, expected)))
    assert counter.frame_count <= 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("band", [(0, None), (0, 40), (None, None)], ids=str)
@pytest.mark.parametrize("kind", ["all terms", "a table by tiles", "a table"])
def test_nothing_of_queries_times_keys_is_allocated(kind, band, monkeypatch):
    if (in_c := kind == "a table") and loop.functions(torch.float32) is None:
        pytest.skip("no C compiler here")
    if not in_c:
        monkeypatch.setattr(loop, "functions", lambda dtype: None)
    length = 4000 if in_c else 1500
    inputs = [x.detach() for x in tensors(length, length, batch=1, heads=1, kv_heads=1, dtype=torch.float32)]
    others, near, band = NO_TERMS, 0, Band.of(length, length, *band)
    if kind == "all terms":  # the operators expect vectors as far as the band goes, or less
        near, (*levels, keys, values) = 3, (x.detach() for x in terms_of(inputs))
        others = *levels, keys[:, : band.last + 1 - near], values[:, : band.last + 1 - near], None
        inputs[3][:, :near] = 0
    options = near, length - 1 - band.last, length - 1 - band.first, 0.3
    with LargestTensor() as seen:
        # The operators' own functions: a mode sees an operator as one step, and here its inside matters.
        out, lse, ends = toeplitz._attention._init_fn(*inputs, *others, *options)
        toeplitz._attention_backward._init_fn(out, lse, out, lse, ends, True, *inputs, *others, *options)
    most = {
        "all terms": 188 * (length + 188),  # a block of 188 queries, with a column for each diagonal that they meet
        "a table by tiles": 4 * 128 * 128,
        # Each thread: keys and values across and down with their gradients, three tables, a block of queries.
        "a table": torch.get_num_threads() * (5 * length * 16 + 3 * 2 * length + 40_000),
    }[kind]
    assert 0 < seen.elements <= most < length * length / 6


def test_a_window_costs_its_width(monkeypatch):
    """Pairs computed, for a window of 40 in 3000 positions."""
    pairs, scores = [], tiles.Tiles.scores

    def counted(self, q, tile, *others, **options):
        pairs.append(math.prod(tile.shape))
        return scores(self, q, tile, *others, **options)

    monkeypatch.setattr(loop, "functions", lambda dtype: None)
    monkeypatch.setattr(tiles.Tiles, "scores", counted)
    inputs = tensors(3000, 3000, batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    out, _ = toeplitz_attention(*inputs, low=0, high=39, scale=0.3)
    assert 3000 * 40 <= sum(pairs) <= 3000 * (40 + 128)
    pairs.clear()
    out.sum().backward()
    assert 3000 * 40 <= sum(pairs) <= 3000 * 3 * 64
