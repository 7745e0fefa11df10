"""The `table` backend against the reference: output, logsumexp and every gradient, of everything it takes."""

import copy
import math

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.attention.backends.table import backend as table, band
from longitude.positions.base import OffsetBias, OffsetVectors
from longitude.positions.composed import compose
from longitude.testing.memory_use import memory_of
from tests.support import close, heads, random

HEADS, DIM, WIDTH = 4, 8, 16
T5 = {"num_buckets": 8, "max_distance": 30}
ENCODINGS = {
    "none": lambda: [lg.NoPosition()],
    "alibi": lambda: [lg.ALiBi(HEADS)],
    "t5": lambda: [lg.T5Bias(HEADS, **T5)],
    "t5, both sides": lambda: [lg.T5Bias(HEADS, **T5, bidirectional=True)],
    "clipped": lambda: [lg.ClippedBias(HEADS, 20)],
    "shaw": lambda: [lg.Shaw(DIM, 7)],
    "shaw without values": lambda: [lg.Shaw(DIM, 7, values=False)],
    "transformer_xl": lambda: [lg.TransformerXL(HEADS, DIM, WIDTH)],
    "transformer_xl, clamped": lambda: [lg.TransformerXL(HEADS, DIM, WIDTH, clamp_length=11)],
    "fox": lambda: [lg.FoX(WIDTH, HEADS)],
    "fox, scaled": lambda: [lg.FoX(WIDTH, HEADS, scale_gate=True)],
    "alibi+fox": lambda: [lg.ALiBi(HEADS), lg.FoX(WIDTH, HEADS)],
    "shaw+fox": lambda: [lg.Shaw(DIM, 7), lg.FoX(WIDTH, HEADS)],
    "t5+shaw": lambda: [lg.T5Bias(HEADS, **T5), lg.Shaw(DIM, 7)],
    "alibi+shaw": lambda: [lg.ALiBi(HEADS), lg.Shaw(DIM, 7)],
    "shaw+transformer_xl": lambda: [lg.Shaw(DIM, 7), lg.TransformerXL(HEADS, DIM, WIDTH, clamp_length=40)],
    "everything": lambda: [*ENCODINGS["t5+shaw"](), lg.TransformerXL(HEADS, DIM, WIDTH), lg.FoX(WIDTH, HEADS)],
}


def built(name: str) -> lg.Composed:
    """In float64, with random parameters."""
    return testing.fill(compose(ENCODINGS[name]()).double(), seed=1)


def problem(length: int, batch: int = 2):
    """q, k, v of `length` tokens, and the tokens x that context reads."""
    return [
        x.requires_grad_() for x in (*heads(length, batch, HEADS, head_dim=DIM), random(batch, length, WIDTH, seed=9))
    ]


def answer(backend, encoding, inputs, rows=slice(None), **options):
    """Output and logsumexp of the queries `rows`, and the gradients, through both, of the inputs and what is learned."""
    q, k, v, x = inputs
    context = {name: column.to(torch.float64) for name, column in encoding.context(x)[0].items()}
    options = {"encoding": encoding, "context": context, "return_lse": True, **options}
    out, lse = lg.attend(q[:, :, rows], k, v, backend=backend, **options)
    grads = [random(*t.shape, seed=t.dim()).to(t) for t in (out, lse)]
    wanted = [*inputs, *encoding.parameters()]
    names = [*"qkvx", *(name for name, _ in encoding.named_parameters())]
    got = torch.autograd.grad((out, lse), wanted, grads, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"gradient of {n}": g for n, g in zip(names, got, strict=True)}


def compare(name, length, **options):
    encoding, inputs = built(name), problem(length)
    if encoding.causal_only and (options.get("mask", lg.Causal()).reach[0] is None):
        return
    close(*(answer(b, encoding, inputs, **options) for b in ("table", "reference")), atol=1e-10, rtol=1e-10)


