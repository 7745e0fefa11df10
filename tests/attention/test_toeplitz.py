"""The Toeplitz kernel against dense attention in float64, on every shape, band and layout it claims."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longitude.attention.backends.table import compiled, function as toeplitz, tiles
from longitude.attention.backends.table.bias import Band
from longitude.attention.backends.table.function import toeplitz_attention

ROUTES = ["tiles", *(["compiled"] if compiled.functions(torch.float64) else [])]
TILES = pytest.mark.parametrize("route", ["tiles"], indirect=True)
CAUSAL = {"low": 0, "high": None}
BANDS = [CAUSAL, {"low": None, "high": None}, {"low": 0, "high": 0}, {"low": 0, "high": 9}, {"low": -3, "high": 70}]
NAMES = ["q", "k", "v", "table"]


@pytest.fixture(autouse=True, params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles of torch's operators; and the loop in C, where there is a compiler."""
    if request.param == "tiles":
        monkeypatch.setattr(compiled, "functions", lambda dtype: None)
    return request.param


def dense(q, k, v, table, low=None, high=None, *, scale):
    """The specification for tables: every pair written out. A row with nothing to look at gives zeros, and an lse of -inf."""
    queries, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    a, b = torch.arange(queries)[:, None], torch.arange(keys)
    distance = keys - queries + a - b
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if low is not None:
        allowed &= distance >= low
    if high is not None:
        allowed &= distance <= high
    scores = (q @ k.mT * scale + table[:, queries - 1 - a + b]).masked_fill(~allowed, -1e30)
    out = scores.softmax(-1).masked_fill(~allowed, 0) @ v
    return out, scores.logsumexp(-1).masked_fill(~allowed.any(-1), -math.inf)


def tensors(queries, keys, batch=2, heads=4, kv_heads=4, dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads, queries, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, dim),
        (heads, queries + keys - 1),
    )
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(attention, inputs, grads, **options):
    """The output, the logsumexp, and the gradients through both of the inputs that take one."""
    wanted = [x for x in inputs if x.requires_grad]
    out, lse = attention(*inputs, **options)
    got = torch.autograd.grad((out, lse), wanted, [grad.to(x.dtype) for grad, x in zip(grads, (out, lse))])
    return [out.detach(), lse.detach(), *got]


