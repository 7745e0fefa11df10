"""Masks against truth tables written pair by pair, what fast routes may do with them, in caches, and refusals."""

from functools import reduce
from operator import and_, or_
from random import Random

import pytest
import torch

import longitude as lg
from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.documents import places_of
from longitude.attention.masks import Band, Chunks, Global, Mask, Prefix
from tests.support import close, heads, random, refused, refused_calls

KEYS = 9
IDS = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 5]])
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]])
HOLES = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
LENGTHS = torch.tensor([4, 0])
PLACES = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [-3, -2, -1, 0, 1, 2, 0, 1, 2]])
TOKENS = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)

# A mask and the same in words: whether the query of order i attends to the key of order j in sequence b.
ATOMS = {
    "none": (lg.NoMask(), lambda b, i, j: True),
    "causal": (lg.Causal(), lambda b, i, j: j <= i),
    "window1": (lg.Window(1), lambda b, i, j: i == j),
    "window3": (lg.Window(3), lambda b, i, j: i - 3 < j <= i),
    "window99": (lg.Window(99), lambda b, i, j: j <= i),
    "documents": (lg.Documents(IDS), lambda b, i, j: IDS[b, i] == IDS[b, j]),
    "documents of all": (lg.Documents(IDS[0]), lambda b, i, j: IDS[0, i] == IDS[0, j]),
    "padding": (lg.Padding(VALID), lambda b, i, j: VALID[b, j]),
    "holes": (lg.Padding(HOLES), lambda b, i, j: HOLES[j]),
    "band": (Band(3, 1), lambda b, i, j: i - 3 <= j <= i + 1),
    "band of one": (Band(0, 0), lambda b, i, j: i == j),
    "prefix": (Prefix(4), lambda b, i, j: j <= i or (i < 4 and j < 4)),
    "prefix of none": (Prefix(0), lambda b, i, j: j <= i),
    "prefix of all": (Prefix(99), lambda b, i, j: True),
    "prefix of each row": (Prefix(LENGTHS), lambda b, i, j: j <= i or (i < LENGTHS[b] and j < LENGTHS[b])),
    "global": (Global(TOKENS), lambda b, i, j: TOKENS[b, i] or TOKENS[b, j]),
    "global of all": (Global(TOKENS[0]), lambda b, i, j: TOKENS[0, i] or TOKENS[0, j]),
    "global by place": (Global([0, 5]), lambda b, i, j: i in (0, 5) or j in (0, 5)),
    "chunks": (lg.Chunks(4), lambda b, i, j: i // 4 == j // 4),
    "chunks behind others": (lg.Chunks(4, first=3), lambda b, i, j: (i + 3) // 4 == (j + 3) // 4),
    "chunks that start over": (lg.Chunks(2, PLACES), lambda b, i, j: PLACES[b, i] // 2 == PLACES[b, j] // 2),
}


def truth(name: str) -> torch.Tensor:
    """[2, KEYS, KEYS] for queries and keys of orders 0 .. KEYS-1."""
    _, attends = ATOMS[name]
    return torch.tensor([[[bool(attends(b, i, j)) for j in range(KEYS)] for i in range(KEYS)] for b in range(2)])


def table(mask: Mask, rows: int = KEYS, keys: int = KEYS) -> torch.Tensor:
    """[2, rows, keys] as the mask itself has it; queries are the last."""
    allowed = mask.allowed(torch.arange(keys - rows, keys), torch.arange(keys))
    assert allowed.dtype == torch.bool
    return (allowed[:, 0] if allowed.dim() == 4 else allowed).expand(2, -1, -1)


def check(mask: Mask, expected: torch.Tensor) -> None:
    for rows in (KEYS, 4, 1):
        assert torch.equal(table(mask, rows), expected[:, KEYS - rows :])
    for b in (0, 1):  # rows of the batch
        assert torch.equal(table(mask.of([b]))[0], expected[b])
        assert torch.equal(table(mask.of(slice(b, b + 1)))[0], expected[b])
    for first in (1, 3, 6):  # the stream without its first tokens
        assert torch.equal(table(mask.since(first), KEYS - first, KEYS - first), expected[:, first:, first:])
    # What the reach leaves out may be skipped, so it must hold every allowed pair.
    ago, (low, high) = torch.arange(KEYS)[:, None] - torch.arange(KEYS), mask.reach
    assert low is None or not (expected & (ago < low)).any()
    assert high is None or not (expected & (ago > high)).any()


@pytest.mark.parametrize("name", ATOMS)
def test_truth_of_one(name):
    check(ATOMS[name][0], truth(name))


def test_truth_of_many():
    """Trees of & and |, drawn with a fixed seed."""
    r, truths = Random(0), {name: truth(name) for name in ATOMS}

    def tree(depth: int) -> tuple[Mask, torch.Tensor]:
        if depth == 0:
            name = r.choice(list(ATOMS))
            return ATOMS[name][0], truths[name]
        (x, a), (y, b) = tree(r.randrange(depth)), tree(r.randrange(depth))
        return (x & y, a & b) if r.random() < 0.5 else (x | y, a | b)

    for _ in range(50):
        check(*tree(4))


def test_how_far_masks_reach():
    assert (Band(3, 1).reach, Prefix(5).reach) == ((-1, 3), (-4, None))
    assert (lg.Window(3) & lg.Causal() & lg.Window(5)).reach == (0, 2)
    assert (lg.Window(3) | lg.Window(5)).reach == (0, 4)


@pytest.mark.slow
def test_every_mask_is_in_one_graph():
    """Nothing that a mask looks at stops torch.compile."""
    (q, k, v), each = heads(KEYS, head_dim=4), {type(mask): mask for mask, _ in ATOMS.values()}.values()
    joined = [reduce(and_, each), reduce(or_, each)]

    def every(q, k, v):
        return [lg.attend(q, k, v, mask=mask) for mask in joined]

    torch._dynamo.reset()
    close(torch.compile(every, backend="eager", fullgraph=True)(q, k, v), every(q, k, v))


# ---- in layers and caches -----------------------------------------------------------------------------------------------
def layer(encoding=None) -> lg.MultiHeadAttention:
    torch.manual_seed(0)
    return lg.MultiHeadAttention(16, 4, 2, encoding).double()


PREFIXES = (Prefix(6), Prefix(torch.tensor([6, 2])))
CAUSAL = ((lg.Window(3) | Global([0, 4])) & lg.Causal(), lg.Causal() & Chunks(4))


@pytest.mark.parametrize(
    ("encoding", "masks"),
    [*((e, PREFIXES) for e in (None, lg.Rotary(4, "half"), lg.ALiBi(4), lg.Fire(4))), (lg.FoX(16, 4), CAUSAL)],
)
@torch.no_grad()
def test_patterns_in_a_cache(encoding, masks):
    attention, x = layer(encoding), random(2, 15, 16)
    for mask in masks:
        whole, cache = attention(x, mask=mask), LongitudeCacheLayer()
        chunks = [attention(chunk, mask=mask, cache=cache) for chunk in x.split((6, 1, 1, 4, 3), 1)]
        close(torch.cat(chunks, 1), whole, atol=1e-11)
        assert not torch.allclose(whole, attention(x))


def test_places_in_documents():
    """Counted from the first token behind padding, and in each document; padding within one is counted, too."""
    documents = torch.tensor([[-1, -1, 5, 5, -1, 5, 3, 3, -1], [0, 0, 0, 1, 1, 0, 0, 0, 0]])
    assert places_of(documents).tolist() == [[-2, -1, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 0, 1, 2, 3]]


def test_chunk_attention_is_attention_to_chunks():
    """Its cache keeps size - 1 tokens. (Laws try documents, padding and chunks.)"""
    torch.manual_seed(0)
    chunk = lg.attention.ChunkAttention(16, 4, encoding=lg.Rotary(4, "half"), size=4).double()
    x = random(2, 15, 16)
    plain = lg.MultiHeadAttention(16, 4, encoding=lg.Rotary(4, "half")).double()
    plain.load_state_dict(chunk.state_dict())
    close(chunk(x), plain(x, mask=lg.Causal() & Chunks(4)))
    close(chunk(x), torch.cat([plain(part) for part in x.split(4, 1)], 1))  # rotation is relative
    cache = chunk.cache_layer()
    chunk(x, cache=cache)
    assert cache.keys.shape[2] == 3 and cache.get_seq_length() == 15


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Prefix(6), ("prefix", "6", "5")),
        (Prefix(torch.tensor([2, 6])) & lg.Documents(torch.zeros(6, dtype=torch.long)), ("prefix", "6")),
        (lg.Window(3) | Global([0]), ("Global", "lg.Causal")),
        (Chunks(3), ("Chunks",)),
        (Band(3, 1), ("Band",)),
    ],
)
@torch.no_grad()
def test_a_cache_that_would_have_attended_to_the_future_is_refused(mask, words):
    attention, cache, x = layer(), LongitudeCacheLayer(), random(2, 6, 16)
    attention(x[:, :5], cache=cache)
    with refused(*words):
        attention(x[:, 5:], mask=mask, cache=cache)
    assert cache.get_seq_length() == 5
    attention(x[:, 5:], mask=Band(3, 0), cache=cache)


