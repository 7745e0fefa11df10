"""The `table` backend against the reference through `attend`: output, logsumexp and every gradient, of everything it takes."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import longitude as lg
from longitude import testing
from longitude.attention.backends.table import backend as table, band
from longitude.positions.base import OffsetBias, OffsetVectors
from longitude.positions.composed import compose
from tests.support import close, heads, random

HEADS, DIM, WIDTH, LENGTH = 4, 8, 16, 131
T5 = {"num_buckets": 8, "max_distance": 30}
ENCODINGS = {
    "none": lambda: [lg.NoPosition()],
    "alibi": lambda: [lg.ALiBi(HEADS)],
    "t5": lambda: [lg.T5Bias(HEADS, **T5)],
    "t5, both sides": lambda: [lg.T5Bias(HEADS, **T5, bidirectional=True)],
    "clipped": lambda: [lg.ClippedBias(HEADS, 20)],
    "shaw": lambda: [lg.Shaw(DIM, 7)],
    "transformer_xl": lambda: [lg.TransformerXL(HEADS, DIM, WIDTH)],
    "transformer_xl, clamped": lambda: [lg.TransformerXL(HEADS, DIM, WIDTH, clamp_length=11)],
    "fox": lambda: [lg.FoX(WIDTH, HEADS)],
    "alibi+shaw": lambda: [lg.ALiBi(HEADS), lg.Shaw(DIM, 7)],
    "all with fox": lambda: [
        lg.T5Bias(HEADS, **T5),
        *(ENCODINGS[name]()[0] for name in ("shaw", "transformer_xl", "fox")),
    ],
}
TOKEN = torch.arange(LENGTH)
IDS = TOKEN // 50
DOCUMENTS = torch.stack([IDS, (TOKEN > 90).long()])
VALID = torch.stack([TOKEN >= LENGTH // 4, TOKEN < LENGTH - LENGTH // 3])  # padded on the left, on the right
MASKS = {
    "causal": lg.Causal(),
    "short window": lg.Window(9),
    "long window": lg.Window(70),
    "no mask": lg.NoMask(),
    "packed": lg.Causal() & lg.Documents(DOCUMENTS),
    "padded": lg.Causal() & lg.Padding(VALID),
    "padded, both sides": lg.Padding(VALID),
    "packed and padded in a window": lg.Window(33) & lg.Documents(DOCUMENTS) & lg.Padding(VALID),
}
ALL, LAST, ONE = slice(None), slice(-37, None), slice(-1, None)
WITHIN = TOKEN - 50 * IDS
STARTS = torch.tensor([[7, 100, 3], [0, 1, 2]])[:, IDS] + WITHIN
ROWS = [torch.tensor([[a], [a + 7]]) + torch.arange(n) for a, n in ((100, 37), (0, LENGTH))]


def at(q_positions, k_positions, mask=None):
    return {"mask": mask or lg.Window(60), "q_positions": q_positions, "k_positions": k_positions}


PACKED = lg.Causal() & lg.Documents(IDS)
CALLS = {
    **{kind: (ALL, ALL, {"mask": mask}) for kind, mask in MASKS.items()},
    **{f"{kind}, the last three": (slice(-3, None), ALL, {"mask": mask}) for kind, mask in MASKS.items()},
    "the last queries": (LAST, ALL, {}),
    "one token": (ONE, ALL, {}),
    "ints": (LAST, ALL, at(1000, 906)),
    "keys far behind": (LAST, ALL, at(1000, 0)),
    "keys a little behind": (LAST, ALL, at(135, 17, lg.Causal())),
    "keys ahead": (LAST, ALL, at(3, 40)),
    "keys ahead, no mask": (LAST, ALL, at(3, 40, lg.NoMask())),
    "tensors": (ALL, ALL, at(TOKEN + 5, TOKEN, lg.NoMask())),
    "rows": (LAST, ALL, at(*ROWS)),
    "again in each document": (ALL, ALL, at(WITHIN, WITHIN, PACKED)),
    "from anywhere in each document": (ALL, ALL, at(STARTS, STARTS, PACKED)),
    "at another offset in each document": (ALL, ALL, at(WITHIN + torch.tensor([0, 4, 9])[IDS], WITHIN, PACKED)),
    "after padding": (ALL, ALL, at(*[(TOKEN - 9).clamp(min=0)] * 2, lg.Causal() & lg.Padding(TOKEN >= 9))),
    "more queries than keys": (ALL, slice(0, 90), {}),
}
# A gate has no meaning for the future, and no token before the first key.
CASES = [
    (name, call)
    for name in ENCODINGS
    for call, (_, keys, options) in CALLS.items()
    if "fox" not in name or (keys == ALL and options.get("mask", lg.Causal()).reach[0] is not None)
]
EXACT = (torch.float64, 1e-10)
WAYS = {
    "float64": EXACT,
    "float64, by tiles": EXACT,
    "float32, by tiles": (torch.float32, 2e-5),
    **{str(dtype): (dtype, 3 * torch.finfo(dtype).eps) for dtype in (torch.bfloat16, torch.float16)},
}


@pytest.fixture
def by_tiles(monkeypatch):
    """Without the loop in C."""
    monkeypatch.setattr(table.band, "available", lambda dtype: False)
    monkeypatch.setattr(band, "functions", lambda dtype: None)


def built(name: str) -> lg.Composed:
    """In float64, with random parameters."""
    return testing.fill(compose(ENCODINGS[name]()).double(), seed=1)


def problem(batch: int = 2):
    """q, k, v, and the tokens x that context reads."""
    return [*heads(LENGTH, batch, HEADS, head_dim=DIM), random(batch, LENGTH, WIDTH, seed=9)]


def answer(backend, encoding, inputs, rows=ALL, keys=ALL, **options):
    """Output and logsumexp, and the gradients, through both, of the inputs and what is learned."""
    q, k, v, x = inputs = [t.detach().requires_grad_() for t in inputs]
    options |= {"encoding": encoding, "context": encoding.context(x)[0], "backend": backend}
    part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    out, lse = lg.attend(*part, **options, return_lse=True)
    close(lg.attend(*part, **options), out)
    grads = [random(*t.shape, seed=t.dim()).to(t) for t in (out, lse)]
    wanted = dict(zip("qkvx", inputs)) | dict(encoding.named_parameters())
    got = torch.autograd.grad((out, lse), [*wanted.values()], grads, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, got))}


def compare(name, call, dtype, tolerance, batch=2):
    """With the reference in float64 on the same rounded numbers, relative to the largest."""
    rows, keys, options = CALLS[call]
    wide = torch.promote_types(dtype, torch.float32)
    small = built(name).to(wide)
    *inputs, x = (t.to(dtype) for t in problem(batch))
    inputs.append(x.to(wide))
    ours = answer("table", small, inputs, rows, keys, **options)
    theirs = answer("reference", copy.deepcopy(small).double(), [t.double() for t in inputs], rows, keys, **options)
    for what, got in ours.items():
        assert got.dtype == (dtype if what in ("out", "q", "k", "v") else wide), what
        scale = theirs[what].masked_fill(theirs[what].isinf(), 0.0).abs().max().clamp(min=1.0)
        close(got.double() / scale, theirs[what] / scale, atol=tolerance)
    return ours


@pytest.mark.one_in(19)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "call"), CASES)
def test_equals_the_reference(name, call, way, request):
    if "tiles" in way:
        request.getfixturevalue("by_tiles")
    compare(name, call, *WAYS[way])


@pytest.mark.parametrize("call", [*(call for call in CALLS if "in each document" in call), "after padding"])
def test_positions_of_documents_and_after_padding(call):
    compare("t5", call, *EXACT)


@pytest.mark.parametrize("call", ["causal", "packed and padded in a window"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_more_threads_than_heads(threads, call):
    """Blocks of queries and spans are then shared out, and their sums are added in one order: the same bits every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch in (1, 2):
            if batch == 2 or "packed" not in call:
                ours, again = (compare("t5, both sides", call, *EXACT, batch=batch) for _ in range(2))
                assert all(torch.equal(x, again[name]) for name, x in ours.items())
    finally:
        torch.set_num_threads(before)


