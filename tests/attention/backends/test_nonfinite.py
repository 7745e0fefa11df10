"""NaN and infinities go where the formula sends them, in gradients too. They never hang, and never turn into zeros.

The rule: *where an answer is finite, it is right*, as the reference gives it for each query alone with the keys that it sees.
(Infinite keys are not tried under reflections, whose sums are -inf in one order and NaN in another.)
The rule does not say that the rest stays finite: inside a block a mask hides by a weight of 0 or a score of -inf, and 0 * NaN is
NaN. `test_what_stays_finite` says what every route keeps apart.
"""

import math
from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.attention.backends import chunked
from longitude.positions.composed import compose
from longitude.testing.attend_calls import Call
from longitude.testing.fixtures import differentiable, parameters_of
from tests.support import random

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
    "reflections": lambda: lg.PaTH(WIDTH, HEADS, DIM, chunk_size=2),
    "reflections and gates": lambda: lg.encoding("path_fox", dim=WIDTH, num_heads=HEADS, head_dim=DIM, chunk_size=2),
}
# More tokens than a vector of the processor holds, and fewer: kernels treat the two differently.
SIZES = [(11, torch.float64, 1e-9), (3, torch.float32, 1e-3)]


@pytest.fixture(autouse=True)
def _blocks_of_a_few_queries(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**13)


def make_call(name: str, length: int, dtype: torch.dtype, mask: lg.Mask | None = None) -> Call:
    encoding = testing.fill(compose(ENCODINGS[name]()).to(dtype), seed=3)
    tensors = {n: random(1, HEADS, length, DIM, seed=s, dtype=dtype) for s, n in enumerate("qkv")}
    return Call(encoding, tensors | {"x": random(1, length, WIDTH, seed=4, dtype=dtype)}, mask or lg.Causal())


def answer(call: Call, forward, spoil=lambda grad: grad) -> dict[str, torch.Tensor]:
    """The output, and the gradients of all tensors and parameters, of a loss that reads what is not finite."""
    wanted = differentiable(**call.tensors)
    out = forward(wanted)
    wanted |= parameters_of(call.encoding)
    direction = spoil(random(*out.shape, seed=5).to(out)) * out.detach()
    grads = torch.autograd.grad(out, list(wanted.values()), direction, allow_unused=True, materialize_grads=True)
    return {"output": out.detach(), **dict(zip(wanted, grads, strict=True))}


def by_rows(call: Call, first):
    """Each query alone, with the keys it sees: first(i) .. i."""

    def forward(tensors):
        q, k, v, x = tensors.values()
        columns, rows = call.context(x), []
        for i in range(q.shape[2]):
            seen = slice(first(i), i + 1)
            context = {name: column[:, :, seen] for name, column in columns.items()}
            options = {"encoding": call.encoding, "context": context, "backend": "reference"}
            options |= {"q_positions": torch.tensor([i]), "k_positions": torch.arange(first(i), i + 1)}
            rows.append(lg.attend(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], **options))
        return torch.cat(rows, 2)

    return forward


POISONS = {
    **{f"{value} in {name}": (name, value) for name in "qkv" for value in (math.nan, math.inf, -math.inf)},
    "nan in x": ("x", math.nan),
    "nan in grad": ("grad", math.nan),
    "nan in what is learned": ("learned", math.nan),
    "every score of a query -inf": ("row", -math.inf),
    "every score -inf": ("all", -math.inf),
}


def poison(call: Call, name: str, value: float) -> None:
    q, k, middle = call.tensors["q"], call.tensors["k"], call.tensors["q"].shape[2] // 2
    if name == "learned":
        for parameter in call.encoding.parameters():
            parameter.data.view(-1)[-1] = value
    elif name == "row":
        k.abs_()
        q[0, 0, middle] = value
    elif name == "all":
        q.abs_()
        k[:] = value
    elif name in "qkvx":
        call.tensors[name][..., middle, 1] = value  # of every head