def masks(length: int) -> dict[str, lg.Mask]:
    order = torch.arange(length)
    ids = torch.stack([order // 50, (order > 90).long()])
    valid = torch.stack([order >= length // 4, order < length - length // 3])
    return {
        "causal": lg.Causal(),
        "short window": lg.Window(9),
        "long window": lg.Window(70),
        "no mask": lg.NoMask(),
        "packed": lg.Causal() & lg.Documents(ids),
        "padded": lg.Causal() & lg.Padding(valid),
        "padded, both sides": lg.Padding(valid),
        "packed and padded in a window": lg.Window(33) & lg.Documents(ids) & lg.Padding(valid),
    }


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", masks(1))
@pytest.mark.parametrize("name", ENCODINGS)
def test_equals_the_reference(name, kind):
    for length in (7, 131):
        compare(name, length, mask=masks(length)[kind])


@pytest.mark.one_in(7)
@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "tiles"])
@pytest.mark.parametrize("rows", [131, 5, 3, 1])
@pytest.mark.parametrize("kind", masks(1))
@pytest.mark.parametrize("name", ["none", "alibi", "t5, both sides"])
def test_the_last_queries_under_every_mask(name, kind, rows, compiler, monkeypatch):
    """Only a part of the spans is computed; few queries take a loop of their own."""
    if not compiler:
        monkeypatch.setattr(table.band, "available", lambda dtype: False)
        monkeypatch.setattr(band, "functions", lambda dtype: None)
    compare(name, 131, mask=masks(131)[kind], rows=slice(131 - rows, None))


@pytest.mark.parametrize("start", [[0, 0, 0], [7, 100, 3], [[7, 100, 3], [0, 1, 2]]], ids=str)
def test_positions_that_start_again_with_each_document(start):
    """At one offset everywhere: one table, whatever the positions; documents at different offsets are calls of their own."""
    ids = torch.arange(131) // 50
    within = torch.arange(131) - 50 * ids
    positions = torch.tensor(start)[..., ids] + within
    compare("t5", 131, mask=lg.Causal() & lg.Documents(ids), q_positions=positions, k_positions=positions)
    behind = torch.tensor([0, 4, 9])[ids]
    compare("t5", 131, mask=lg.Causal() & lg.Documents(ids), q_positions=positions + behind, k_positions=positions)


PLACES = {
    "the last queries": (slice(-37, None), {}),
    "one token": (slice(-1, None), {}),
    "an int for both": (slice(-37, None), {"q_positions": 1000, "k_positions": 906}),
    "keys far behind": (slice(-37, None), {"q_positions": 1000, "k_positions": 0}),
    "keys a little behind": (slice(-37, None), {"q_positions": 135, "k_positions": 17}),
    "keys ahead": (slice(-37, None), {"q_positions": 3, "k_positions": 40}),
    "tensors": (slice(None), {"q_positions": torch.arange(131) + 5, "k_positions": torch.arange(131)}),
    "rows": (
        slice(-37, None),
        {
            n: torch.tensor([[a], [a + 7]]) + torch.arange(m)
            for n, a, m in (("q_positions", 100, 37), ("k_positions", 0, 131))
        },
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_positions_of_shards_and_caches(name, place):
    """Fewer queries than keys, at offsets that an int gives, or positions that count up by one."""
    rows, positions = PLACES[place]
    for mask in (lg.Causal(), lg.Window(30), lg.NoMask()):
        compare(name, 131, rows=rows, mask=mask, **positions)


@pytest.mark.parametrize("name", ENCODINGS)
def test_without_the_logsumexp(name):
    """What all far offsets share changes the logsumexp and not the output, which alone is computed here."""
    encoding, (q, k, v, x) = built(name), problem(131)
    options = {"encoding": encoding, "context": encoding.context(x)[0], "backend": "table"}
    close(lg.attend(q, k, v, **options), lg.attend(q, k, v, **options, return_lse=True)[0])


# ---- other dtypes: against the reference in float64 on the same rounded numbers ------------------------------------------
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ENCODINGS)
def test_other_dtypes_stay_within_their_rounding(name, dtype):
    encoding, inputs = built(name), problem(131)
    small = copy.deepcopy(encoding).float()
    exact = copy.deepcopy(small).double()
    *heads, x = (t.detach().to(dtype) for t in inputs)
    x = x.float()
    ours = answer("table", small, [t.requires_grad_() for t in (*heads, x)])
    theirs = answer("reference", exact, [t.detach().double().requires_grad_() for t in (*heads, x)])
    assert ours["out"].dtype == dtype and ours["lse"].dtype == torch.float32
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    for what, t in ours.items():
        assert t.dtype == (
            dtype if what in ("out", "gradient of q", "gradient of k", "gradient of v") else torch.float32
        )
        error = (t.double() - theirs[what]).abs().max() / theirs[what].abs().max().clamp(min=1.0)
        assert error <= tolerance, (what, float(error))


# ---- the reach that terms declare, which the backend relies on -----------------------------------------------------------
REACHING = {
    "t5, short": lambda: lg.T5Bias(HEADS, num_buckets=32, max_distance=33),
    "t5, odd": lambda: lg.T5Bias(HEADS, num_buckets=7, max_distance=1001),
    "t5, both sides, odd": lambda: lg.T5Bias(HEADS, num_buckets=10, max_distance=77, bidirectional=True),
    "clipped at 1": lambda: lg.ClippedBias(HEADS, 1),
    "shaw at 1": lambda: lg.Shaw(DIM, 1),
    "clamped at 1": lambda: lg.TransformerXL(HEADS, DIM, WIDTH, clamp_length=1),
    "everything": lambda: built("everything"),
}


@pytest.mark.parametrize("name", [*lg.list_encodings(), *REACHING])
def test_the_reach_of_a_term_is_true(name):
    """All offsets of `reach` or more have the numbers of `reach`, however far."""
    encoding = REACHING[name]().double() if name in REACHING else testing.example(name)()
    encoding = testing.fill(encoding, seed=3)
    x = torch.randn(1, 3, testing.SHAPES["dim"], dtype=torch.float64)
    terms = [t for t in encoding.terms(encoding.context(x)[0]) if isinstance(t, OffsetBias | OffsetVectors)]
    if name in (*REACHING, "t5", "clipped", "shaw"):
        assert any(term.reach is not None for term in terms)
    for term in terms:
        if term.reach is None:
            continue
        functions = [term.at] if isinstance(term, OffsetBias) else [term.keys, *([term.values] if term.values else [])]
        far = term.reach + torch.tensor([*range(400), 1023, 4095, 131071 - term.reach, 2**31])
        for of in functions:
            here, there = of(torch.full_like(far, term.reach)), of(far)
            close(here, there, atol=1e-13)
            # The same in one call per offset, where a term may take another way.
            close(of(far[-1:]), of(far[:1]), atol=1e-13)


# ---- memory, refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["t5", "transformer_xl, clamped", "transformer_xl", "shaw", "fox", "everything"])
def test_explain_estimates_its_memory(name):
    encoding = built(name).float()
    *inputs, x = (t.detach().float() for t in problem(2048, batch=1))
    with torch.no_grad():
        context = encoding.context(x)[0]
        (declared,) = (
            v.memory for v in lg.explain(*inputs, encoding=encoding, context=context) if v.backend == "table"
        )
        peak = memory_of(lambda: lg.attend(*inputs, encoding=encoding, context=context, backend="table")).peak
    peak -= inputs[0].nbytes
    assert declared / 3 <= peak <= 3 * declared, (peak, declared)


def test_rows_without_keys_are_zeros():
    """Even where far offsets share values, which no such row adds."""
    order = torch.arange(131)
    encoding, inputs = built("everything"), problem(131)
    got = answer("table", encoding, inputs, mask=lg.Causal() & lg.Padding(order >= 40))
    assert (got["out"][:, :, :40] == 0).all() and (got["lse"][:, :, :40] == -math.inf).all()
    assert (got["out"][:, :, 40:] != 0).all() and got["lse"][:, :, 40:].isfinite().all()
    assert all(t.isfinite().all() for name, t in got.items() if name != "lse")
    assert (got["gradient of q"][:, :, :40] == 0).all()


@pytest.mark.parametrize("name", [name for name in ENCODINGS if "fox" not in name and name != "everything"])
def test_more_queries_than_keys(name):
    """The first queries stand before the first key; a gate has no token there."""
    encoding, (q, k, v, x) = built(name), problem(131)
    inputs = [q, *(t[:, :, :90].detach().requires_grad_() for t in (k, v)), x]
    ours, theirs = (answer(backend, encoding, inputs) for backend in ("table", "reference"))
    assert (ours["out"][:, :, :41] == 0).all() and (ours["lse"][:, :, :41] == -math.inf).all()
    close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_positions_that_do_not_count_up_are_refused_where_they_are_read():
    q, k, v, x = problem(6)
    skipping = torch.tensor([0, 1, 2, 4, 5, 6])
    with pytest.raises(ValueError, match="positions do not count up by one"):
        lg.attend(q, k, v, encoding=built("shaw"), k_positions=skipping, q_positions=skipping, backend="table")
    fox = built("fox")  # reads order, not positions
    options = {"encoding": fox, "context": fox.context(x)[0], "q_positions": skipping, "k_positions": skipping}
    outs = [lg.attend(q, k, v, **options, backend=backend) for backend in ("table", "reference")]
    close(*outs)
