"""Latent attention: equal to its formula by both routes, and one small row per token in the cache."""

from math import cos, sin

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import longitude as lg
from longitude.attention.layers.latent import LatentAttention
from longitude.attention.layers.latent_cache import LatentCacheLayer
from longitude.attention.masks import Band
from longitude.positions.base import Encoding

DIM, HEADS, ROPE = 32, 4, 4
SIZES = {"kv_rank": 10, "nope_dim": 6, "rope_dim": ROPE, "value_dim": 5}
ENCODINGS = {
    "none": lambda: None,
    "interleaved": lambda: lg.Rotary(ROPE, "interleaved"),
    "half": lambda: lg.Rotary(ROPE, "half"),
    "alibi": lambda: lg.ALiBi(HEADS),
    "t5": lambda: lg.T5Bias(HEADS),
    "fire": lambda: lg.Fire(HEADS),
    "rope+fox": lambda: [lg.Rotary(ROPE, "half"), lg.FoX(DIM, HEADS)],
    "shaw": lambda: lg.Shaw(ROPE, values=False),
    "transformer_xl": lambda: lg.TransformerXL(HEADS, ROPE, DIM),
    "cope": lambda: lg.CoPE(ROPE),
    "xpos": lambda: lg.XPos(ROPE, "half"),
    "dynamic": lambda: lg.Rotary(ROPE, "half", scaling=lg.scaling.DynamicNTK(2.0, 8, follow="row")),
}
CARRYING = {
    "path": lambda: lg.PaTH(DIM, HEADS, ROPE, num_kv_heads=1, rank=None),
    "path_fox": lambda: lg.encoding("path_fox", dim=DIM, num_heads=HEADS, head_dim=ROPE, num_kv_heads=1),
}


def make(encoding="interleaved", seed=3, **options) -> LatentAttention:
    torch.manual_seed(seed)
    made = encoding if isinstance(encoding, Encoding) else {**ENCODINGS, **CARRYING}[encoding]()
    layer = LatentAttention(DIM, HEADS, made, **{**SIZES, "q_rank": 12, **options}).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def tokens(batch: int, length: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by(layer: LatentAttention, route: str) -> LatentAttention:
    layer.route = route
    return layer


def gradients(layer: LatentAttention, x: torch.Tensor, **arguments) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, **arguments)
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad((out * out.detach().cos()).sum(), wanted, allow_unused=True)
    return [out, *(torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True))]


