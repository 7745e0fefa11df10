"""Latent attention: one function by both routes, and one small row per token in the cache; tests/checkpoints has DeepSeek's."""

from typing import Any

import pytest
import torch
from torch import nn

import longitude as lg
from longitude import testing
from longitude.attention.layers.latent import LatentAttention
from longitude.testing import mixers
from tests.support import LargestTensor, built, close, random, refused_calls

DIM, HEADS, ROPE = 32, 4, 4
KNOWN = {"num_heads": HEADS, "head_dim": ROPE, "dim": DIM}
SIZES = {"kv_rank": 10, "nope_dim": 6, "rope_dim": ROPE, "value_dim": 5}


def make(encoding: Any = "rope", seed=3, **options) -> LatentAttention:
    encoding = built(encoding, KNOWN) if isinstance(encoding, str) else encoding
    torch.manual_seed(seed)
    layer = LatentAttention(DIM, HEADS, encoding, **{**SIZES, "q_rank": 12, **options}).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def tokens(batch: int, length: int, dtype=torch.float64) -> torch.Tensor:
    return random(batch, length, DIM, dtype=dtype)


def by(layer: LatentAttention, route: str) -> LatentAttention:
    layer.route = route
    return layer


# ---- two routes, and the cache, with every encoding ------------------------------------------------------------------
def of(encoding, **options):
    """At the size of the laws, with one encoding that fits rotary keys of 8 numbers, and values wider than keys."""
    return mixers.MixerExample(LatentAttention, {"rope_dim": 8, "value_dim": 20}, testing.example(encoding, **options))


ROW = lg.scaling.DynamicNTK(2.0, 8, follow="row")
WITH = {
    **{name: of(name) for name in ("nope", "rope", "alibi", "t5", "fire", "fox", "transformer_xl", "cope", "xpos")},
    "rope by row": of("rope", scaling=ROW),
    "shaw": of("shaw", values=False),
}
WITHOUT = {
    name: mixers.MixerExample(LatentAttention, {"rope_dim": 0}, testing.example(name))
    for name in ("nope", "alibi", "fox", "ssmax")
}
CARRYING = {name: of(name, num_kv_heads=1) for name in ("path", "path_fox")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_rotary_part(name):
    """Both routes, and a cache of latents alone, as in layers without position."""
    mixers.laws()["forms"](WITHOUT[name], lengths=(1, 21)).require(name)
    layer, x = make("nope", rope_dim=0), tokens(2, 9)
    cache = layer.cache_layer()
    parts = [by(layer, route)(x[:, a:b], cache=cache) for route, a, b in (("expanded", 0, 4), ("absorbed", 4, 9))]
    assert cache.keys.shape[-1] == SIZES["kv_rank"]
    close(torch.cat(parts, 1), by(layer, "expanded")(x))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", WITH)
def test_both_routes_are_one_function(name):
    mixers.laws()["forms"](WITH[name], lengths=(1, 21)).require(name)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", [*WITH, *CARRYING])
def test_chunks_are_the_whole(name):
    mixers.laws()["chunks"]({**WITH, **CARRYING}[name], lengths=(21,)).require(name)


@pytest.mark.parametrize("mask", [lg.Window(3), lg.Causal() & lg.Padding(torch.arange(63) > 8)], ids=str)
@pytest.mark.parametrize("value_dim", [5, 13])  # narrower than keys, wider
def test_both_routes_under_a_mask(mask, value_dim):
    layer, x = make("alibi", value_dim=value_dim), tokens(2, 63)
    expanded = by(layer, "expanded")(x, mask=mask, return_weights=True)
    close(by(layer, "absorbed")(x, mask=mask, return_weights=True), expanded)


@pytest.mark.parametrize(
    ("rows", "keys", "absorbed"), [(170, 10**9, True), (171, 10**9, False), (85, 170, True), (86, 170, False)]
)
def test_routes_cross_where_products_are_equally_many(rows, keys, absorbed):
    """At DeepSeek-V3's sizes a key costs 512 (128 + 128) products to expand, and a pair 2 (576 - 192) more in latent space."""
    layer = LatentAttention(64, 1, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert layer.cheaper_absorbed(rows, keys) == absorbed
    assert not LatentAttention(64, 1, kv_rank=2).cheaper_absorbed(keys, keys)  # without a past, always expanded


@pytest.mark.parametrize("value_dim", [5, 13])
def test_a_whole_pass_holds_no_matrix_of_scores(value_dim):
    """Values narrower or wider than keys stay on the fused kernel."""
    layer = make(value_dim=value_dim).float()
    with LargestTensor() as made:
        layer(tokens(1, 500, torch.float32))
    assert made.elements < 500 * 500


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
def test_parts_by_hand(route):
    """Convolutions of input and output, a softcap, and a gate that reads what the projections read."""

    def convolved(conv, x):
        return x + conv.weight[:, 0, 1] * x + conv.weight[:, 0, 0] * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    parts = {"short_conv": ["input", "output"], "conv_kernel": 2, "softcap": 0.7, "output_gate": True}
    layer, x = by(make("nope", q_rank=None, rope_dim=0, **parts), route), tokens(2, 9)
    y = convolved(layer.input_conv, x)
    q = layer.q_proj(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    both = layer.kv_up(layer.kv_norm(layer.kv_down(y))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k, v = both.split([6, 5], -1)
    scores = 0.7 * (q @ k.mT / 6**0.5 / 0.7).tanh()
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2) * layer.gate_proj(y).sigmoid()
    close(layer(x), convolved(layer.output_conv, layer.o_proj(out)))


X = tokens(2, 6)


def calling(x=X, **arguments):
    return lambda: make()(x, **arguments)


def again(layer=None, **arguments):
    """A second call with the same cache."""

    def call() -> None:
        latent = make() if layer is None else layer
        cache = latent.cache_layer()
        latent(X, cache=cache)
        latent(X, cache=cache, **arguments)

    return call


FOLLOWS = lg.Rotary(ROPE, "half", scaling=lg.scaling.DynamicNTK(2.0, 4, follow="sequence"))
PADDED = lg.Causal() & lg.Padding(torch.ones(6).bool())
test_refusals = refused_calls(
    [
        (lambda: make(rope_dim=3), "rope_dim", "0", "3"),
        (lambda: make("nope", rope_dim=0).require(lg.Composed([lg.Rotary(4, "half")])), "rope_dim=0"),
        (lambda: make(route="expand"), "'expanded'"),
        (calling(encoding=lg.Rotary(6, "half")), "Rotary", "head_dim=4", "rope_dim", "6"),
        (calling(encoding=lg.ALiBi(8)), "ALiBi", "num_heads=4", "rope_dim", "8"),
        (calling(encoding=lg.Shaw(ROPE)), "such", "values=False"),
        (calling(encoding=lg.PaTH(DIM, HEADS, ROPE).double()), "4", "num_kv_heads=1"),
        (calling(encoding=lg.FoX(DIM, HEADS).double(), mask=PADDED), "documents"),
        (again(mask=lg.Band(1, 1)), "Band"),
        (again(make(FOLLOWS)), "cache", "follow='row'"),
        (lambda: make(lg.PaTH(DIM, HEADS, ROPE, num_kv_heads=1), route="expanded")(X), "'absorbed'", "'auto'"),
    ]
)
