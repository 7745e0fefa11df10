"""Bands, prefixes, global tokens and dilated windows: pair by pair, on every backend, cached, and at what price."""

import random

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, refuses
from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.masks import Band, Mask
from longitude.attention.operation import requests
from longitude.attention.patterns import Dilated, Global, Prefix
from longitude.positions.composed import compose
from tests.support import close

KEYS, HEADS, DIM = 11, 4, 8
LENGTHS = torch.tensor([4, 0])
TOKENS = torch.zeros(2, KEYS, dtype=torch.bool)
TOKENS[0, 2] = TOKENS[0, 7] = TOKENS[1, 0] = True
IDS = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 2, 2, 2, 2], [1] * 8 + [5] * 3])
VALID = torch.tensor([[0, 0] + [1] * 9, [1] * 8 + [0] * 3])

# A mask and the same in words: whether the query of order i sees the key of order j in sequence b.
ATOMS = {
    "band": (Band(3, 1), lambda b, i, j: i - 3 <= j <= i + 1),
    "band of one": (Band(0, 0), lambda b, i, j: i == j),
    "prefix": (Prefix(4), lambda b, i, j: j <= i or (i < 4 and j < 4)),
    "prefix of none": (Prefix(0), lambda b, i, j: j <= i),
    "prefix of all": (Prefix(99), lambda b, i, j: True),
    "prefix of each row": (Prefix(LENGTHS), lambda b, i, j: j <= i or (i < LENGTHS[b] and j < LENGTHS[b])),
    "global": (Global(TOKENS), lambda b, i, j: TOKENS[b, i] or TOKENS[b, j]),
    "global of all": (Global(TOKENS[0]), lambda b, i, j: TOKENS[0, i] or TOKENS[0, j]),
    "global by place": (Global([0, 5]), lambda b, i, j: i in (0, 5) or j in (0, 5)),
    "dilated": (Dilated(3, 2), lambda b, i, j: i - j in (0, 2, 4)),
    "dilated by one": (Dilated(3, 1), lambda b, i, j: i - j in (0, 1, 2)),
    "dilated wide": (Dilated(2, 7), lambda b, i, j: i - j in (0, 7)),
    "window": (lg.Window(3), lambda b, i, j: i - j in (0, 1, 2)),
    "causal": (lg.Causal(), lambda b, i, j: j <= i),
    "documents": (lg.Documents(IDS), lambda b, i, j: IDS[b, i] == IDS[b, j]),
    "padding": (lg.Padding(VALID), lambda b, i, j: VALID[b, j] == 1),
}


def truth(name: str) -> torch.Tensor:
    """[2, KEYS, KEYS]."""
    _, sees = ATOMS[name]
    return torch.tensor([[[bool(sees(b, i, j)) for j in range(KEYS)] for i in range(KEYS)] for b in range(2)])


def table(mask: Mask, q_order: torch.Tensor, k_order: torch.Tensor) -> torch.Tensor:
    allowed = mask.allowed(q_order, k_order)
    assert allowed.dtype == torch.bool
    return (allowed[:, 0] if allowed.dim() == 4 else allowed).expand(2, -1, -1)


def check(mask: Mask, expected: torch.Tensor) -> None:
    order = torch.arange(KEYS)
    for rows in (KEYS, 4, 1):
        assert torch.equal(table(mask, order[KEYS - rows :], order), expected[:, KEYS - rows :])
    for b in (0, 1):  # rows of the batch, and the stream without its first tokens
        assert torch.equal(table(mask.of([b]), order, order)[0], expected[b])
        assert torch.equal(table(mask.of(slice(b, b + 1)), order, order)[0], expected[b])
    for first in (1, 3, 6):
        assert torch.equal(table(mask.since(first), order[:-first], order[:-first]), expected[:, first:, first:])
    ago, (low, high) = order[:, None] - order, mask.reach
    assert low is None or not (expected & (ago < low)).any()
    assert high is None or not (expected & (ago > high)).any()


@pytest.mark.parametrize("name", ATOMS)
def test_truth_of_one(name):
    check(ATOMS[name][0], truth(name))