# ---- mistakes --------------------------------------------------------------------------------------------------------
def attending(mask, rows: int = 4):
    q, k = torch.ones(2, 1, rows, 4), torch.ones(2, 1, KEYS, 4)
    return lambda: lg.attend(q, k, k, mask=mask)


def splitting(mask):
    q = torch.ones(1, 2, 30, 8)
    return lambda: lg.attend(q, q, q, mask=mask, backend="split")


def gated(encoding, mask):
    return lambda: lg.MultiHeadAttention(16, 4, encoding=encoding)(torch.ones(1, 6, 16), mask=mask)


AHEAD = (Prefix(3), Prefix(torch.tensor([3])), lg.Window(2) | Global([0]), Band(1, 1))
GATES = (lg.FoX(16, 4), lg.PaTH(16, 4, 4), lg.CoPE(4))
test_refusals = refused_calls(
    [
        (lambda: lg.Window(0), "size", "Window", "1"),
        (lambda: lg.Window(2.5), "1", "2.5"),
        (lambda: lg.Documents(torch.zeros(3)), "[Lk]", "[B, Lk]", "[3]"),
        (lambda: lg.Documents([0, 0]), "Documents", "[0, 0]"),
        (lambda: lg.Padding(torch.ones(2, 3)), "Padding", "[2, 3]"),
        (lambda: Band(-1, 2), "0", "-1", "2"),
        (lambda: Prefix(-1), "0", "[B]", "-1"),
        (lambda: Prefix(torch.tensor([3, -1])), "Prefix", "[ 3, -1]"),
        (lambda: Prefix(torch.tensor([3.0])), "Prefix", "[3.]"),
        (lambda: Global(torch.zeros(3)), "Global", "[3]"),
        (lambda: Global(torch.zeros(2, 3, dtype=torch.long)), "places", "[n]", "[2, 3]"),
        (lambda: Global([-1]), "places", "0", "[-1]"),
        (lambda: Global("first"), "'first'"),
        (attending(lg.Documents(IDS[:, :5])), "[9]", "[2, 9]", "[2, 5]", "Documents"),
        (attending(lg.Documents(IDS[:, :4])), "Documents(ids)", "[2, 4]"),  # one per query is not one per key
        (attending(lg.Padding(torch.ones(3, 9, dtype=torch.long))), "[9]", "[2, 9]", "[3, 9]", "Padding"),
        (attending(lg.Causal() & (lg.NoMask() | lg.Documents(IDS[:, 1:]))), "Documents(ids)", "[2, 8]"),  # in a tree
        (attending("causal"), "mask", "lg.Causal", "NoMask", "'causal'"),
        (attending(Prefix(torch.tensor([1, 2, 3]))), "[2]", "[3]"),
        (attending(Global(TOKENS[:, :5])), "[9]", "[2, 9]", "[2, 5]", "Global"),
        (attending(Global([2, 9])), "Global", "9"),
        (attending(lg.Window(3) | Global(TOKENS[:1, :8])), "Global(tokens)", "[1, 8]"),
        (attending("prefx"), "NoMask", "'prefx'", "Global"),
        *((gated(gate, mask), "future", "lg.Causal") for gate in GATES for mask in AHEAD),
        (splitting(lg.Causal()), "'split'", "cannot"),
        (splitting(Global([1]) | Global([2])), "'split'", "cannot"),
        *((attending(mask, rows=12), "9", "12") for mask in (lg.Documents(IDS), Prefix(3), Global([0]))),
    ]
)
