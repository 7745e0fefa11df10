"""The cache layer: what decoding needs of an encoding survives every thing that generate() does to a cache."""

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache, StaticCache

import longitude as lg
from longitude import testing
from longitude.attention.cache import GrowingBuffer, LongitudeCache, LongitudeCacheLayer
from longitude.models.stock_caches import adopt
from longitude.positions.composed import compose
from longitude.testing import mixers
from tests.support import built, close, random, refused, refused_calls

DIM, HEADS, LENGTH = 16, 4, 12
KNOWN = {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM // HEADS, "dim": DIM}
X = random(2, LENGTH, DIM, seed=1)


def layer(name: str) -> lg.MultiHeadAttention:
    encoding = built(name, KNOWN)
    torch.manual_seed(0)
    return lg.MultiHeadAttention(DIM, HEADS, 2, encoding=encoding).double().eval()


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "name", [name for name in lg.list_encodings() if name not in ("sinusoidal", "learned", "abacus", "coupled")]
)
def test_rows_reordered_reset_and_crop_with_every_encoding(name):
    mixers.laws()["cache_operations"](testing.example(name).in_attention()).require(name)


@pytest.mark.parametrize("positions", [torch.arange(LENGTH) * 2, torch.arange(LENGTH) + torch.tensor([[0], [5]])])
@torch.no_grad()
def test_crop_takes_positions_back(positions):
    attention, cache = layer("alibi"), LongitudeCacheLayer()
    whole = attention(X, cache=cache, positions=positions)
    cache.crop(-4)
    assert torch.equal(cache.next_positions(), positions[..., -5:-4] + 1)
    close(attention(X[:, -4:], cache=cache, positions=positions[..., -4:]), whole[:, -4:])


@pytest.mark.parametrize("name", ["fox", "path", "path_fox", "rope+fox"])
@torch.no_grad()
def test_a_carried_state_is_not_cropped(name):
    cache = LongitudeCacheLayer()
    layer(name)(X, cache=cache)
    with refused("crop"):
        cache.crop(-4)
    cache.crop(0)
    cache.reset()
    assert (cache.get_seq_length(), cache.positions, cache.columns, cache.carry) == (0, 0, {}, None)


@pytest.mark.parametrize("name", ["rope", "alibi", "fire", "shaw"])
@torch.no_grad()
def test_ints_and_tensors_may_follow_each_other(name):
    """0 .. 3 | 4, 5 as a tensor | 9 .. as an int | none | one row for all | a row each."""
    attention, cache = layer(name), LongitudeCacheLayer()
    positions = [0, torch.tensor([4, 5]), 9, None, torch.tensor([[20]]), torch.tensor([[21], [30]])]
    cuts = [4, 2, 2, 2, 1, 1]
    chunks = [attention(x, cache=cache, positions=p) for x, p in zip(X.split(cuts, 1), positions, strict=True)]
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 20, 21], [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 20, 30]])
    close(torch.cat(chunks, 1), attention(X, positions=places))
    assert torch.equal(cache.positions, places)
    assert cache.next_positions().tolist() == [[22], [31]]


@torch.no_grad()
def test_keys_are_kept_rotated_where_that_stays_right():
    attention, cache = layer("rope"), LongitudeCacheLayer()
    attention(X, cache=cache)
    raw = attention.k_proj(X).unflatten(-1, (2, -1)).transpose(1, 2)
    (rope,) = attention.encoding
    close(cache.keys, rope.rotate_keys(raw, 0))
    assert not torch.allclose(cache.keys, raw)


class ByBlocks(lg.Encoding):
    """Queries of a block of four positions, and every key they see, are made for the end of that block."""

    stable_keys = False

    def length_at(self, query, newest):
        return (query // 4 + 1) * 4

    def prepare(self, positions, length=None, dtype=torch.float32):
        share = positions[..., None].double() / length
        return share if positions.dim() == 1 else share[:, None]

    def queries(self, q, prepared):
        return q + prepared

    def keys(self, k, prepared):
        return k * (1 + prepared)


@torch.no_grad()
def test_raw_keys_where_rotated_ones_would_drift():
    """Where tables follow a length, the cache keeps keys as they are, and each query has them through its own tables."""
    attention, cache = layer("nope"), LongitudeCacheLayer()
    attention.encoding = encoding = compose(ByBlocks())
    assert not encoding.stable_keys
    whole = attention(X)
    outs = [attention(X[:, :6], cache=cache)]
    q, k, v = (
        p(X).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    close(cache.keys, k[:, :, :6])
    outs += [attention(X[:, t : t + 1], cache=cache) for t in range(6, LENGTH)]
    close(torch.cat(outs, 1), whole)
    by_hand = []
    for t in range(LENGTH):  # one query at a time, against keys made for its block
        end = (t // 4 + 1) * 4
        made = k[:, :, : t + 1] * (1 + torch.arange(t + 1)[:, None].double() / end)
        by_hand.append(lg.attend(q[:, :, t, None] + t / end, made, v[:, :, : t + 1]))
    by_hand = torch.cat(by_hand, 2)
    close(whole, attention.o_proj(by_hand.transpose(1, 2).flatten(2)))
    close(lg.attend(q, k, v, encoding=encoding, return_weights=True)[0], by_hand)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 2])  # rows whose blocks differ
    each = [lg.attend(q[b, None], k[b, None], v[b, None], encoding=encoding, q_positions=positions[b]) for b in (0, 1)]
    close(lg.attend(q, k, v, encoding=encoding, q_positions=positions), torch.cat(each))


def test_columns_are_float32_or_wider():
    attention, cache = layer("fox").bfloat16(), LongitudeCacheLayer()
    attention(X.bfloat16(), cache=cache)
    assert cache.columns["forgotten"].dtype == torch.float64 and cache.keys.dtype == torch.bfloat16


def static_cache() -> None:
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(hidden_size=16)).eval()
    model(torch.ones(1, 5, dtype=torch.long), cache=StaticCache(config=model.config, max_cache_len=8))


