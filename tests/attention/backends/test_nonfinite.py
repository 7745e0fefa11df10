"""NaN and infinities go where the formula sends them. They never hang, and never turn into zeros.

The rule, for outputs and all gradients: *where an answer is finite, it is right*. What is right is the reference, asked for
each query alone with the keys that it sees, so that nothing is hidden in it. Whatever depends on a number that is not finite
is then not finite on any route. (Infinite keys are not tried under reflections, whose sums may be taken in several orders: they
are -inf in one and NaN in another.) The rule does not say that the rest stays finite. A mask hides by a weight of 0 or a score
of -inf, and 0 * NaN is NaN: inside a block of queries and keys, what a query must not see may taint it, as in torch's own
attention. `test_what_stays_finite` says what every route keeps apart.
"""

import math

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.attention.backends import BACKENDS, chunked
from longitude.attention.operation import refusal, requests
from longitude.positions.composed import compose

HEADS, DIM, WIDTH = 2, 4, 6
ENCODINGS = {
    "nothing": list,
    "rotation": lambda: lg.Rotary(DIM, "half"),
    "fixed bias": lambda: lg.ALiBi(HEADS),
    "learned bias": lambda: lg.T5Bias(HEADS, num_buckets=4, max_distance=8),
    "pair bias": lambda: lg.Fire(HEADS),
    "vectors": lambda: lg.Shaw(DIM, 2),
    "vectors with a shift": lambda: lg.TransformerXL(HEADS, DIM, WIDTH),
    "gates": lambda: lg.FoX(WIDTH, HEADS),
    "counts": lambda: lg.CoPE(DIM, 4),
    "reflections": lambda: lg.PaTH(WIDTH, HEADS, DIM),
    "reflections and gates": lambda: lg.encoding("path_fox", dim=WIDTH, num_heads=HEADS, head_dim=DIM),
}
# More tokens than a vector of the processor holds, and fewer: kernels treat the two differently.
SIZES = [(11, torch.float64, 1e-9), (3, torch.float32, 1e-3)]


@pytest.fixture(autouse=True)
def _blocks_of_a_few_queries(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**13)


def built(name: str, dtype: torch.dtype) -> lg.Composed:
    return testing.fill(compose(ENCODINGS[name]()).to(dtype), seed=3)


def numbers(length: int, dtype: torch.dtype, batch: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    widths = {"q": (HEADS, length, DIM), "k": (HEADS, length, DIM), "v": (HEADS, length, DIM), "x": (length, WIDTH)}
    widths["grad"] = widths["q"]
    return {name: torch.randn(batch, *shape, generator=generator).to(dtype) for name, shape in widths.items()}


def answer(n, encoding, forward) -> dict[str, torch.Tensor]:
    """The output of forward(q, k, v, columns), and the gradients of q, k, v, x and what is learned, of half its squares: a
    loss that reads an output which is not finite."""
    wanted = {name: n[name].detach().requires_grad_() for name in "qkvx"}
    out = forward(*(wanted[name] for name in "qkv"), encoding.context(wanted["x"])[0])
    wanted |= dict(encoding.named_parameters())
    grads = torch.autograd.grad(
        out, list(wanted.values()), n["grad"] * out.detach(), allow_unused=True, materialize_grads=True
    )
    return {"output": out.detach(), **{f"gradient of {name}": g for name, g in zip(wanted, grads, strict=True)}}


def by_rows(n, encoding, first) -> dict[str, torch.Tensor]:
    """Each query alone, with the keys it sees: first(i) .. i."""

    def forward(q, k, v, columns):
        rows = []
        for i in range(q.shape[2]):
            seen = slice(first(i), i + 1)
            options = {"encoding": encoding, "context": {name: column[:, :, seen] for name, column in columns.items()}}
            options |= {"q_positions": torch.tensor([i]), "k_positions": torch.arange(first(i), i + 1)}
            row = q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen]
            rows.append(lg.attend(*row, **options, backend="reference"))
        return torch.cat(rows, 2)

    return answer(n, encoding, forward)


def takes(backend: str, n, encoding, mask) -> bool:
    columns = encoding.context(n["x"])[0]
    parts = requests(n["q"], n["k"], n["v"], encoding, columns, mask, None, None, None, 0.0, False)
    return refusal(BACKENDS[backend], [part.request for part in parts]) is None


def by(backend: str, n, encoding, mask) -> dict[str, torch.Tensor]:
    def forward(q, k, v, columns):
        return lg.attend(q, k, v, encoding=encoding, context=columns, mask=mask, backend=backend)

    return answer(n, encoding, forward)


def right_where_finite(what: str, got, want, tolerance: float) -> None:
    for name in want:
        finite = got[name].isfinite()
        wrong = finite & ~want[name].isfinite()
        assert not wrong.any(), f"{what}, {name}: finite where it depends on what is not, such as {got[name][wrong][0]}"
        torch.testing.assert_close(got[name][finite], want[name][finite], atol=tolerance, rtol=tolerance, msg=what)


POISONS = {
    **{f"{value} in {name}": (name, value) for name in "qkv" for value in (math.nan, math.inf, -math.inf)},
    "nan in x": ("x", math.nan),
    "nan in grad": ("grad", math.nan),
    "nan in what is learned": ("learned", math.nan),
    "every score of a query -inf": ("row", -math.inf),
    "every score -inf": ("all", -math.inf),
}


