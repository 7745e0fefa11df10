"""Bands, prefixes and global tokens: in caches, and refusals; test_masks has their pairs."""

import pytest
import torch

import longitude as lg
from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.documents import places_of
from longitude.attention.masks import Band, Chunks, Global, Prefix
from tests.support import close, random, refused, refused_calls

HEADS, DIM = 4, 8


# ---- layers and caches --------------------------------------------------------------------------------------------------
def layer(encoding=None) -> lg.MultiHeadAttention:
    torch.manual_seed(0)
    return lg.MultiHeadAttention(16, HEADS, 2, encoding).double()


PREFIXES = (Prefix(6), Prefix(torch.tensor([6, 2])))
CAUSAL = ((lg.Window(3) | Global([0, 4])) & lg.Causal(), lg.Causal() & Chunks(4))


@pytest.mark.parametrize(
    ("encoding", "masks"),
    [
        *((e, PREFIXES) for e in (None, lg.Rotary(4, "half"), lg.ALiBi(HEADS), lg.Fire(HEADS))),
        (lg.FoX(16, HEADS), CAUSAL),
    ],
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
    chunk = lg.attention.ChunkAttention(16, HEADS, encoding=lg.Rotary(4, "half"), size=4).double()
    x = random(2, 15, 16)
    plain = lg.MultiHeadAttention(16, HEADS, encoding=lg.Rotary(4, "half")).double()
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


# ---- refusals ---------------------------------------------------------------------------------------------------------
def splitting(mask):
    q = torch.ones(1, 2, 30, 8)
    return lambda: lg.attend(q, q, q, mask=mask, backend="split")


def gated(encoding, mask):
    return lambda: lg.MultiHeadAttention(16, HEADS, encoding=encoding)(torch.ones(1, 6, 16), mask=mask)


AHEAD = (Prefix(3), Prefix(torch.tensor([3])), lg.Window(2) | Global([0]), Band(1, 1))
GATES = (lg.FoX(16, HEADS), lg.PaTH(16, HEADS, 4), lg.CoPE(4))
test_refusals = refused_calls(
    [
        *((gated(gate, mask), "future", "lg.Causal") for gate in GATES for mask in AHEAD),
        (splitting(lg.Causal()), "'split'", "cannot"),
        (splitting(Global([1]) | Global([2])), "'split'", "cannot"),
    ]
)
