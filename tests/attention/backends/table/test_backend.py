"""The `table` backend against the reference through `attend`: output, logsumexp and every gradient, of everything it takes."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import longitude as lg
from longitude import testing
from longitude.positions.composed import compose
from longitude.positions.terms import OffsetBias, OffsetVectors
from longitude.testing.attend_calls import Call, masks
from longitude.testing.examples import SHAPES
from longitude.testing.fixtures import heads_and_tokens
from tests.support import close, needs_c, random

LENGTH = 131


def all_with_fox(num_heads, head_dim, dim):
    biased = lg.T5Bias(num_heads, num_buckets=8, max_distance=30), lg.Shaw(head_dim, 7)
    return lg.Composed([*biased, lg.TransformerXL(num_heads, head_dim, dim), lg.FoX(dim, num_heads)])


ENCODINGS = {
    **{name: testing.example(name) for name in ("nope", "alibi", "transformer_xl", "fox")},
    "t5": testing.example("t5", num_buckets=8, max_distance=30),
    "t5, both sides": testing.example("t5", num_buckets=8, max_distance=30, bidirectional=True),
    "clipped": testing.example("clipped", max_distance=20),
    "shaw": testing.example("shaw", max_distance=7),
    "transformer_xl, clamped": testing.example("transformer_xl", clamp_length=11),
    "all with fox": testing.example(all_with_fox),
}
pytestmark = needs_c
TOKEN = torch.arange(LENGTH)
IDS = TOKEN // 50
WITHIN = TOKEN - 50 * IDS
STARTS = torch.tensor([[7, 100, 3], [0, 1, 2]])[:, IDS] + WITHIN
ROWS = [torch.tensor([[a], [a + 7]]) + torch.arange(n) for a, n in ((100, 37), (0, LENGTH))]
PACKED, NEAR = lg.Causal() & lg.Documents(IDS), lg.Window(60)
REFUSED = ("holes", "union", "union both ways", "another order", "documents that come back")
MASKS = {kind: mask for kind, mask in masks(2, LENGTH, False).items() if kind not in REFUSED}


def at(q_positions, k_positions):
    return {"q_positions": q_positions, "k_positions": k_positions}


# The mask, options, and how many queries there are.
CALLS = {
    **{kind: (mask, {}, LENGTH) for kind, mask in MASKS.items()},
    **{f"{kind}, the last three": (mask, {}, 3) for kind, mask in MASKS.items()},
    "one token": (lg.Causal(), {}, 1),
    "ints": (NEAR, at(1000, 906), 37),
    "keys far behind": (NEAR, at(1000, 0), 37),
    "keys a little behind": (lg.Causal(), at(135, 17), 37),
    "keys ahead": (NEAR, at(3, 40), 37),
    "keys ahead, no mask": (lg.NoMask(), at(3, 40), 37),
    "tensors": (lg.NoMask(), at(TOKEN + 5, TOKEN), LENGTH),
    "rows": (NEAR, at(*ROWS), 37),
    "again in each document": (PACKED, at(WITHIN, WITHIN), LENGTH),
    "from anywhere in each document": (PACKED, at(STARTS, STARTS), LENGTH),
    "at another offset in each document": (PACKED, at(WITHIN + torch.tensor([0, 4, 9])[IDS], WITHIN), LENGTH),
    "after padding": (lg.Causal() & lg.Padding(TOKEN >= 9), at(*[(TOKEN - 9).clamp(min=0)] * 2), LENGTH),
    "more queries than keys": (lg.Causal(), {}, 2 * LENGTH),
}
# A gate has no meaning for the future, and no token before the first key.
CASES = [
    (name, call)
    for name in ENCODINGS
    for call, (mask, _, rows) in CALLS.items()
    if "fox" not in name or (rows <= LENGTH and mask.reach[0] is not None)
]
EXACT = (torch.float64, 1e-10)
WAYS = {
    "float64": EXACT,
    "float32": (torch.float32, 2e-5),
    **{str(dtype): (dtype, 3 * torch.finfo(dtype).eps) for dtype in (torch.bfloat16, torch.float16)},
}


def compare(name, call, dtype, tolerance, batch=2):
    """With the reference in float64 on the same rounded numbers."""
    mask, options, rows = CALLS[call]
    wide = torch.promote_types(dtype, torch.float32)
    encoding = ENCODINGS[name]().to(wide)
    tensors = heads_and_tokens(rows, LENGTH, batch)
    tensors = {n: x.to(wide if n == "x" else dtype) for n, x in tensors.items()}
    ours = Call(encoding, tensors, mask, options=options | {"return_lse": True})
    assert [x.dtype for x in ours.forward(tensors, "table")] == [dtype, wide]
    got, tensors = ours.answer("table"), {n: x.double() for n, x in tensors.items()}
    want = Call(encoding.double(), tensors, mask, options=ours.options).answer("reference")
    testing.close(f"{name}, {call}, {dtype}", got, want, tolerance)
    return got


GRID = [(name, call, way) for name, call in CASES for way in WAYS]
PARTS = 227  # no divisor of the grid's sides: each part has other names, calls and dtypes


@pytest.mark.one_in(120)
@pytest.mark.parametrize("part", range(PARTS))
def test_equals_the_reference(part):
    for name, call, way in GRID[part::PARTS]:
        compare(name, call, *WAYS[way])


@pytest.mark.parametrize("call", [*(call for call in CALLS if "in each document" in call), "after padding"])
def test_positions_of_documents_and_after_padding(call):
    compare("t5", call, *EXACT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("threads", [3, 1, 8])
def test_more_threads_than_heads(threads):
    """Blocks of queries and spans are then shared out, and their sums are added in one order: the same bits every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for call, batch in (("causal", 1), ("causal", 2), ("padded documents", 2)):
            ours, again = (compare("t5, both sides", call, *EXACT, batch) for _ in range(2))
            assert all(torch.equal(x, again[name]) for name, x in ours.items())
    finally:
        torch.set_num_threads(before)