def test_truth_of_many():
    """Trees of & and |, drawn with a fixed seed."""
    draw = random.Random(0)

    def tree(depth: int) -> tuple[Mask, torch.Tensor]:
        if depth == 0:
            name = draw.choice(list(ATOMS))
            return ATOMS[name][0], truth(name)
        (x, a), (y, b) = tree(draw.randrange(depth)), tree(draw.randrange(depth))
        return (x & y, a & b) if draw.random() < 0.5 else (x | y, a | b)

    for _ in range(100):
        check(*tree(4))


def test_how_many_keys():
    """The numbers that libraries differ in by one."""
    order = torch.arange(40)

    def seen(mask: Mask) -> list[int]:
        return [j for j in range(40) if table(mask, order, order)[0, 20, j]]

    assert seen(lg.Window(4)) == [17, 18, 19, 20]
    assert seen(Band(3, 0)) == [17, 18, 19, 20]
    assert seen(Band(2, 2)) == [18, 19, 20, 21, 22]
    assert seen(Dilated(4, 5)) == [5, 10, 15, 20]
    assert seen(Prefix(21)) == [*range(21)]
    assert seen(Prefix(22)) == [*range(22)]
    assert (Dilated(4, 5).reach, Band(3, 1).reach, Prefix(5).reach) == ((0, 15), (-1, 3), (-4, None))


