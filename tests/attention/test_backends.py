"""Every backend that takes a request gives the answer of the reference, forward and every gradient; a named one never
falls back."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, chunked, refuses
from longitude.attention.operation import choose, requests
from longitude.positions.base import resolved
from longitude.positions.composed import compose

GENERAL = [
    name for name in BACKENDS if name not in ("transport", "split", "flex")
]  # a transport alone, or blocks of 128 queries

HEADS, DIM, WIDTH = 4, 8, 16
SHAPE = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "dim": WIDTH, "max_length": 64, "layout": "half"}
NAMES = [*lg.list_encodings(), "rope+fox", "alibi+t5", "path+fox", "shaw+clipped"]


def request(*arguments):
    """The only request of a call."""
    (part,) = requests(*arguments)
    return part.request


def build(names: str, **shape) -> lg.Composed:
    """By name, composed with +, learned parameters random, in float64."""
    members = [lg.encoding(name, **resolved(name, {}, **{**SHAPE, **shape})) for name in names.split("+")]
    encoding = compose(members).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in encoding.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding


def problem(rows: int, keys: int, kv_heads: int = HEADS, encoding: lg.Composed | None = None):
    """q, k, v and the tokens' x, that all take gradients; columns are made anew from x at every call."""
    generator = torch.Generator().manual_seed(keys)
    shapes = (2, HEADS, rows, DIM), (2, kv_heads, keys, DIM), (2, kv_heads, keys, DIM), (2, keys, WIDTH)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def answer(inputs, encoding, mask, backend):
    """The output, and the gradients of q, k, v, x and what the encoding has learned."""
    q, k, v, x = inputs
    out = lg.attend(q, k, v, encoding=encoding, context=encoding.context(x)[0], mask=mask, backend=backend)
    wanted = [*inputs, *(p for p in encoding.parameters() if p.requires_grad)]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)]


