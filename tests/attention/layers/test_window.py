"""The window layer: full attention under a mask, in a cache that forgets what nobody sees."""

import pytest
import torch

import longitude as lg
from longitude.attention.cache import GrowingBuffer, LongitudeCacheLayer
from longitude.attention.layers.window import WindowAttention
from longitude.attention.mixer import MIXERS
from longitude.attention.patterns import Dilated
from longitude.attention.rolling_cache import RollingCacheLayer
from longitude.positions.base import resolved

NAMES = [*(name for name in lg.list_encodings() if name not in ("sinusoidal", "learned")), "rope+fox"]
DIM, HEADS, LENGTH = 16, 4, 23
SHAPE = {
    "num_heads": HEADS,
    "num_kv_heads": 2,
    "head_dim": DIM // HEADS,
    "dim": DIM,
    "layout": "half",
    "max_length": 64,
}
SIZES = [(5, 1), (1, 1), (3, 2), (4, 3)]
PADDED = torch.tensor([[-1] * 3 + [0] * 20, [0] * 6 + [1] * 4 + [2] * 13])


def layer(name: str = "rope", size: int = 5, step: int = 1, **options) -> WindowAttention:
    torch.manual_seed(0)
    members = [lg.encoding(one, **resolved(one, {}, **SHAPE)) for one in name.split("+")]
    attention = WindowAttention(DIM, HEADS, 2, members, size=size, step=step, **options).double().eval()
    for parameter in attention.encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(x, y):
    torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def decoded(attention, x, cuts, cache, documents=None):
    outs, seen = [], 0
    for piece in x.split(cuts, 1):
        seen += piece.shape[1]
        outs.append(attention(piece, cache=cache, documents=None if documents is None else documents[:, :seen]))
        assert cache.get_seq_length() == seen
        assert cache.held <= max(1, (attention.size - 1) * attention.step)
    return torch.cat(outs, 1)


# ---- what it computes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "step"), SIZES)
def test_equals_full_attention_under_the_mask(size, step):
    """Values and gradients; in words, too: token i sees i, i - step, ..., i - (size - 1) step."""
    attention = layer("rope+fox", size, step)
    full = lg.MultiHeadAttention(DIM, HEADS, 2, list(attention.encoding)).double()
    full.load_state_dict(attention.state_dict())
    out = attention(x := tokens().requires_grad_(), documents=PADDED)
    expected = full(x, mask=Dilated(size, step) & lg.Causal(), documents=PADDED)
    close(out, expected)
    direction = torch.randn_like(out)
    wanted = [x, *attention.q_proj.parameters(), *attention.v_proj.parameters()]
    theirs = [x, *full.q_proj.parameters(), *full.v_proj.parameters()]
    for a, b in zip(
        torch.autograd.grad(out, wanted, direction), torch.autograd.grad(expected, theirs, direction), strict=True
    ):
        close(a, b)
    weights = attention(x, return_weights=True)[1]
    for i in range(LENGTH):
        seen = {j for j in range(LENGTH) if bool((weights[:, :, i, j] > 0).all())}
        assert seen == {i - n * step for n in range(size) if i - n * step >= 0}


# ---- the cache --------------------------------------------------------------------------------------------------------
@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoding_is_the_whole_pass(name):
    """Whatever the cuts, prompts longer than the window among them, with documents and padding on the left."""
    for size, step in SIZES:
        attention, x = layer(name, size, step), tokens()
        for documents in (None, PADDED):
            whole = attention(x, documents=documents)
            for cuts in ((1,) * 8 + (15,), (13, 1, 1, 4, 4)):
                ours = decoded(attention, x, cuts, attention.cache_layer(), documents)
                real = torch.ones(2, LENGTH, dtype=torch.bool) if documents is None else documents >= 0
                close(ours[real], whole[real])


