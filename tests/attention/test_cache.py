"""The cache layer: what decoding needs of an encoding survives every thing that generate() does to a cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import longitude as lg
from longitude.attention.cache import GrowingBuffer, LongitudeCache, LongitudeCacheLayer, adopt
from longitude.positions.base import resolved
from longitude.positions.composed import compose
from tests.support import close

NAMES = [
    name for name in lg.list_encodings() if name not in ("sinusoidal", "learned")
]  # these act at the model's input
COMPOSED = [*NAMES, "rope+fox"]
DIM, HEADS, LENGTH = 16, 4, 12


def layer(name: str, kv_heads: int = 2, window: int | None = None) -> lg.MultiHeadAttention:
    """An attention layer in float64 with random learned parameters."""
    torch.manual_seed(0)
    shape = {"num_heads": HEADS, "num_kv_heads": kv_heads, "head_dim": DIM // HEADS, "dim": DIM, "layout": "half"}
    members = [lg.encoding(one, **resolved(one, {}, **shape)) for one in name.split("+")]
    attention = lg.MultiHeadAttention(DIM, HEADS, kv_heads, encoding=members).double().eval()
    for parameter in attention.encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COMPOSED)
@torch.no_grad()
def test_the_batch_may_change(name):
    """reorder, repeat and select: afterwards each row goes on as the row it came from."""
    attention, x, new = layer(name), tokens(3), tokens(4, 2, seed=2)
    ids = torch.tensor([[0] * LENGTH, [0] * 5 + [1] * 7, [0] * LENGTH])
    for change, origin in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0, 1])), [2, 0, 0, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 2, 1, 0])), [1, 2, 1, 0]),
        (lambda c: (c.batch_select_indices(torch.tensor([2, 1])), c.batch_repeat_interleave(2)), [2, 2, 1, 1]),
    ):
        for places, documents in ((None, None), (torch.stack([torch.arange(LENGTH) + 3 * b for b in range(3)]), ids)):
            cache = LongitudeCacheLayer()
            attention(x, cache=cache, positions=places, documents=documents)
            change(cache)
            later = None if documents is None else documents[origin][:, [*range(LENGTH), -1, -1]]
            ours = attention(new, cache=cache, documents=later)
            for row, b in enumerate(origin):
                place = None if places is None else torch.cat([places[b], places[b, -1] + torch.tensor([1, 2])])
                document = None if later is None else later[row : row + 1]
                whole = attention(torch.cat([x[b], new[row]])[None], positions=place, documents=document)
                close(ours[row : row + 1], whole[:, LENGTH:])


@pytest.mark.parametrize("name", COMPOSED)
@torch.no_grad()
def test_crop_takes_back_tokens(name):
    """As assisted decoding does, in transformers' negative numbers; or raises where a state cannot be taken back."""
    attention, x, other = layer(name), tokens(), tokens(seed=3)
    for positions in (None, torch.arange(LENGTH)):
        cache = LongitudeCacheLayer()
        attention(x, cache=cache, positions=positions)
        if name in ("fox", "path", "path_fox", "rope+fox"):
            with pytest.raises(ValueError, match="crop: the encoding carries a state that cannot be cropped"):
                cache.crop(-4)
            cache.crop(0)
            return
        cache.crop(-4)
        assert cache.get_seq_length() == LENGTH - 4
        ours = attention(other[:, :4], cache=cache)
        close(ours, attention(torch.cat([x[:, :-4], other[:, :4]], 1))[:, -4:])


@pytest.mark.parametrize("name", COMPOSED)
@torch.no_grad()
def test_reset_forgets_everything(name):
    attention, x, cache = layer(name), tokens(), LongitudeCacheLayer()
    attention(x, cache=cache, positions=torch.arange(LENGTH) + 7)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert (cache.positions, cache.columns, cache.carry) == (0, {}, None)
    close(attention(x, cache=cache), attention(x))


@pytest.mark.parametrize("name", ["rope", "alibi", "fire", "shaw"])
@torch.no_grad()
def test_ints_and_tensors_may_follow_each_other(name):
    """0 .. 3 | 4, 5 as a tensor | 9 .. as an int | nothing said | one row for all | a row each."""
    attention, x, cache = layer(name), tokens(), LongitudeCacheLayer()
    said = [0, torch.tensor([4, 5]), 9, None, torch.tensor([[20]]), torch.tensor([[21], [30]])]
    cuts = [4, 2, 2, 2, 1, 1]
    pieces = [attention(piece, cache=cache, positions=p) for piece, p in zip(x.split(cuts, 1), said, strict=True)]
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 20, 21], [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 20, 30]])
    close(torch.cat(pieces, 1), attention(x, positions=places))
    assert torch.equal(cache.positions, places)
    assert cache.next_positions().tolist() == [[22], [31]]