def masks(keys: int) -> dict[str, lg.Mask]:
    order = torch.arange(keys)
    ids = torch.stack([order // 5, order // 30])
    valid = torch.stack([order >= keys // 4, order < keys - keys // 3])
    return {
        "causal": lg.Causal(),
        "window": lg.Window(9),
        "packed": lg.Causal() & lg.Documents(ids),
        "padded": lg.Causal() & lg.Padding(valid),
        "sinks": lg.Causal() & (lg.Window(3) | lg.Documents((order >= 2).long())),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", masks(1))
@pytest.mark.parametrize("name", NAMES)
def test_same_answer(name, case, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**15)  # `chunked` in blocks of a few rows at these lengths
    taken = set()
    for rows, keys in ((1, 1), (7, 7), (33, 33), (5, 21)):
        for kv_heads in (HEADS, 2):
            encoding = build(name, num_kv_heads=kv_heads)
            inputs, mask = problem(rows, keys, kv_heads), masks(keys)[case]
            q, k, v, x = inputs
            context = encoding.context(x)[0]
            r = request(q, k, v, encoding, context, mask, None, None, None, 0.0, False)
            expected = answer(inputs, encoding, mask, "reference")
            for backend in BACKENDS.values():
                if backend.name == "reference" or refuses(backend, r):
                    continue
                taken.add(backend.name)
                for ours, theirs in zip(answer(inputs, encoding, mask, backend.name), expected, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)
    assert "chunked" in taken
    if name in ("alibi", "t5", "clipped", "alibi+t5", "shaw", "transformer_xl", "fox", "rope+fox") and case != "sinks":
        assert "table" in taken
    if name in ("none", "rope", "alibi", "sinusoidal"):
        assert "sdpa" in taken


def test_chunked_is_cut():
    """The comparison above goes through more than one block."""
    q = torch.randn(2, HEADS, 33, DIM, dtype=torch.float64)
    r = request(q, q, q, compose(lg.ALiBi(HEADS)), None, lg.Causal(), None, None, None, 0.0, False)
    assert chunked.block_rows(r) == 33
    rows = 2**15 * 33 // chunked.dense_bytes(r)
    assert 0 < rows < 5


def test_chunked_skips_what_a_window_cannot_reach(monkeypatch):
    seen = []
    reference = chunked.reference
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(chunked, "reference", lambda r, *how: seen.append((r.rows, r.length)) or reference(r, *how))
    q = torch.randn(1, HEADS, 200, DIM, dtype=torch.float64)
    out = lg.attend(q, q, q, mask=lg.Window(8), backend="chunked")
    torch.testing.assert_close(out, reference(_request(q, lg.Window(8)))[0])
    assert len(seen) > 10 and all(keys <= rows + 7 for rows, keys in seen), seen


def _request(q, mask):
    return request(q, q, q, compose(None), None, mask, None, None, None, 0.0, False)


# ---- a backend asked for by name is the one that runs, or it raises ---------------------------------------------------
LIMITS = {
    "sdpa": {
        "cope": "it does not know RowBias",
        "t5": "no gradient to what the encoding has learned",
    },
    "table": {
        "fire": "it does not know PairBias",
        "dropout": "it has no dropout",
        "weights": "it never holds the weights",
        "positions": "positions do not count up by one",
        "value width": "values as wide as keys, not 5 and 8",
    },
    "chunked": {"weights": "it never holds the weights"},
}
CASES = [(backend, case) for backend, cases in LIMITS.items() for case in cases]


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_a_named_backend_raises_and_names_one_that_works(backend, case):
    q = torch.randn(1, HEADS, 6, DIM)
    v, options = q, {}
    match case:
        case "dropout":
            options = {"dropout": 0.1}
        case "weights":
            options = {"return_weights": True}
        case "positions":
            options = {"k_positions": torch.tensor([0, 1, 3, 7, 8, 9]), "encoding": lg.ALiBi(HEADS)}
        case "value width":
            v = torch.randn(1, HEADS, 6, 5)
        case name:
            options = {"encoding": build(name).float()}
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot: .*{LIMITS[backend][case]}") as error:
        lg.attend(q, q, v, **options, backend=backend)
    *able, taken = str(error.value).rsplit("; ", 1)[1].replace("'auto'", "").split("'")[1::2]
    assert able == [name for name in able if name != backend] and taken in able
    for works in able:
        lg.attend(q, q, v, **options, backend=works)
    for refuses_too in BACKENDS.keys() - {*able}:
        with pytest.raises(ValueError, match="cannot"):
            lg.attend(q, q, v, **options, backend=refuses_too)


def test_sdpa_refuses_a_bias_it_would_round_or_that_is_long():
    q = torch.randn(1, HEADS, 6, DIM)
    with pytest.raises(ValueError, match=r"dense bias would be rounded to .*bfloat16"):
        lg.attend(*[q.bfloat16()] * 3, encoding=lg.ALiBi(HEADS), backend="sdpa")
    q = torch.empty(1, HEADS, 2049, DIM)
    with pytest.raises(ValueError, match=r"dense bias would take 64 MiB, above 64"):
        lg.attend(q, q, q, encoding=lg.ALiBi(HEADS), backend="sdpa")
    assert refuses(BACKENDS["sdpa"], _request(q, lg.Causal())) is None


def test_sdpa_takes_long_packed_text_in_half_precision():
    """Span by span it is plain causal attention: the dense mask that it would not make counts for nothing."""
    q = torch.empty(1, HEADS, 8192, DIM, dtype=torch.bfloat16)
    r = _request(q, lg.Causal() & lg.Documents(torch.arange(8192) // 1000))
    assert refuses(BACKENDS["sdpa"], r) is None and BACKENDS["sdpa"].memory(r) == 0
    assert choose([r], "auto").name == "sdpa"
    recurring = _request(q, lg.Causal() & lg.Documents(torch.arange(8192) // 1000 % 2))
    assert "dense bias would take 128 MiB" in refuses(BACKENDS["sdpa"], recurring)


@pytest.mark.parametrize("name", GENERAL)
def test_the_named_backend_is_the_one_that_runs(name, monkeypatch):
    ran = []
    for other in BACKENDS.values():
        spy = replace(other, run=lambda r, other=other: ran.append(other.name) or other.run(r))
        monkeypatch.setitem(BACKENDS, other.name, spy)
    q = torch.randn(1, HEADS, 6, DIM)
    lg.attend(q, q, q, encoding=lg.ALiBi(HEADS), backend=name)
    assert ran == [name]


def test_auto_takes_the_cheapest():
    q = torch.randn(1, HEADS, 40, DIM)
    for encoding, chosen in ((None, "sdpa"), (lg.Rotary(DIM, "half"), "sdpa"), (lg.ALiBi(HEADS), "table")):
        r = request(q, q, q, compose(encoding), None, lg.Causal(), None, None, None, 0.0, False)
        assert choose([r], "auto").name == chosen
    shaw = compose(lg.Shaw(DIM))
    assert choose([request(q, q, q, shaw, None, lg.Causal(), None, None, None, 0.0, False)], "auto").name == "table"
    fire = compose(lg.Fire(HEADS))
    assert choose([request(q, q, q, fire, None, lg.Causal(), None, None, None, 0.0, False)], "auto").name == "reference"
    q = torch.empty(1, HEADS, 8192, DIM)
    assert choose([request(q, q, q, fire, None, lg.Causal(), None, None, None, 0.0, False)], "auto").name == "chunked"