# ---- the reach that terms declare, which the backend relies on -----------------------------------------------------------
REACHING = {
    "t5, short": lambda: lg.T5Bias(HEADS, num_buckets=32, max_distance=33),
    "t5, odd": lambda: lg.T5Bias(HEADS, num_buckets=7, max_distance=1001),
    "t5, both sides, odd": lambda: lg.T5Bias(HEADS, num_buckets=10, max_distance=77, bidirectional=True),
    "clipped at 1": lambda: lg.ClippedBias(HEADS, 1),
    "shaw at 1": lambda: lg.Shaw(DIM, 1),
    "clamped at 1": lambda: lg.TransformerXL(HEADS, DIM, WIDTH, clamp_length=1),
    "all with fox": lambda: built("all with fox"),
}


@pytest.mark.parametrize("name", [*lg.list_encodings(), *REACHING])
def test_the_reach_of_a_term_is_true(name):
    """All offsets of `reach` or more have the numbers of `reach`, however far."""
    encoding = REACHING[name]().double() if name in REACHING else testing.example(name)()
    encoding = testing.fill(encoding, seed=3)
    x = torch.randn(1, 3, testing.SHAPES["dim"], dtype=torch.float64)
    terms = [t for t in encoding.terms(encoding.context(x)[0]) if isinstance(t, OffsetBias | OffsetVectors)]
    reaching = [term for term in terms if term.reach is not None]
    assert reaching or name not in (*REACHING, "t5", "clipped", "shaw")
    for term in reaching:
        functions = [term.at] if isinstance(term, OffsetBias) else [term.keys, *([term.values] if term.values else [])]
        far = term.reach + torch.tensor([*range(400), 1023, 4095, 131071 - term.reach, 2**31])
        for of in functions:
            close(of(torch.full_like(far, term.reach)), of(far), atol=1e-13)
            close(of(far[-1:]), of(far[:1]), atol=1e-13)  # a call for one offset may take another way