@torch.no_grad()
def test_contiguous_ints_stay_an_int():
    """So that fast routes need not look at positions while decoding."""
    attention, cache = layer("alibi"), LongitudeCacheLayer()
    for start, piece in zip((100, 104, 108), tokens().split(4, 1), strict=True):
        attention(piece, cache=cache, positions=start)
    assert cache.positions == 100 and cache.next_positions() == 112


@torch.no_grad()
def test_keys_are_kept_rotated_where_that_stays_right():
    attention, x, cache = layer("rope"), tokens(), LongitudeCacheLayer()
    attention(x, cache=cache)
    raw = attention.k_proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
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


class ByLength(ByBlocks):
    """Everything is made for the length of the whole sequence, in steps of four: what a cache cannot follow."""

    def length_at(self, query, newest):
        return (newest // 4 + 1) * 4 + 0 * query


@torch.no_grad()
def test_raw_keys_where_made_ones_would_drift():
    """Where tables follow a length, the cache keeps keys as they are, and each query sees them through its own tables."""
    attention, x, cache = layer("none"), tokens(), LongitudeCacheLayer()
    attention.encoding = compose(ByBlocks())
    assert not attention.encoding.stable_keys
    whole = attention(x)
    outs = [attention(x[:, :6], cache=cache)]
    close(cache.keys, attention.k_proj(x[:, :6]).unflatten(-1, (2, -1)).transpose(1, 2))
    outs += [attention(x[:, t : t + 1], cache=cache) for t in range(6, x.shape[1])]
    close(torch.cat(outs, 1), whole)
    q, k, v = (
        p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    by_hand = []
    for t in range(x.shape[1]):  # one query at a time, against keys made for its block
        end = (t // 4 + 1) * 4
        made = k[:, :, : t + 1] * (1 + torch.arange(t + 1)[:, None].double() / end)
        by_hand.append(lg.attend(q[:, :, t, None] + t / end, made, v[:, :, : t + 1]))
    by_hand = torch.cat(by_hand, 2)
    close(whole, attention.o_proj(by_hand.transpose(1, 2).flatten(2)))
    close(lg.attend(q, k, v, encoding=attention.encoding), by_hand)
    close(lg.attend(q, k, v, encoding=attention.encoding, return_weights=True)[0], by_hand)
    positions = torch.stack([torch.arange(x.shape[1]), torch.arange(x.shape[1]) + 2])  # rows whose blocks differ
    each = [
        lg.attend(q[b, None], k[b, None], v[b, None], encoding=attention.encoding, q_positions=positions[b])
        for b in (0, 1)
    ]
    close(lg.attend(q, k, v, encoding=attention.encoding, q_positions=positions), torch.cat(each))


@torch.no_grad()
def test_a_cache_never_drifts_across_a_border():
    """Where every table follows the whole sequence, cached tokens cannot be mended: the cache refuses to go on."""
    attention, x = layer("none"), tokens()
    attention.encoding = compose(ByLength())
    cache = LongitudeCacheLayer()
    for a, b in ((0, 5), (5, 6), (6, 8)):  # within one length
        out = attention(x[:, a:b], cache=cache)
    close(out, attention(x[:, :8])[:, 6:])
    with pytest.raises(ValueError, match=r"cached tokens were made with another; .*prefill again"):
        attention(x[:, 8:9], cache=cache)
    for positions in (torch.arange(3), torch.arange(3).expand(2, 3)):
        cache = LongitudeCacheLayer()
        attention(x[:, :3], cache=cache, positions=positions)
        attention(x[:, 3:4], cache=cache)
        with pytest.raises(ValueError, match="prefill again"):
            attention(x[:, 4:5], cache=cache)


def test_columns_are_float32_or_wider():
    attention, cache = layer("fox").bfloat16(), LongitudeCacheLayer()
    attention(tokens().bfloat16(), cache=cache)
    assert cache.columns["forgotten"].dtype == torch.float64 and cache.keys.dtype == torch.bfloat16


def test_adopting_caches():
    """generate() hands over an empty cache of its own; a filled stranger is refused."""
    cache = DynamicCache()
    assert adopt(cache, [LongitudeCacheLayer] * 3) is cache
    assert [type(one) for one in cache.layers] == [LongitudeCacheLayer] * 3
    assert adopt(cache, [LongitudeCacheLayer] * 3) is cache
    ours = LongitudeCache(2)
    assert adopt(ours, [LongitudeCacheLayer] * 2) is ours
    stranger = DynamicCache()
    stranger.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with pytest.raises(ValueError, match="expected an empty cache or a LongitudeCache, got a filled DynamicCache"):
        adopt(stranger, [LongitudeCacheLayer])


def test_caches_of_another_kind_are_refused():
    """Not turned into ours in silence: they were asked for, and something else would run."""
    model = lg.LongitudeForCausalLM(lg.LongitudeConfig(hidden_size=16)).eval()
    x = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="a DynamicCache of plain layers, got StaticCache of StaticLayer; static"):
        model(x, past_key_values=StaticCache(config=model.config, max_cache_len=8))


def test_a_filled_cache_of_another_depth_is_refused():
    """Layers of another model must not serve here, or some of its tokens would be lost."""
    ours = LongitudeCache(2)
    for one in ours.layers:
        one.extend(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0, {}, None)
    with pytest.raises(ValueError, match="past_key_values: expected"):
        adopt(ours, [LongitudeCacheLayer] * 3)


# ---- room to grow in -------------------------------------------------------------------------------------------------
def kv(length: int, seed: int = 0, batch: int = 1, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(2, batch, 2, length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tuple(made.to(dtype))


@pytest.fixture(params=[0, GrowingBuffer.FEW], ids=["written behind", "copied"])
def grown(request, monkeypatch):
    """Both ways of growing."""
    monkeypatch.setattr(GrowingBuffer, "FEW", request.param)
    return request.param


@torch.no_grad()
def test_tokens_are_written_behind_those_before(grown):
    """The same memory, mostly; and what was given out stays as it was."""
    cache, given, places = LongitudeCacheLayer(), [], set()
    tokens = [kv(n, seed) for seed, n in enumerate([5, *[1] * 200, 3])]
    for n, (k, v) in enumerate(tokens):
        given.append(cache.update(k, v))
        places.add(given[-1][0].data_ptr())
        for part in (0, 1):
            assert torch.equal(given[-1][part], torch.cat([t[part] for t in tokens[: n + 1]], 2))
    assert grown or len(places) <= 5
    for n, (k, v) in enumerate(given):
        assert torch.equal(k, torch.cat([t[0] for t in tokens[: n + 1]], 2))
        assert torch.equal(v, torch.cat([t[1] for t in tokens[: n + 1]], 2))
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
def test_what_was_changed_outside_goes_on_from_there(change, grown):
    cache = LongitudeCacheLayer()
    k, v = cache.update(*kv(7, batch=2))
    before = k.clone(), v.clone()
    CHANGES[change](cache)
    now = [] if cache.keys is None else [cache.keys.clone(), cache.values.clone()]
    new = kv(1, seed=1, batch=2)
    for held, got, one in zip(now or [new[0][:, :, :0], new[1][:, :, :0]], cache.update(*new), new, strict=True):
        assert torch.equal(got, torch.cat([held, one], 2))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])  # nobody wrote into what was given out


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@torch.no_grad()
def test_copies_part_ways(copied, grown):
    cache = LongitudeCacheLayer()
    old, _ = cache.update(*kv(4))
    twin = copied(cache)
    first, second = kv(1, seed=1), kv(1, seed=2)
    ours, theirs = cache.update(*first)[0], twin.update(*second)[0]
    assert torch.equal(ours, torch.cat([old, first[0]], 2)) and torch.equal(theirs, torch.cat([old, second[0]], 2))


def test_room_made_in_inference_mode_is_left_there(grown):
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
    cache = LongitudeCacheLayer()
    cache.update(*kv(3, dtype=torch.float32))
    k, _ = cache.update(*kv(1, seed=1))
    assert k.dtype == torch.float64 and torch.equal(k[:, :, 3:], kv(1, seed=1)[0])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        cache.update(*kv(1, batch=2))