def random_grads(q):
    """Of the output and of the logsumexp."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (q.shape, q.shape[:3])]


def compare(inputs, tolerance=1e-10, **options):
    options = {"scale": 0.3, **options}
    grads = random_grads(inputs[0])
    ours = run(toeplitz_attention, inputs, grads, **options)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    theirs = run(dense, exact, grads, **options)
    names = ["out", "lse", *(f"d{name}" for name, x in zip(NAMES, inputs) if x.requires_grad)]
    assert len(ours) == len(theirs) == len(names)
    for name, x, y in zip(names, ours, theirs):
        assert torch.isfinite(x).all() if name != "lse" else not x.isnan().any(), name
        torch.testing.assert_close(
            x.double(), y, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    return ours


@pytest.mark.one_in(3)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("length", [1, 7, 63, 130, 500])
def test_equals_dense_attention(length, band):
    compare(tensors(length, length), **band)


@pytest.mark.parametrize("length", [63, 500])
def test_float32_is_as_near_as_float32_can_be(length):
    compare(tensors(length, length, dtype=torch.float32), tolerance=2e-4, **CAUSAL)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 700), (3, 131), (65, 300), (300, 65), (130, 1)])
def test_cross_lengths_and_decoding(queries, keys, band):
    compare(tensors(queries, keys), **band)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)], ids=str)
def test_grouped_and_multi_query_heads(heads):
    compare(tensors(70, 150, heads=heads[0], kv_heads=heads[1]), **CAUSAL)


@pytest.mark.parametrize("learned", [True, False])
def test_a_fixed_table_has_no_gradient_and_changes_no_other(learned):
    inputs = tensors(150, 150)
    inputs[3].requires_grad_(learned)
    assert len(compare(inputs, **CAUSAL)) == (6 if learned else 5)


def test_only_the_table_is_learned():
    inputs = tensors(90, 90)
    for x in inputs[:3]:
        x.requires_grad_(False)
    compare(inputs, **CAUSAL)


@TILES
def test_many_batches_are_taken_in_several_steps():
    batch = 2 * tiles.TILE_ELEMENTS // (4 * 64 * 64) + 3
    together = tensors(100, 100, batch=batch)
    out, lse, dq, *_, dtable = compare(together, **CAUSAL)
    alone = [x[-1:].detach().requires_grad_() for x in together[:3]] + [together[3].detach().requires_grad_()]
    grads = [x[-1:] for x in random_grads(together[0])]
    out_1, lse_1, dq_1, *_ = run(toeplitz_attention, alone, grads, scale=0.3, **CAUSAL)
    torch.testing.assert_close((out[-1:], lse[-1:], dq[-1:]), (out_1, lse_1, dq_1))
    assert dtable.shape == together[3].shape


@pytest.mark.parametrize("band", [CAUSAL, {"low": None, "high": None}], ids=str)
def test_layouts_do_not_matter(band):
    """Queries, keys and values sliced out of one [B, L, 3, H, D] projection; tables cut out of longer and wider ones."""
    plain = tensors(150, 150, dim=8)
    expected = compare(plain, **band)
    fused = torch.stack([x.detach().transpose(1, 2) for x in plain[:3]], 2)
    strided = [fused[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    cut = torch.zeros(2 * 299 + 4, 6, dtype=torch.float64)[2:600:2, 1:5].T
    part = torch.zeros(6, 299, dtype=torch.float64)[1:5]
    assert not any(x.is_contiguous() for x in (*strided, cut))
    assert part.is_contiguous() and part.storage_offset() > 0
    for table in (cut, part):
        table.copy_(plain[3].detach())
        for x, y in zip(compare([*strided, table.requires_grad_()], **band), expected):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("queries", "keys", "band", "empty"),
    [
        (90, 30, CAUSAL, slice(0, 60)),
        (90, 30, {"low": 0, "high": 4}, slice(0, 60)),
        (30, 30, {"low": 5, "high": 9}, slice(0, 5)),
        (30, 30, {"low": None, "high": -4}, slice(26, 30)),
        (200, 200, {"low": None, "high": -100}, slice(100, 200)),
        (200, 200, {"low": 3, "high": 2}, slice(0, 200)),
        (70, 70, {"low": 500, "high": None}, slice(0, 70)),
        (70, 70, {"low": None, "high": -500}, slice(0, 70)),
    ],
)
def test_rows_with_nothing_to_look_at_are_zeros(queries, keys, band, empty):
    inputs = tensors(queries, keys)
    out, lse, dq, *_ = compare(inputs, **band)
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -math.inf).all()
    assert (dq[:, :, empty] == 0).all()
    full = torch.ones(queries, dtype=torch.bool)
    full[empty] = False
    assert (out[:, :, full] != 0).all()


def test_what_the_band_forbids_cannot_be_seen(route):
    """To the last bit by the loop in C; tiles decide by the longest key of all which passes they may leave out."""
    error = 0 if route == "compiled" else 1e-13
    inputs = tensors(200, 200)
    out, lse = toeplitz_attention(*inputs, low=0, high=49, scale=0.3)
    spoiled = [x.detach().clone() for x in inputs]
    for x in spoiled[1:3]:
        x[:, :, 120:] = 1e6
        x[:, :, :50] = -1e6
    spoiled[3][:, 200:] = 1e6
    spoiled[3][:, :150] = 1e6
    for x, again in zip((out, lse), toeplitz_attention(*spoiled, low=0, high=49, scale=0.3)):
        torch.testing.assert_close(x[:, :, 99:120], again[:, :, 99:120], rtol=error, atol=error)


def test_steep_and_large_tables_stay_finite():
    """Probabilities below the smallest number, and scores far from zero."""
    inputs = tensors(300, 300, dtype=torch.float32)
    with torch.no_grad():
        distance = torch.arange(299, -300, -1)
        inputs[3].copy_(-distance.abs() * torch.tensor([8.0, 0.4, 0.3, 0.05])[:, None] + 900)
    compare(inputs, tolerance=1e-3, **CAUSAL)


@pytest.mark.parametrize("band", [CAUSAL, {"low": -1, "high": 2}], ids=str)
def test_gradcheck(band):
    inputs = tensors(5, 4, batch=1, heads=2, kv_heads=1, dim=3)

    def both(*x):
        out, lse = toeplitz_attention(*x, **band, scale=0.7)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # where a row sees nothing: differences of infinities

    torch.autograd.gradcheck(both, inputs)


def test_double_backward_raises():
    inputs = tensors(9, 9)
    out, _ = toeplitz_attention(*inputs, **CAUSAL, scale=0.3)
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="toeplitz_attention_backward"):
        dq.sum().backward()


# ---- the operators, by their own signatures --------------------------------------------------------------------------
NO_TERMS = (None,) * 5  # pieces; levels of queries and keys, vectors of keys and values


def terms_of(inputs):
    """Levels of queries and keys, and vectors of keys and values at all but the first three diagonals."""
    q, k, *_ = inputs
    generator = torch.Generator().manual_seed(3)
    vectors = 1, q.shape[2] + k.shape[2] - 4, q.shape[3]
    shapes = q.shape[:3], (*q.shape[:2], k.shape[2]), vectors, vectors
    return [torch.randn(shape, generator=generator, dtype=q.dtype).requires_grad_() for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(("terms", "learned"), [(True, True), (False, False)], ids=["all terms", "a fixed table"])
def test_opcheck(terms, learned):
    inputs = tensors(9, 12, heads=4, kv_heads=2)
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

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v, table):
        return toeplitz_attention(q * 1.0, k, v, table, **CAUSAL, scale=0.3)

    for length in range(30, 70, 2):
        inputs = tensors(length, length)
        results, expected = attend(*inputs), dense(*inputs, **CAUSAL, scale=0.3)
        torch.testing.assert_close(results, expected)
        ours, theirs = (torch.autograd.grad(out.sum() + lse.sin().sum(), inputs) for out, lse in (results, expected))
        torch.testing.assert_close(ours, theirs)
    assert counter.frame_count <= 2


class LargestTensor(TorchDispatchMode):
    """Remembers the most memory, in elements, behind any tensor made inside, also inside the operators."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.one_in(5)