# ---- tensors and derivatives of other kinds --------------------------------------------------------------------------------
ALIBI = lg.ALiBi(2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
@torch.no_grad()
def test_memory_that_is_not_plain():
    """Views that negate, subclasses, transforms: the operator handles them."""
    q, k, v = (random(1, 2, 9, 8, seed=n) for n in range(3))
    want = lg.attend(-q, k, v, encoding=ALIBI, backend="reference")
    close(lg.attend(torch._neg_view(q), k, v, encoding=ALIBI, backend="table"), want)
    close(lg.attend(*(TwoTensor(x, x.clone()) for x in (-q, k, v)), encoding=ALIBI, backend="table").a, want)
    close(torch.func.vmap(lambda x: lg.attend(x[None], k, v, encoding=ALIBI, backend="reference")[0])(-q), want)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
def test_forward_mode_takes_another_backend():
    q, k, v, tangent = (random(1, 2, 5, 8, seed=n) for n in range(4))
    want = torch.func.jvp(lambda x: lg.attend(x, k, v, encoding=ALIBI, backend="reference"), (q,), (tangent,))[1]
    close(torch.func.jvp(lambda x: lg.attend(x, k, v, encoding=ALIBI), (q,), (tangent,))[1], want)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        close(forward_ad.unpack_dual(lg.attend(dual, k, v, encoding=ALIBI)).tangent, want)
        with pytest.raises(ValueError, match="forward mode"):
            lg.attend(dual, k, v, encoding=ALIBI, backend="table")