# ---- every backend ----------------------------------------------------------------------------------------------------
def drawn(draw: random.Random, keys: int) -> Mask:
    """A pattern, and whatever may be joined to it."""
    tokens = draw.choice([torch.rand(keys) < 0.2, torch.rand(2, keys) < 0.2, [draw.randrange(keys)]])
    mask = draw.choice(
        [
            Prefix(draw.randint(0, keys + 3)),
            Prefix(torch.randint(0, keys + 2, (2,))),
            Prefix(5) & Dilated(4, 3),
            Prefix(4) & Band(3, 2),
            Dilated(draw.randint(1, 5), draw.randint(1, 6)),
            Dilated(4, 3) & lg.Window(draw.randint(1, 12)),
            lg.Window(draw.randint(1, 6)) | Global(tokens),
            Band(2, 3) | Global(tokens) | Global([0]),
            (lg.Window(3) | Global(tokens)) & lg.Causal(),
            Dilated(3, 2) | Global(tokens),
            Global(tokens),
            Band(draw.randint(0, 4), draw.randint(0, 4)),
        ]
    )
    if draw.random() < 0.5:
        mask = mask & lg.Documents((torch.rand(draw.choice([1, 2]), keys) < 0.15).cumsum(-1))
    if draw.random() < 0.5:
        first = torch.tensor([[draw.randint(0, keys // 2)], [draw.randint(0, keys // 3)]])
        mask = mask & lg.Padding(torch.arange(keys) >= first)
    return mask


def encodings(width: int) -> dict[str, lg.Encoding | None]:
    torch.manual_seed(0)
    return {
        "none": None,
        "rotated": lg.Rotary(DIM, "half"),
        "offsets": lg.ALiBi(HEADS),
        "learned offsets": lg.T5Bias(HEADS).double(),
        "vectors": lg.Shaw(DIM, max_distance=5).double(),
        "pairs": lg.Fire(HEADS).double(),
        "levels": lg.FoX(width, HEADS).double(),
        "rows": lg.CoPE(DIM, max_position=8).double(),
    }


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", encodings(4))
def test_every_backend_gives_the_answer_of_the_reference(name):
    """Values, logsumexp and gradients; a refusal is in words."""
    draw, taken, encoding = random.Random(0), {}, compose(encodings(4)[name])
    for seed in range(24):
        torch.manual_seed(seed)
        keys = draw.randint(1, 40)
        rows = draw.choice([keys, draw.randint(1, keys)])
        mask = drawn(draw, keys)
        mask = mask & lg.Causal() if encoding.causal_only else mask
        shapes = (2, HEADS, rows, DIM), (2, 2, keys, DIM), (2, 2, keys, DIM)
        q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
        context = encoding.context(torch.randn(2, keys, 4, dtype=torch.float64))[0]
        (part,) = requests(q, k, v, encoding, context or None, mask, None, None, None, 0.0, False)
        r = part.request
        r = r.with_lse() if seed % 2 else r
        wanted = [q, k, v, *encoding.parameters()]

        def both_ways(backend, r=r, wanted=wanted):
            out, lse = backend.partial(r) if r.lse else (backend.run(r), torch.zeros(1, dtype=torch.float64))
            lse = lse.masked_fill(lse == -torch.inf, -9.0)
            total = out.sin().sum() + lse.sin().sum()
            gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True, retain_graph=True)
            return out, lse, *gradients

        expected = both_ways(BACKENDS["reference"])
        for backend in BACKENDS.values():
            if refuses(backend, r) is None:
                taken[backend.name] = taken.get(backend.name, 0) + 1
                for ours, theirs in zip(both_ways(backend), expected, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9, msg=f"{backend.name} {seed} {mask}")
    assert taken["chunked"] == taken["reference"] == 24
    assert (taken.get("split", 0) >= 16) == (name != "rows"), taken


@pytest.mark.parametrize("name", ["offsets", "vectors"])
def test_streams_count_offsets_from_anywhere(name):
    """A dilated window where queries and keys stand apart, in any rhythm, or each row of the batch by itself."""
    encoding = compose(encodings(4)[name])
    q, k, v = (torch.randn(2, HEADS, n, DIM, dtype=torch.float64) for n in (17, 30, 30))
    token = torch.arange(30)
    for q_positions, k_positions in (
        (40, 3),
        (13, 0),
        (token[13:] * 2, token * 2),
        (None, torch.stack([token, token // 2])),
    ):
        options = {"encoding": encoding, "mask": Dilated(4, 3), "q_positions": q_positions, "k_positions": k_positions}
        close(*(lg.attend(q, k, v, **options, backend=backend) for backend in ("split", "reference")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers(dtype):
    torch.manual_seed(0)
    wide = torch.randn(3, 2, HEADS, 65, DIM)
    for mask in (Prefix(9), Dilated(5, 4), Band(6, 6) | Global([0, 30]), (lg.Window(6) | Global([0])) & lg.Causal()):
        expected = lg.attend(*wide.to(dtype).double(), mask=mask, backend="reference")
        for backend in ("auto", "split"):
            out = lg.attend(*wide.to(dtype), mask=mask, backend=backend)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0)


# ---- layers and caches --------------------------------------------------------------------------------------------------
def layer(encoding=None) -> lg.MultiHeadAttention:
    torch.manual_seed(0)
    return lg.MultiHeadAttention(16, HEADS, 2, encoding).double()


PREFIXES = (Prefix(6), Prefix(torch.tensor([6, 2])))
CAUSAL = (Dilated(3, 2), (lg.Window(3) | Global([0, 4])) & lg.Causal())


@pytest.mark.parametrize(
    ("encoding", "masks"),
    [
        *((e, PREFIXES) for e in (None, lg.Rotary(4, "half"), lg.ALiBi(HEADS), lg.Fire(HEADS))),
        (lg.FoX(16, HEADS), CAUSAL),
    ],
)
@torch.no_grad()
def test_patterns_in_a_cache(encoding, masks):
    attention, x = layer(encoding), torch.randn(2, 15, 16, dtype=torch.float64)
    for mask in masks:
        whole, cache = attention(x, mask=mask), LongitudeCacheLayer()
        chunks = [attention(chunk, mask=mask, cache=cache) for chunk in x.split((6, 1, 1, 4, 3), 1)]
        close(torch.cat(chunks, 1), whole, atol=1e-11)
        assert not torch.allclose(whole, attention(x))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Prefix(6), "whole prefix of 6 tokens, which attend to each other, got 5 tokens in the cache"),
        (Prefix(torch.tensor([2, 6])) & lg.Documents(torch.zeros(6, dtype=torch.long)), "whole prefix of 6"),
        (lg.Window(3) | Global([0]), r"Global: .* whole sequence in one call, or .*lg.Causal\(\)"),
        (Band(3, 1), "Band: cached tokens attend to the 1 after them"),
    ],
)
@torch.no_grad()
def test_a_cache_that_would_have_had_to_see_the_future_is_refused(mask, message):
    attention, cache, x = layer(), LongitudeCacheLayer(), torch.randn(2, 6, 16, dtype=torch.float64)
    attention(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match=message):
        attention(x[:, 5:], mask=mask, cache=cache)
    assert cache.get_seq_length() == 5
    attention(x[:, 5:], mask=Band(3, 0), cache=cache)


# ---- graphs ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("mask", [Band(5, 5), Prefix(9)], ids=["band", "prefix"])
def test_compiled(mask):
    q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 2, 2, 40, 8))
    run = torch.compile(lambda *x: lg.attend(*x, mask=mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(q, k, v), lg.attend(q, k, v, mask=mask, backend="reference"), atol=1e-5, rtol=0)


# ---- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Band(-1, 2), "two numbers of tokens, 0 or more, got -1 and 2"),
        (lambda: Band(1.5, 2), "got 1.5 and 2"),
        (lambda: Prefix(-1), "0 or more tokens, an int or integers .B., got -1"),
        (lambda: Prefix(True), "got True"),
        (lambda: Prefix(torch.tensor([3, -1])), r"got tensor\(\[ 3, -1\]\)"),
        (lambda: Prefix(torch.tensor([3.0])), "got tensor"),
        (lambda: Prefix(torch.tensor(3)), r"integers \[B\], got tensor\(3\)"),
        (lambda: Global(torch.zeros(3)), r"got torch.float32 \[3\]"),
        (lambda: Global(torch.zeros(2, 3, dtype=torch.long)), r"places as integers \[n\], got torch.int64 \[2, 3\]"),
        (lambda: Global([-1]), r"places of 0 or more, got \[-1\]"),
        (lambda: Global("first"), "got 'first'"),
        (lambda: Global(3), "got 3"),
        (lambda: Dilated(0, 2), "a size of 1 or more, got 0"),
        (lambda: Dilated(2, 0), "a step of 1 or more, got 0"),
        (lambda: Dilated(2, 1.5), "a step of 1 or more, got 1.5"),
    ],
)
def test_mistakes_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Prefix(torch.tensor([1, 2, 3])), r"one length per row, \[2\], got \[3\]"),
        (Global(TOKENS[:, :5]), r"Global\(tokens\): expected \[9\] or \[2, 9\], one per key, got \[2, 5\]"),
        (Global([2, 9]), "places below 9, the number of keys, got 9"),
        (lg.Window(3) | Global(TOKENS[:1, :8]), r"got \[1, 8\]"),
        ("prefx", r"Prefix\(length\), Global\(tokens\).*did you mean lg.Prefix\?"),
        ("dilated", r"Dilated\(size, step\).*did you mean lg.Dilated\?"),
    ],
)
def test_mistakes_when_used(mask, message):
    q, k = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 9, 4)
    with pytest.raises(ValueError, match=message):
        lg.attend(q, k, k, mask=mask)