def poisoned(length: int, dtype: torch.dtype, encoding: lg.Composed, name: str, value: float):
    n = numbers(length, dtype)
    if name == "learned":
        for parameter in encoding.parameters():
            parameter.data.view(-1)[-1] = value
    elif name == "row":
        n["k"].abs_()
        n["q"][0, 0, length // 2] = value
    elif name == "all":
        n["q"].abs_()
        n["k"][:] = value
    else:
        n[name][..., length // 2, 1] = value  # of every head
    return n


CASES = [
    (name, poison)
    for name in ENCODINGS
    for poison, (where, value) in POISONS.items()
    if not ("reflections" in name and where in ("k", "row", "all") and value in (math.inf, -math.inf))
    and not (where == "learned" and not list(built(name, torch.float32).parameters()))
    and not (where == "x" and not built(name, torch.float32).reads_tokens)
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("name", "poison"), CASES)
def test_where_an_answer_is_finite_it_is_right(name, poison):
    for length, dtype, tolerance in SIZES:
        encoding = built(name, dtype)
        n = poisoned(length, dtype, encoding, *POISONS[poison])
        for mask, first in ((lg.Causal(), lambda i: 0), (lg.Window(4), lambda i: max(0, i - 3))):
            want = by_rows(n, encoding, first)
            for backend in BACKENDS:
                if takes(backend, n, encoding, mask):
                    what = f"{backend}, {dtype}, {length} tokens, {mask}"
                    right_where_finite(what, by(backend, n, encoding, mask), want, tolerance)


SPAN_BY_SPAN = ("sdpa", "table", "transport")
"""They cut documents and padding away, where `reference` and `chunked` hold whole rows."""


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_stays_finite(name):
    """On every route: other sequences of the batch, other heads, and other queries than the one that is not finite. Where a
    route goes span by span: other documents, and whatever stands in the padding."""
    length, dtype = 11, torch.float64
    token = torch.arange(length)
    causal, documents = lg.Causal(), lg.Causal() & lg.Documents(token // 4)
    padded = lg.Causal() & lg.Padding(token >= 4)
    every, first, later = slice(None), slice(0, 4), slice(4, None)
    # What is not finite (sequences, heads, tokens of these tensors), and what then stays finite.
    cases = {
        "another sequence": (causal, "qkv", (0, every, every), (1, every, every)),
        "another head": (causal, "qkv", (every, 0, every), (every, 1, every)),
        "another query": (causal, "q", (every, every, first), (every, every, later)),
        "another document": (documents, "qkv", (every, every, first), (every, every, later)),
        "padding": (padded, "kv", (every, every, first), (every, every, later)),
    }
    encoding, tried = built(name, dtype), set()
    for kind, (mask, names, where, there) in cases.items():
        clean, n = numbers(length, dtype, batch=2), numbers(length, dtype, batch=2)
        for tensor in names:
            n[tensor][where] = math.nan
        for backend in BACKENDS:
            if takes(backend, n, encoding, mask) and (
                kind not in ("another document", "padding") or backend in SPAN_BY_SPAN
            ):
                tried.add(kind)
                got, want = (by(backend, numbers, encoding, mask) for numbers in (n, clean))
                for name in ("output", *(f"gradient of {tensor}" for tensor in names)):
                    torch.testing.assert_close(got[name][there], want[name][there], msg=f"{backend}, {kind}, {name}")
    assert {"another sequence", "another head", "another query"} <= tried


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 2.5e38), (torch.float64, 2.5e150)])
def test_scores_of_any_size_are_scores(dtype, huge):
    """Near the largest numbers, all of one sign: the highest score has all the weight, as in the specification."""
    encoding = built("fixed bias", dtype)
    for length in (3, 11):  # few queries and many take two loops in C
        n = numbers(length, dtype)
        n["k"][..., 0] = torch.linspace(0.9, 1.3, length)[torch.arange(length) * 2 % length]
        for sign in (1, -1):
            n["q"].zero_()[..., 0] = sign * huge
            want = lg.attend(*(n[x] for x in "qkv"), encoding=encoding, backend="reference")
            assert want.isfinite().all()
            for backend in BACKENDS:
                if takes(backend, n, encoding, lg.Causal()):
                    got = by(backend, n, encoding, lg.Causal())["output"]
                    torch.testing.assert_close(got, want, msg=f"{backend}, {dtype}, {length} tokens, {sign * huge}")


@pytest.mark.parametrize("name", ["fixed bias", "learned bias", "vectors", "gates"])
def test_keys_of_weight_zero_weigh_nothing_at_lengths_of_many_blocks(name, monkeypatch):
    """Where a query's keys take several calls, in some of them no key may count for it: its scores there are -inf, or its bias
    has fallen below what changes a digit. (torch's kernel says of both that their logsumexp is 0.)"""
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**24)
    length = 2100
    encoding, n = built(name, torch.float32), numbers(length, torch.float32)
    n["q"].abs_()
    for first in (0, 1030):
        n["k"][:, :, :first, 0] = -math.inf
        columns = encoding.context(n["x"])[0]
        with torch.no_grad():
            options = {"encoding": encoding, "context": columns}
            got, want = (lg.attend(*(n[x] for x in "qkv"), **options, backend=b) for b in ("table", "chunked"))
        assert want[:, :, first:].isfinite().all()
        torch.testing.assert_close(got[:, :, first:], want[:, :, first:], atol=2e-5, rtol=1e-4)
        assert got[:, :, :first].isnan().all()