# ---- the formula -----------------------------------------------------------------------------------------------------
def latent_work(layer: LatentAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same matrices through torch.nn alone, causal, rotation of neighbours: what LatentAttention is timed against."""

    def turn(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def heads(x):
        return x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    nope, rope, value = layer.nope_dim, layer.rope_dim, layer.value_dim
    q = heads(layer.q_proj(x) if layer.q_rank is None else layer.q_up(layer.q_norm(layer.q_down(x))))
    latent, rotary = layer.kv_down(x).split([layer.kv_rank, rope], -1)
    k, v = heads(layer.kv_up(layer.kv_norm(latent))).split([nope, value], -1)
    q = torch.cat([q[..., :nope], turn(q[..., nope:])], -1)
    k = torch.cat([k, turn(rotary[:, None]).expand(-1, layer.num_heads, -1, -1)], -1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(nope + rope) ** -0.5)
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("route", ["expanded", "absorbed"])
@pytest.mark.parametrize("q_rank", [None, 12])
@pytest.mark.parametrize("value_dim", [5, 10, 13])  # narrower than keys, as wide, wider
@pytest.mark.parametrize("length", [1, 7, 63])
def test_it_is_the_same_work_in_plain_torch(route, q_rank, value_dim, length):
    layer = by(make(q_rank=q_rank, value_dim=value_dim, bias=True), route)
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    x = tokens(2, length).requires_grad_()
    expected = latent_work(layer, x, angles.cos(), angles.sin())
    expected_gradients = torch.autograd.grad((expected * expected.detach().cos()).sum(), [x, *layer.parameters()])
    for ours, theirs in zip(gradients(layer, x.detach()), [expected, *expected_gradients], strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_pair_of_tokens_by_hand():
    """The score of two tokens, number by number: the rotary key is shared, turned and not normalised."""
    layer, x = make(), tokens(1, 2)
    _, weights = layer(x, positions=torch.tensor([5, 11]), return_weights=True)

    def norm(y):
        return y / (y.square().mean() + 1e-6).sqrt()

    def turn(y, place):
        pairs = [(y[0], y[1], place * 1.0), (y[2], y[3], place * 10_000**-0.5)]
        turned = []
        for a, b, angle in pairs:
            turned += [a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)]
        return torch.stack(turned)

    for head in range(HEADS):
        q = layer.q_up.weight[10 * head : 10 * head + 10] @ (norm(layer.q_down.weight @ x[0, 1]) * layer.q_norm.weight)
        scores = []
        for j, place in ((0, 5), (1, 11)):
            made = layer.kv_down.weight @ x[0, j]
            k = layer.kv_up.weight[11 * head : 11 * head + 6] @ (norm(made[:10]) * layer.kv_norm.weight)
            scores.append((q[:6] @ k + turn(q[6:], 11) @ turn(made[10:], place)) / 10**0.5)
        assert_close(weights[0, head, 1], torch.stack(scores).softmax(0), rtol=1e-12, atol=1e-12)


# ---- two routes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(("length", "value_dim"), [(1, 5), (7, 13), (63, 5)])
def test_both_routes_are_one_function(name, length, value_dim):
    layer, x = make(name, value_dim=value_dim), tokens(2, length)
    for ours, theirs in zip(gradients(by(layer, "expanded"), x), gradients(by(layer, "absorbed"), x), strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [lg.NoMask(), lg.Window(3), lg.Causal() & lg.Padding(torch.arange(63) > 8)], ids=str)
def test_both_routes_under_a_mask(mask):
    layer, x = make("alibi"), tokens(2, 63)
    expanded, weights = by(layer, "expanded")(x, mask=mask, return_weights=True)
    absorbed, same = by(layer, "absorbed")(x, mask=mask, return_weights=True)
    assert_close(absorbed, expanded, rtol=1e-12, atol=1e-12)
    assert_close(same, weights, rtol=1e-12, atol=1e-12)
    if mask.reach == (0, None):
        assert_close(expanded[:, :9], torch.zeros(2, 9, DIM).double())  # nobody to look at


@pytest.mark.parametrize(
    ("rows", "keys", "absorbed"), [(170, 10**9, True), (171, 10**9, False), (85, 170, True), (86, 170, False)]
)
def test_routes_cross_where_products_are_equally_many(rows, keys, absorbed):
    """At DeepSeek-V3's sizes a key costs 512 (128 + 128) products to expand, and a pair 2 (576 - 192) more in latent space."""
    layer = LatentAttention(64, 1, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert layer.cheaper_absorbed(rows, keys) == absorbed
    assert not LatentAttention(64, 1, kv_rank=2).cheaper_absorbed(keys, keys)  # without a past, always expanded


def test_auto_expands_a_whole_pass_and_absorbs_a_step(monkeypatch):
    layer, took = make(), []
    for route in ("expanded", "absorbed"):
        usual = getattr(layer, route)
        monkeypatch.setattr(layer, route, lambda *a, route=route, usual=usual: took.append(route) or usual(*a))
    cache, x = layer.cache_layer(), tokens(1, 20)
    layer(x, cache=cache)
    layer(x[:, :1], cache=cache)
    assert took == ["expanded", "absorbed"]


def test_a_whole_pass_holds_no_matrix_of_scores():
    """Values narrower or wider than keys stay on the fused kernel."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor))])
            return out

    for value_dim in (5, 13):
        layer, largest = make(value_dim=value_dim).float(), 0
        with Watch():
            layer(tokens(1, 500, dtype=torch.float32))
        assert largest < 500 * 500


# ---- the cache -------------------------------------------------------------------------------------------------------
@pytest.mark.one_in(3)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [*ENCODINGS, *CARRYING])
def test_pieces_are_the_whole(name, grad):
    layer, x = make(name), tokens(2, 40)
    whole = layer(x)
    with torch.set_grad_enabled(grad):
        cache = layer.cache_layer()
        pieces = [layer(x[:, a:b], cache=cache) for a, b in [(0, 13), (13, 30), *((t, t + 1) for t in range(30, 40))]]
    assert_close(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-11)


def test_the_cache_holds_the_normalised_latent_and_the_turned_key():
    layer, x = make(), tokens(2, 9)
    cache = layer.cache_layer()
    layer(x, cache=cache)
    latent, rotary = layer.kv_down(x).split([10, ROPE], -1)
    expected = torch.cat([layer.kv_norm(latent), lg.Rotary(ROPE, "interleaved").rotate(rotary[:, None], 0)[:, 0]], -1)
    assert_close(cache.keys[:, 0], expected)
    assert cache.values.numel() == 0 and cache.get_seq_length() == 9


def test_sizes_by_default_are_those_of_deepseek_v2_lite_in_proportion():
    assert LatentAttention(2048, 16).sizes == (512, 128, 64, 128)
    assert LatentAttention(5120, 2, head_dim=128).sizes == (512, 128, 64, 128)
    assert LatentAttention(256, 4).sizes == (64, 64, 32, 64)


def test_a_token_is_576_numbers():
    """As in DeepSeek-V2 (section 2.1.4), against 2 x 128 heads x 128 of multi-head attention there: 56.9 times fewer."""
    layer = LatentAttention(2048, 16)
    cache = layer.cache_layer()
    with torch.no_grad():
        layer(torch.randn(1, 3, 2048), cache=cache)
    assert cache.keys.numel() + cache.values.numel() == 3 * 576
    assert round(2 * 128 * 128 / 576, 1) == 56.9


@pytest.mark.parametrize("route", ["expanded", "absorbed"])
def test_a_rotation_that_follows_the_length_turns_queries_and_keys(route):
    follows = lg.Rotary(ROPE, "half", scaling=lg.scaling.DynamicNTK(2.0, 100, follow="row"))
    x = tokens(2, 63)  # within the original length: the plain rotation
    assert not follows.stable_keys
    assert_close(by(make(follows), route)(x), make("half")(x), rtol=1e-12, atol=1e-12)


def test_a_memory_is_seen():
    layer, x = make(), tokens(2, 20)
    assert_close(layer(x[:, 8:], memory=x[:, :8]), layer(x)[:, 8:], rtol=1e-12, atol=1e-12)


# ---- what positions do -----------------------------------------------------------------------------------------------
def test_only_the_rotary_part_knows_positions():
    layer, x = make(), tokens(1, 9)
    places = torch.tensor([0, 4, 5, 9, 11, 30, 31, 77, 90])
    assert not torch.allclose(layer(x, positions=places), layer(x))
    assert_close(layer(x, positions=places + 1000), layer(x, positions=places))
    cache = layer.cache_layer()
    layer(x[:, :6], positions=places[:6], cache=cache)
    assert_close(
        layer(x[:, 6:8], cache=cache), layer(x[:, :8], positions=torch.tensor([0, 4, 5, 9, 11, 30, 31, 32]))[:, 6:]
    )
    with torch.no_grad():
        layer.kv_down.weight[10:] = 0  # no rotary key
    assert_close(layer(x, positions=places), layer(x))


def test_the_scale_takes_deepseeks_second_mscale():
    yarn = lg.scaling.YaRN(factor=40.0, original_max_length=4096, mscale=1.0, mscale_all_dim=1.0)
    encoding = lg.Rotary(ROPE, "interleaved", scaling=yarn)
    layer, x = make(encoding), tokens(1, 9)
    said = make(
        encoding, scale=10**-0.5 * 1.3688879454113936**2
    )  # 0.1 ln 40 + 1, squared (DeepSeek-V3's softmax scale)
    assert_close(layer(x), said(x))
    assert not torch.allclose(layer(x), make(encoding, scale=10**-0.5)(x))


# ---- in a model ------------------------------------------------------------------------------------------------------
def test_a_model_gives_encodings_the_rotary_size_and_reads_its_config_back(tmp_path):
    torch.manual_seed(0)
    mixer = {"name": "latent", "q_rank": 12}
    config = lg.LongitudeConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, mixer=mixer, encoding=["rope", "fox"]
    )
    assert config.encoding[0]["head_dim"] == 4
    model = lg.LongitudeForCausalLM(config).eval()
    prompt = torch.randint(0, 40, (2, 9))
    told = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert (model(told).logits[:, 8:-1].argmax(-1) == told[:, 9:]).all()
    model.save_pretrained(tmp_path)
    again = lg.LongitudeForCausalLM.from_pretrained(tmp_path)
    assert_close(again(told).logits, model(told).logits)


# ---- what does not fit -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_dim": 3}, "expected an even rope_dim.* got 3"),
        ({"kv_rank": 0}, "kv_rank"),
        ({"q_rank": 0}, "q_rank"),
        ({"value_dim": -1}, "value_dim"),
        ({"route": "expand"}, "expanded"),
        ({"backend": "fast"}, "fast"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_wrong_calls():
    layer, x = make(), tokens(2, 6)
    wrong = [
        ({"encoding": lg.Rotary(6, "half")}, "Rotary: expected head_dim=4 for latent attention, .* got 6"),
        ({"encoding": lg.ALiBi(8)}, "ALiBi: expected num_heads=4 .* got 8"),
        ({"encoding": lg.Shaw(ROPE)}, "adds vectors to values.*values=False"),
        ({"encoding": lg.PaTH(DIM, HEADS, ROPE).double()}, "carries 4 heads of keys.*num_kv_heads=1"),
        ({"mask": "causal"}, "did you mean lg.Causal"),
        ({"documents": torch.zeros(2, 5, dtype=torch.long)}, r"documents: expected \[2, 6\].* got \[2, 5\]"),
        ({"positions": torch.arange(5)}, "positions: expected"),
        ({"memory": tokens(2, 3)[..., :4]}, r"memory: expected \[2, M, 32\]"),
        (
            {"encoding": lg.FoX(DIM, HEADS).double(), "mask": lg.Causal() & lg.Padding(torch.ones(6).bool())},
            "as documents=",
        ),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer(x, **arguments)
    for given in (x[..., :5], x[0], x[:, :0]):
        with pytest.raises(ValueError, match="x: expected"):
            layer(given)
    cache = layer.cache_layer()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="cached tokens attend to the 1 after them"):
        layer(x, cache=cache, mask=Band(1, 1))
    cache = layer.cache_layer()
    with pytest.raises(ValueError, match="expected a mask with"):
        make("xpos")(x, mask=lg.NoMask(), cache=cache)
    assert not cache.get_seq_length()  # refused before it took tokens in
    follows = lg.Rotary(ROPE, "half", scaling=lg.scaling.DynamicNTK(2.0, 4, follow="sequence"))
    layer, cache = make(follows), layer.cache_layer()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="the sequence left the length"):
        layer(x, cache=cache)
    with pytest.raises(ValueError, match="Shaw adds vectors to values"):
        lg.LongitudeForCausalLM(lg.LongitudeConfig(hidden_size=32, mixer="latent", encoding="shaw"))
    with pytest.raises(ValueError, match="expected route 'absorbed' or 'auto'"):
        by(make("path"), "expanded")(x)


def test_a_cache_of_another_layer():
    layer, x = make(), tokens(2, 6)
    with pytest.raises(ValueError, match=r"LatentCacheLayer of width 14.*got one of LongitudeCacheLayer"):
        layer(x, cache=lg.LongitudeCacheLayer())
    make(kv_rank=8)(x, cache=(cache := LatentCacheLayer()))
    with pytest.raises(ValueError, match=r"width 14.*got one of width 12"):
        layer(x, cache=cache)