@pytest.mark.parametrize("band", [CAUSAL, {"low": 0, "high": 40}, {"low": None, "high": None}], ids=str)
@pytest.mark.parametrize("terms", [True, False], ids=["all terms", "a table"])
def test_nothing_of_queries_times_keys_is_allocated(terms, band, route):
    length = 1500 if route == "tiles" else 4000
    inputs = [x.detach() for x in tensors(length, length, batch=1, heads=1, kv_heads=1, dtype=torch.float32)]
    others = NO_TERMS
    band = Band.of(length, length, **band)
    if terms:  # the operators expect vectors as far as the band goes, or less
        levels, vectors = terms_of(inputs)[:2], terms_of(inputs)[2:]
        others = *(x.detach() for x in levels), *(x.detach()[:, : band.last + 1 - 3] for x in vectors), None
        inputs[3][:, :3] = 0
    options = 3 if terms else 0, length - 1 - band.last, length - 1 - band.first, 0.3
    with LargestTensor() as seen:
        # The operators' own functions: a mode sees an operator as one step, and here its inside matters.
        out, lse, ends = toeplitz._attention._init_fn(*inputs, *others, *options)
        toeplitz._attention_backward._init_fn(out, lse, out, lse, ends, True, *inputs, *others, *options)
    # A block of 188 queries times 1500 keys, where queries meet vectors; a tile of 128 x 128 otherwise.
    most = 188 * (length + 188) if terms else 4 * 128 * 128 if route == "tiles" else _room(length, dim=16)
    assert 0 < seen.elements <= most < length * length / 6


def _room(length, dim):
    """What each thread needs: keys and values across and down with their gradients, three tables, a block of queries."""
    return torch.get_num_threads() * (5 * length * dim + 3 * 2 * length + 40_000)


@TILES
def test_a_window_costs_its_width(monkeypatch):
    """Pairs computed, for a window of 40 in 3000 positions."""
    pairs = []

    def counted(self, q, tile, *others, **options):
        pairs.append(math.prod(tile.shape))
        return scores(self, q, tile, *others, **options)

    scores = tiles.Tiles.scores
    monkeypatch.setattr(tiles.Tiles, "scores", counted)
    inputs = tensors(3000, 3000, batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    out, _ = toeplitz_attention(*inputs, low=0, high=39, scale=0.3)
    assert 3000 * 40 <= sum(pairs) <= 3000 * (40 + 128)
    pairs.clear()
    out.sum().backward()
    assert 3000 * 40 <= sum(pairs) <= 3000 * 3 * 64


def test_other_and_mixed_dtypes_are_refused():
    """Tables are as wide as the sums they enter."""
    q, k, v, table = tensors(5, 5)
    with pytest.raises(AssertionError):
        toeplitz_attention(q, k, v, table.float(), scale=0.3)
    with pytest.raises(AssertionError):
        toeplitz_attention(q, k.float(), v, table, scale=0.3)
    with pytest.raises(AssertionError, match="bfloat16"):
        toeplitz_attention(*(x.bfloat16() for x in (q, k, v, table)), scale=0.3)