# ---- the reach that terms declare, which the backend relies on -----------------------------------------------------------
REACHING = {
    "t5, short": testing.example("t5", num_buckets=32, max_distance=33),
    "t5, odd": testing.example("t5", num_buckets=7, max_distance=1001),
    "t5, both sides, odd": testing.example("t5", num_buckets=10, max_distance=77, bidirectional=True),
    "clipped at 1": testing.example("clipped", max_distance=1),
    "shaw at 1": testing.example("shaw", max_distance=1),
    "clamped at 1": testing.example("transformer_xl", clamp_length=1),
    "all with fox": ENCODINGS["all with fox"],
}


@pytest.mark.parametrize("name", [*lg.list_encodings(), *REACHING])
def test_the_reach_of_every_term_is_true(name):
    """All offsets of `reach` or more have the numbers of `reach`, however far."""
    encoding = REACHING[name](seed=3) if name in REACHING else testing.example(name)(seed=3)
    x = torch.randn(1, 3, SHAPES["dim"], dtype=torch.float64)
    terms = [t for t in encoding.terms(compose(encoding).context(x)[0]) if isinstance(t, OffsetBias | OffsetVectors)]
    reaching = [term for term in terms if term.reach is not None]
    assert reaching or name not in (*REACHING, "t5", "clipped", "shaw"), name
    for term in reaching:
        functions = [term.at] if isinstance(term, OffsetBias) else [term.keys, *([term.values] if term.values else [])]
        far = term.reach + torch.tensor([*range(400), 1023, 4095, 131071 - term.reach, 2**31])
        for of in functions:
            close(of(torch.full_like(far, term.reach)), of(far), atol=1e-13)
            close(of(far[-1:]), of(far[:1]), atol=1e-13)  # a call for one offset may take another way


# ---- tensors and derivatives of other kinds --------------------------------------------------------------------------------
ALIBI = lg.ALiBi(2)


@torch.no_grad()
def test_memory_that_is_not_plain():
    """Views that negate, subclasses: the operator handles them."""
    q, k, v = (random(1, 2, 9, 8, seed=n) for n in range(3))
    want = lg.attend(-q, k, v, encoding=ALIBI, backend="reference")
    close(lg.attend(torch._neg_view(q), k, v, encoding=ALIBI, backend="table"), want)
    close(lg.attend(*(TwoTensor(x, x.clone()) for x in (-q, k, v)), encoding=ALIBI, backend="table").a, want)


# ---- half precision --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [3, 77])
@pytest.mark.parametrize("encoding", [None, lg.ALiBi(8)], ids=["none", "alibi"])
def test_bfloat16_is_rounded_once_and_to_the_nearest(encoding, length):
    """Of the same numbers, what float32 gives within half a step; NaN stays NaN."""
    narrow = [random(2, 8, length, 24, seed=n, dtype=torch.bfloat16).requires_grad_() for n in range(3)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    gradient = random(*narrow[0].shape, seed=4, dtype=torch.bfloat16)
    (got, *grads), (want, *wanted) = (
        [out, *torch.autograd.grad(out, three, gradient.to(out.dtype))]
        for three in (narrow, wide)
        for out in [lg.attend(*three, encoding=encoding, backend="table")]
    )
    assert ((got.float() - want).abs() <= want.abs() * 2.0**-8 * 1.01 + 1e-6).all()
    for gradient, exact in zip(grads, wanted, strict=True):  # delta is of an output that was rounded
        torch.testing.assert_close(gradient.float(), exact, atol=0.03, rtol=0.01)
    lost = narrow[2].detach().clone()
    lost[0, 0, 0, 0] = torch.nan
    assert lg.attend(*narrow[:2], lost, encoding=encoding, backend="table")[0, 0, :, 0].isnan().all()


@pytest.mark.parametrize(
    ("tiles", "gradients", "backend"), [(True, False, "sdpa"), (False, False, "table"), (True, True, "table")]
)
def test_bfloat16_without_gradients_is_torch_s_where_there_are_tiles(tiles, gradients, backend, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    three = [random(1, 8, 512, 64, dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3)]
    [chosen] = [verdict.backend for verdict in lg.explain(*three) if verdict.chosen]
    assert chosen == backend