def test_queries_stand_among_the_keys():
    q, k = torch.randn(2, 1, 12, 4), torch.randn(2, 1, 9, 4)
    for mask in (Prefix(3), Global([0])):
        with pytest.raises(ValueError, match="queries among the 9 keys, got 12"):
            lg.attend(q, k, k, mask=mask)


@pytest.mark.parametrize("mask", [Prefix(3), Prefix(torch.tensor([3])), lg.Window(2) | Global([0]), Band(1, 1)])
def test_what_looks_ahead_means_nothing_to_gates(mask):
    x = torch.randn(1, 6, 16)
    for encoding in (lg.FoX(16, HEADS), lg.PaTH(16, HEADS, 4), lg.CoPE(4)):
        attention = lg.MultiHeadAttention(16, HEADS, encoding=encoding)
        with pytest.raises(ValueError, match="no meaning for keys in the future"):
            attention(x, mask=mask)
        attention(x, mask=mask & lg.Causal())


def test_split_refuses_in_words():
    q = torch.randn(1, 2, 30, 8)
    for mask, message in (
        (lg.Causal(), "no prefix, no dilated window and no global tokens"),
        (Global([1]) | Global([2]), "global tokens need a local mask"),
        (Dilated(3, 2) & Dilated(3, 4), "not with more"),
    ):
        with pytest.raises(ValueError, match=f"'split' cannot: .*{message}"):
            lg.attend(q, q, q, mask=mask, backend="split")