@torch.no_grad()
def test_raw_keys_are_turned_by_where_they_stand():
    """Where tables follow each query's length, the cache keeps keys as they came, and knows where those that are left stand."""
    rotary = lg.Rotary(DIM // HEADS, "half", scaling=lg.scaling.DynamicNTK(2.0, 8, follow="row"))
    assert not rotary.stable_keys
    torch.manual_seed(0)
    attention, x = WindowAttention(DIM, HEADS, 2, rotary, size=4, step=2).double(), tokens()
    close(decoded(attention, x, (9, 1, 1, 5, 1, 6), attention.cache_layer()), attention(x))


@torch.no_grad()
def test_one_off_is_seen():
    """A cache that keeps one token less than the window needs is refused; forced upon it, the answer is another."""
    attention, x = layer("rope", 4, 2), tokens()
    with pytest.raises(
        ValueError, match=r"expected a layer that keeps 6 tokens or more, got one that keeps 5; .*cache_layer"
    ):
        attention(x, cache=RollingCacheLayer(5))
    close(decoded(attention, x, (1,) * LENGTH, RollingCacheLayer(6)), attention(x))
    cache = RollingCacheLayer(6)
    ours = []
    for piece in x.split(1, 1):
        ours.append(attention(piece, cache=cache))
        cache.keep = 5
        cache.roll()
        cache.keep = 6
    assert not torch.allclose(torch.cat(ours, 1), attention(x), atol=1e-4)


@pytest.mark.parametrize("positions", ["ints", "rows", "one row", "axes"])
@torch.no_grad()
def test_positions_are_those_of_what_is_left(positions):
    attention, x = layer("mrope" if positions == "axes" else "alibi"), tokens()
    places = torch.stack([torch.arange(LENGTH) * 2, torch.arange(LENGTH) + 7])
    said = {"ints": 5, "rows": places, "one row": places[0], "axes": places[..., None].expand(2, LENGTH, 3)}[positions]
    whole, cache, outs = attention(x, positions=said), attention.cache_layer(), []
    for start, stop in ((0, 9), (9, 10), (10, 16), (16, 17)):
        if isinstance(said, int):
            own = None if start else said
        else:
            own = said[start:stop] if said.dim() == 1 else said[:, start:stop]
        outs.append(attention(x[:, start:stop], positions=own, cache=cache))
    close(torch.cat(outs, 1), whole[:, :17])
    after = cache.next_positions()
    assert torch.as_tensor(after).flatten().tolist() == {
        "ints": [22], "rows": [33, 24], "one row": [33], "axes": [33, 24]
    }[positions]  # fmt: skip
    if positions != "axes":
        assert not isinstance(said, int) or isinstance(cache.positions, int)


@torch.no_grad()
def test_text_goes_on_after_the_largest_position_even_if_it_is_forgotten():
    attention, x = layer("mrope", 3), tokens(1, 8)
    places = torch.tensor([0, 9, 2, 3, 4, 5, 6, 7])[None, :, None].expand(1, 8, 3)
    caches = attention.cache_layer(), LongitudeCacheLayer()
    outs = [attention(x, positions=places, cache=cache) for cache in caches]
    assert [cache.next_positions().flatten().tolist() for cache in caches] == [[10], [10]]
    close(*outs)
    close(*(attention(x[:, :2], cache=cache) for cache in caches))


@torch.no_grad()
def test_memory_is_that_of_the_window():
    """Storage, not shapes: neither a long prompt nor many tokens leave anything behind."""
    attention = layer("fox", 16)
    cache = attention.cache_layer()
    for length in (500, *[1] * 300, 40, 7, *[1] * 50):
        attention(tokens(1, length), cache=cache)
        assert cache.keys is not None
        held = [cache.keys, cache.values, *cache.columns.values()]
        for x in held:
            per_token = x[:, :, 0].numel() * x.element_size()
            assert x.untyped_storage().nbytes() <= per_token * 3 * 64
    assert (cache.held, cache.get_seq_length()) == (15, 897)


@torch.no_grad()
def test_a_token_costs_no_copy_of_the_window(monkeypatch):
    monkeypatch.setattr(GrowingBuffer, "FEW", 0)
    attention = layer("rope", 200)
    cache, places = attention.cache_layer(), set()
    for length in (300, *[1] * 200):
        attention(tokens(1, length), cache=cache)
        places.add(cache.keys.untyped_storage().data_ptr())
    assert len(places) <= 5


@torch.no_grad()
def test_reset_and_crop():
    attention, x = layer("rope", 9), tokens()
    cache = attention.cache_layer()
    attention(x[:, :7], cache=cache)
    cache.crop(-2)  # nothing is forgotten yet
    assert cache.get_seq_length() == 5
    close(attention(x[:, 5:], cache=cache), attention(x)[:, 5:])
    with pytest.raises(ValueError, match="crop: tokens before the last 8 are dropped"):
        cache.crop(-1)
    cache.crop(0)
    cache.reset()
    assert (cache.get_seq_length(), cache.dropped, cache.positions) == (0, 0, 0)
    close(attention(x, cache=cache), attention(x))


@torch.no_grad()
def test_a_cache_that_forgets_nothing_serves_as_well():
    attention, x, cache = layer("path", 4), tokens(), LongitudeCacheLayer()
    close(torch.cat([attention(piece, cache=cache) for piece in x.split((9, 1, 13), 1)], 1), attention(x))
    assert cache.get_seq_length() == cache.held == LENGTH


# ---- a model of them ----------------------------------------------------------------------------------------------------
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("encoding", "size", "step"), [("rope", 6, 1), ("alibi", 3, 2), ("fox", 6, 1), ("path", 3, 2)])
def test_generates(encoding, size, step):
    """Greedily and by beams, padded on the left, as without a cache; the cache holds the window."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = lg.LongitudeConfig(
        vocab_size=50, encoding=encoding, mixer={"name": "window", "size": size, "step": step}, **options
    )
    model = lg.LongitudeForCausalLM(config).eval().double()
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = model(ids, attention_mask=mask).past_key_values
    assert [(type(one), one.held) for one in cache.layers] == [(RollingCacheLayer, (size - 1) * step)] * 2
    for beams in (1, 3):
        said = {"attention_mask": mask, "max_new_tokens": 14, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **said), model.generate(ids, use_cache=False, **said))


def test_is_known_by_name():
    assert MIXERS["window"] is WindowAttention
    assert "size=5, step=2" in repr(layer("none", 5, 2)) and "step" not in repr(layer("none"))


# ---- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "WindowAttention: expected size to be an int of 1 or more, got 0"),
        ({"size": 2.5}, "size to be an int of 1 or more, got 2.5"),
        ({"size": 2, "step": 0}, "step to be an int of 1 or more, got 0"),
    ],
)
def test_mistakes_when_made(options, message):
    with pytest.raises(ValueError, match=message):
        WindowAttention(DIM, HEADS, **options)


@torch.no_grad()
def test_mistakes_when_used():
    attention, x = layer(), tokens()
    for mask in (lg.NoMask(), lg.Documents(PADDED)):
        with pytest.raises(
            ValueError, match=r"attends to the past only, .* got (NoMask|Documents); .*lg.Band\(before, after\)"
        ):
            attention(x, mask=mask)
    with pytest.raises(ValueError, match=r"mask: expected lg\.Causal"):
        attention(x, mask="window")
    cache = attention.cache_layer()
    attention(x, cache=cache, documents=PADDED)
    with pytest.raises(ValueError, match=r"documents: expected \[2, 24\], cached tokens included, got \[2, 5\]"):
        attention(x[:, :1], cache=cache, documents=PADDED[:, :5])
    assert cache.get_seq_length() == LENGTH
