"""The window layer: full attention under a mask, in a cache that drops what no later token attends to."""

import pytest
import torch

import longitude as lg
from longitude import testing
from longitude.attention.cache import LongitudeCacheLayer, RollingCacheLayer
from longitude.attention.layers.window import WindowAttention
from longitude.testing import mixers
from tests.support import built, close, gradients, random, refused, refused_calls

DIM, HEADS, LENGTH = 16, 4, 23
KNOWN = {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM // HEADS, "dim": DIM}
PADDED = torch.tensor([[-1] * 3 + [0] * 20, [0] * 6 + [1] * 4 + [2] * 13])
X = random(2, LENGTH, DIM, seed=1)


def layer(encoding="rope", size: int = 5) -> WindowAttention:
    encoding = built(encoding, KNOWN) if isinstance(encoding, str) else encoding
    torch.manual_seed(0)
    return WindowAttention(DIM, HEADS, 2, encoding, size=size).double().eval()


@pytest.mark.parametrize("size", [5, 1])
def test_equals_full_attention_under_the_mask(size):
    """Values and gradients; in words, too: token i attends to i, i - 1, ..., i - (size - 1)."""
    attention = layer("rope+fox", size)
    full = lg.MultiHeadAttention(DIM, HEADS, 2, list(attention.encoding)).double()
    full.load_state_dict(attention.state_dict())
    x = X.clone().requires_grad_()
    out, expected = attention(x, documents=PADDED), full(x, mask=lg.Window(size), documents=PADDED)
    close(out, expected)
    close(*(gradients(y, [x, *m.parameters()]) for y, m in ((out, attention), (expected, full))), atol=1e-10)
    weights = attention(x, return_weights=True)[1]
    for i in range(LENGTH):
        seen = {j for j in range(LENGTH) if bool((weights[:, :, i, j] > 0).all())}
        assert seen == {i - n for n in range(size) if i - n >= 0}


# ---- the cache --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in lg.list_encodings() if n not in ("sinusoidal", "learned", "abacus", "coupled")]
)
def test_decoding_with_every_encoding(name):
    build = mixers.MixerExample(WindowAttention, {"size": 5}, testing.example(name))
    mixers.laws()["chunks"](build, lengths=(LENGTH,)).require(name)
    mixers.laws()["packed_documents"](build, rows=((4, 12, 1, 9), (13, 9)), first_call=18).require(name)


@torch.no_grad()
def test_raw_keys_are_rotated_by_their_positions():
    """Where tables follow each query's length, the cache keeps keys as they came, and the positions of those that are left."""
    rotary = lg.Rotary(DIM // HEADS, "half", scaling=lg.scaling.DynamicNTK(2.0, 8, follow="row"))
    assert not rotary.stable_keys
    attention, outs, seen = layer(rotary, 4), [], 0
    cache = attention.cache_layer()
    for chunk in X.split((9, 1, 1, 5, 1, 6), 1):
        outs.append(attention(chunk, cache=cache))
        seen += chunk.shape[1]
        assert cache.get_seq_length() == seen and cache.held <= 3
    close(torch.cat(outs, 1), attention(X))


@torch.no_grad()
def test_text_continues_after_the_largest_position_even_if_it_is_dropped():
    attention, x = layer("mrope", 3), X[:1, :8]
    places = torch.tensor([0, 9, 2, 3, 4, 5, 6, 7])[None, :, None].expand(1, 8, 3)
    caches = attention.cache_layer(), LongitudeCacheLayer()
    close(*(attention(x, positions=places, cache=cache) for cache in caches))
    assert [cache.next_positions().flatten().tolist() for cache in caches] == [[10], [10]]
    close(*(attention(x[:, :2], cache=cache) for cache in caches))


@torch.no_grad()
def test_crop_before_anything_is_dropped():
    attention = layer("rope", 9)
    cache = attention.cache_layer()
    attention(X[:, :7], cache=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 5
    close(attention(X[:, 5:], cache=cache), attention(X)[:, 5:])
    with refused("crop", "8"):
        cache.crop(-1)
    cache.crop(0)


@torch.no_grad()
def test_a_cache_that_drops_nothing_serves_as_well():
    attention, cache = layer("path", 4), LongitudeCacheLayer()
    close(torch.cat([attention(chunk, cache=cache) for chunk in X.split((9, 1, 13), 1)], 1), attention(X))
    assert cache.get_seq_length() == cache.held == LENGTH


def calling(size=5, **options):
    return lambda: layer("rope", size)(X, **options)


test_refusals = refused_calls(
    [
        (calling(mask=lg.Documents(PADDED)), "MultiHeadAttention", "lg.Band", "Causal", "Documents"),
        (calling(4, cache=RollingCacheLayer(2)), "3", "2", "self.cache_layer"),
    ]
)
