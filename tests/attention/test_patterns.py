"""Bands, prefixes, global tokens and dilated windows: in streams, narrow dtypes and caches; test_masks has their pairs."""

import pytest
import torch

import longitude as lg
from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.masks import Band
from longitude.attention.patterns import Dilated, Global, Prefix
from tests.support import close, random, refused_calls

HEADS, DIM = 4, 8


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
    attention, x = layer(encoding), random(2, 15, 16)
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
def test_a_cache_that_would_have_attended_to_the_future_is_refused(mask, message):
    attention, cache, x = layer(), LongitudeCacheLayer(), random(2, 6, 16)
    attention(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match=message):
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
        *((gated(gate, mask), "no meaning for keys in the future") for gate in GATES for mask in AHEAD),
        (splitting(lg.Causal()), "'split' cannot: .*no prefix, no dilated window and no global tokens"),
        (splitting(Global([1]) | Global([2])), "'split' cannot: .*global tokens need a local mask"),
        (splitting(Dilated(3, 2) & Dilated(3, 4)), "'split' cannot: .*windows, padding and documents only"),
    ]
)


@pytest.mark.parametrize("mask", AHEAD, ids=str)
def test_gates_take_what_is_joined_with_causal(mask):
    for gate in GATES:
        gated(gate, mask & lg.Causal())()