def applies(name: str, where: str, value: float) -> bool:
    encoding = make_call(name, 3, torch.float32).encoding
    if where == "learned":
        return len([*encoding.parameters()]) > 0
    if "reflections" in name and where in ("k", "row", "all"):
        return math.isnan(value)
    return where != "x" or compose(encoding).reads_tokens


CASES = [(name, what) for name in ENCODINGS for what, how in POISONS.items() if applies(name, *how)]


@pytest.mark.one_in(37)
@pytest.mark.parametrize(("name", "what"), CASES)
def test_where_an_answer_is_finite_it_is_right(name, what):
    def spoil(grad):
        if POISONS[what][0] == "grad":
            grad[..., grad.shape[2] // 2, 1] = math.nan
        return grad

    for length, dtype, tolerance in SIZES:
        for mask, first in ((lg.Causal(), lambda i: 0), (lg.Window(4), lambda i: max(0, i - 3))):
            call = make_call(name, length, dtype, mask)
            poison(call, *POISONS[what])
            want = answer(call, by_rows(call, first), spoil)
            for backend in call.able():
                got = answer(call, lambda tensors: call.forward(tensors, backend), spoil)  # noqa: B023
                for n in want:
                    here, finite = f"{backend}, {dtype}, {length} tokens, {mask}, {n}", got[n].isfinite()
                    assert want[n][finite].isfinite().all(), f"{here}: finite where it depends on what is not"
                    torch.testing.assert_close(
                        got[n][finite], want[n][finite], atol=tolerance, rtol=tolerance, msg=here
                    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ENCODINGS)
def test_what_stays_finite(name):
    """Other heads and queries; where a route goes span by span, other documents and what stands in the padding, too."""
    token, every, first, later = torch.arange(11), slice(None), slice(0, 4), slice(4, None)
    by_span = ("sdpa", "table", "transport")
    documents, padded = lg.Causal() & lg.Documents(token // 4), lg.Causal() & lg.Padding(token >= 4)
    # What is not finite (heads, tokens of these tensors), what then stays finite, and where.
    for mask, names, where, there, backends in (
        (lg.Causal(), "qkv", (0, every), (1, every), None),
        (lg.Causal(), "q", (every, first), (every, later), None),
        (documents, "qkv", (every, first), (every, later), by_span),
        (padded, "kv", (every, first), (every, later), by_span),
    ):
        clean = make_call(name, 11, torch.float64, mask)
        spoiled = replace(clean, tensors={n: x.clone() for n, x in clean.tensors.items()})
        for tensor in names:
            spoiled.tensors[tensor][:, *where] = math.nan
        able = [backend for backend in clean.able() if backends is None or backend in backends]
        assert backends or {"reference", "chunked"} <= {*able}
        for backend in able:
            got, want = (answer(c, lambda t, c=c: c.forward(t, backend)) for c in (spoiled, clean))  # noqa: B023
            for n in ("output", *names):
                torch.testing.assert_close(got[n][:, *there], want[n][:, *there], msg=f"{backend}, {mask}, {n}")


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 2.5e38), (torch.float64, 2.5e150)])
def test_scores_of_any_size_are_scores(dtype, huge):
    """Near the largest numbers, all of one sign: the highest score has all the weight, as in the specification."""
    for length in (3, 11):  # few queries and many take two loops in C
        call = make_call("fixed bias", length, dtype)
        call.tensors["k"][..., 0] = torch.linspace(0.9, 1.3, length)[torch.arange(length) * 2 % length]
        for sign in (1, -1):
            call.tensors["q"].zero_()[..., 0] = sign * huge
            want = call.forward(call.tensors, "reference")
            assert want.isfinite().all()
            for backend in call.able():
                torch.testing.assert_close(call.forward(call.tensors, backend), want, msg=f"{backend}, {length} tokens")