def filled(cache, layers: int):
    for n in range(layers):
        cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), n)
    return cache


def of_another(layer, **sizes):
    """A call with a cache that a layer of other sizes filled."""

    def call() -> None:
        cache, x = layer().cache_layer(), random(1, 3, 16, dtype=torch.float32)
        layer(**sizes)(x, cache=cache)
        layer(**dict.fromkeys(sizes, 4))(x, cache=cache)

    return call


def reflected() -> None:
    """Keys of three heads, to be rewritten by reflections of four."""
    path, layer = lg.PaTH(16, 4, 4), LongitudeCacheLayer()
    layer.update(random(1, 3, 2, 4), random(1, 3, 2, 4))
    layer.columns = path.context(random(1, 2, 16, dtype=torch.float32))[0]
    layer.apply_pending_reflections(path)


KEPT = [LongitudeCacheLayer] * 3
ATTENTION = partial(lg.mixer, "attention", dim=16, num_heads=4)
LATENT = partial(lg.mixer, "latent", dim=16, num_heads=4, rope_dim=2)
test_other_caches_are_refused = refused_calls(
    [
        (lambda: adopt(filled(DynamicCache(), 1), KEPT[:1]), "LongitudeCache", "DynamicCache"),
        (lambda: adopt(filled(LongitudeCache(2), 2), KEPT), "cache", "LongitudeCache"),  # of another depth
        (static_cache, "DynamicCache", "StaticCache", "StaticLayer"),
        (of_another(ATTENTION, num_kv_heads=2), "cache", "4", "2"),
        (of_another(ATTENTION, head_dim=8), "cache", "4", "8"),
        (of_another(LATENT, kv_rank=8), "cache", "width 6", "[1, 1, 3, 10]"),
        (reflected, "cache", "3", "4"),
    ]
)


# ---- buffers that grow -------------------------------------------------------------------------------------------------
@pytest.fixture(params=[0, GrowingBuffer.FEW], ids=["written behind", "copied"])
def grown(request, monkeypatch):
    monkeypatch.setattr(GrowingBuffer, "FEW", request.param)
    return request.param


def kv(length: int, seed: int = 0, batch: int = 1, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(random(2, batch, 2, length, 3, seed=seed, dtype=dtype))


@torch.no_grad()
def test_tokens_are_written_behind_those_before(grown):
    """In the same memory, mostly; and what was given out stays as it was."""
    cache, places = LongitudeCacheLayer(), set()
    tokens = [kv(n, seed) for seed, n in enumerate([5, *[1] * 200, 3])]
    given = [cache.update(k, v) for k, v in tokens]
    for n, made in enumerate(given):
        places.add(made[0].data_ptr())
        for part in (0, 1):
            assert torch.equal(made[part], torch.cat([t[part] for t in tokens[: n + 1]], 2))
    assert grown or len(places) <= 5
    assert grown or cache.buffers[0].space.shape[2] <= 1.2 * cache.get_seq_length() + 64


CHANGES = {
    "crop": lambda c: c.crop(-2),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 0])),
    "select": lambda c: c.batch_select_indices(torch.tensor([1, 1])),
    "reset": lambda c: c.reset(),
    "assigned": lambda c: setattr(c, "keys", c.keys + 1),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_was_changed_outside_is_continued(change, grown):
    cache = LongitudeCacheLayer()
    k, v = cache.update(*kv(7, batch=2))
    before = k.clone(), v.clone()
    CHANGES[change](cache)
    now = [] if cache.keys is None else [cache.keys.clone(), cache.values.clone()]
    new = kv(1, seed=1, batch=2)
    for held, got, one in zip(now or [new[0][:, :, :0], new[1][:, :, :0]], cache.update(*new), new, strict=True):
        assert torch.equal(got, torch.cat([held, one], 2))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@torch.no_grad()
def test_copies_part_ways(copied, grown):
    cache = LongitudeCacheLayer()
    old, _ = cache.update(*kv(4))
    twin = copied(cache)
    first, second = kv(1, seed=1), kv(1, seed=2)
    ours, theirs = cache.update(*first)[0], twin.update(*second)[0]
    assert torch.equal(ours, torch.cat([old, first[0]], 2)) and torch.equal(theirs, torch.cat([old, second[0]], 2))


def test_a_buffer_made_in_inference_mode_is_left_there(grown):
    cache = LongitudeCacheLayer()
    with torch.inference_mode():
        cache.update(*kv(3))
        cache.update(*kv(1, seed=1))
    with torch.no_grad():
        k, _ = cache.update(*kv(1, seed=2))
        cache.update(*kv(1, seed=3))
    assert torch.equal(k, torch.cat([kv(n, seed)[0] for seed, n in enumerate([3, 1, 1])], 2))


@torch.no_grad()
def test_other_dtypes_and_batches_are_not_squeezed_in(grown):
    cache, rows = LongitudeCacheLayer(), LongitudeCacheLayer()
    cache.update(*kv(3, dtype=torch.float32))
    k, _ = cache.update(*kv(1, seed=1))
    assert k.dtype == torch.float64 and torch.equal(k[:, :, 3:], kv(1, seed=1)[0])
    rows.update(*kv(3, batch=2))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        rows.update(*kv(1))
