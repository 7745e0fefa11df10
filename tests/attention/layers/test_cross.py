"""Cross-attention: equal to torch's own, made once per source, and zeros where there is no source to see."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from longitude.attention.layers.cross import CrossAttention

DIM, HEADS, SOURCE = 24, 4, 20
LENGTHS = [(1, 1), (7, 3), (3, 7), (63, 130), (1, 130)]


def make(num_kv_heads=None, **options) -> CrossAttention:
    torch.manual_seed(3)
    return CrossAttention(DIM, HEADS, num_kv_heads, **{"kv_dim": SOURCE, **options}).double()


def tokens(batch: int, length: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counted(layer: CrossAttention) -> list[int]:
    """The length of the source, each time that keys are made of it."""
    calls: list[int] = []
    layer.k_proj.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape[1]))
    return calls


# ---- the formula -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_torchs_multihead_attention(rows, keys, padded):
    """nn.MultiheadAttention with the weights copied: output, weights, and every gradient."""
    ours = make(bias=True)
    for bias in (ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias, ours.o_proj.bias):
        nn.init.normal_(bias)
    theirs = nn.MultiheadAttention(DIM, HEADS, kdim=SOURCE, vdim=SOURCE, batch_first=True).double()
    with torch.no_grad():
        for name, project in (("q", ours.q_proj), ("k", ours.k_proj), ("v", ours.v_proj)):
            getattr(theirs, f"{name}_proj_weight").copy_(project.weight)
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, source = tokens(2, rows, DIM).requires_grad_(), tokens(2, keys, SOURCE, 1).requires_grad_()
    valid = torch.arange(keys) < torch.tensor([[keys], [keys // 2 + 1]]) if padded else None
    out, weights = ours(x, source, valid=valid, return_weights=True)
    ignored = None if valid is None else ~valid
    expected, their_weights = theirs(x, source, source, key_padding_mask=ignored, average_attn_weights=False)
    assert_close(out, expected, atol=1e-12, rtol=0)
    assert_close(weights, their_weights, atol=1e-12, rtol=0)
    assert_close(ours(x, source, valid=valid), out, atol=1e-12, rtol=0)

    direction = tokens(2, rows, DIM, 2)
    ours_of = {"q": ours.q_proj.weight, "k": ours.k_proj.weight, "v": ours.v_proj.weight}
    theirs_of = {name: getattr(theirs, f"{name}_proj_weight") for name in ours_of}
    mine = torch.autograd.grad(
        ours(x, source, valid=valid), [x, source, *ours_of.values(), ours.o_proj.weight], direction
    )
    other = torch.autograd.grad(expected, [x, source, *theirs_of.values(), theirs.out_proj.weight], direction)
    for a, b in zip(mine, other, strict=True):
        assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_head_of_keys_serves_neighbouring_queries(kv_heads):
    """Grouped = multi-head with each head of keys and values repeated, neighbours together."""
    grouped, whole = make(kv_heads, bias=True), make(bias=True)
    with torch.no_grad():
        for name in ("q_proj", "o_proj"):
            getattr(whole, name).load_state_dict(getattr(grouped, name).state_dict())
        for name in ("k_proj", "v_proj"):
            ours, theirs = getattr(grouped, name), getattr(whole, name)
            for kind in ("weight", "bias"):
                heads = getattr(ours, kind).unflatten(0, (kv_heads, DIM // HEADS))
                getattr(theirs, kind).copy_(heads.repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1))
    x, source = tokens(2, 7, DIM), tokens(2, 9, SOURCE, 1)
    assert_close(grouped(x, source), whole(x, source), atol=1e-12, rtol=0)


def test_scale_and_dropout():
    """scale multiplies scores; dropout falls on the weights in training alone, and keeps their mean."""
    x, source = tokens(2, 7, DIM), tokens(2, 9, SOURCE, 1)
    plain, sharp = make(), make(scale=3 * (DIM // HEADS) ** -0.5)
    tripled = make()
    tripled.q_proj.weight.data *= 3
    assert_close(sharp(x, source), tripled(x, source), atol=1e-12, rtol=0)
    dropping = make(dropout=0.4)
    assert_close(dropping.eval()(x, source), plain(x, source), atol=1e-12, rtol=0)
    many = torch.stack([dropping.train()(x, source) for _ in range(400)])
    assert not torch.equal(many[0], many[1])
    error = (many.mean(0) - plain(x, source)).abs().mean() / many.std(0).mean()
    assert error < 0.1  # 400 draws: about 0.04


# ---- who is seen -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("integer", [False, True])
def test_padding_of_the_source_is_not_there(integer):
    """Left, right or both: what is not valid may hold anything, and gets no gradient."""
    layer, x = make(2), tokens(3, 5, DIM)
    source = tokens(3, 9, SOURCE, 1)
    spans = ((0, 9), (3, 9), (2, 6))
    valid = torch.stack([(torch.arange(9) >= a) & (torch.arange(9) < b) for a, b in spans])
    filled = source.masked_fill(~valid[..., None], 1e6).requires_grad_()
    out = layer(x, filled, valid=valid.long() if integer else valid)
    for row, (a, b) in enumerate(spans):
        assert_close(out[row : row + 1], layer(x[row : row + 1], source[row : row + 1, a:b]), atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(out.square().sum(), filled)
    assert (gradient[~valid] == 0).all() and (gradient[valid] != 0).any(-1).all()


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa", "table"])
def test_a_source_without_tokens_gives_zeros(backend):
    layer, x = make(backend=backend), tokens(2, 6, DIM).requires_grad_()
    source = tokens(2, 4, SOURCE, 1).requires_grad_()
    valid = torch.tensor([[True] * 4, [False] * 4])
    out = layer(x, source, valid=valid)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert_close(out[:1], layer(x[:1], source[:1]), atol=1e-12, rtol=0)
    for gradient in torch.autograd.grad(out.square().sum(), [x, source]):
        assert (gradient[1] == 0).all() and gradient.isfinite().all()


# ---- made once -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_keys_and_values_are_made_once():
    layer, x, source = make(2), tokens(2, 6, DIM), tokens(2, 9, SOURCE, 1)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    whole = layer(x, source, valid=valid)
    calls, cache = counted(layer), layer.cache_layer()
    steps = [
        layer(chunk, source if n < 2 else None, valid=valid, cache=cache)  # nor is the source needed then
        for n, chunk in enumerate(x.split((2, 1, 1, 2), 1))
    ]
    assert calls == [9]
    assert cache.keys is not None and cache.keys.shape == (2, 2, 9, DIM // HEADS)
    assert_close(torch.cat(steps, 1), whole, atol=1e-12, rtol=0)
    cache.reorder_cache(torch.LongTensor([1, 0]))
    assert_close(layer(x.flip(0), valid=valid.flip(0), cache=cache), whole.flip(0), atol=1e-12, rtol=0)
    assert calls == [9]
    cache.batch_repeat_interleave(2)
    twice = layer(x.flip(0).repeat_interleave(2, 0), valid=valid.flip(0).repeat_interleave(2, 0), cache=cache)
    assert_close(twice, whole.flip(0).repeat_interleave(2, 0), atol=1e-12, rtol=0)


def test_narrow_dtypes():
    """bfloat16 in, bfloat16 out, near the float64 answer; under autocast too, with a cache of either dtype."""
    layer, x, source = make(2), tokens(2, 6, DIM), tokens(2, 9, SOURCE, 1)
    exact = layer(x, source)
    narrow = layer.bfloat16()(x.bfloat16(), source.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.double() - exact).abs().max() < 0.05
    layer, cache = layer.float(), layer.cache_layer()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x.float(), source.float(), cache=cache)
    with torch.no_grad():
        out = layer(x.float(), source.float(), cache=cache)
    assert out.dtype == torch.float32 and (out.double() - exact).abs().max() < 0.05


# ---- bad input -------------------------------------------------------------------------------------------------------
X, S = torch.ones(2, 5, DIM, dtype=torch.float64), torch.ones(2, 9, SOURCE, dtype=torch.float64)
REFUSED = {
    "x": ({"x": X[0]}, rf"x: expected \[B, L, {DIM}\] with no empty dimension, got \[5, {DIM}\]"),
    "empty x": ({"x": X[:, :0]}, r"x: expected .* got \[2, 0, 24\]"),
    "width of the source": ({"source": X}, rf"source: expected \[2, S, {SOURCE}\] .* got \[2, 5, {DIM}\]"),
    "batch of the source": ({"source": S[:1]}, rf"source: expected \[2, S, {SOURCE}\] .* got \[1, 9, {SOURCE}\]"),
    "empty source": ({"source": S[:, :0]}, r"source: expected .* got \[2, 0, 20\]"),
    "no source": ({"source": None}, "source: expected .* or a cache with its keys and values, got neither"),
    "valid": (
        {"valid": torch.ones(2, 5).bool()},
        r"valid: expected \[2, 9\], one per token of the source, got \[2, 5\]",
    ),
    "float valid": ({"valid": torch.ones(2, 9)}, "expected valid .* of bool or int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()(**{"x": X, "source": S, **options})


@torch.no_grad()
def test_a_cache_serves_one_source():
    layer = make(2)
    cache = layer.cache_layer()
    layer(X, S, cache=cache)
    for x, source, num_kv_heads in ((X, S[:, :4], 2), (X[:1], None, 2), (X, S, 4)):
        with pytest.raises(ValueError, match=r"cache: expected keys .* got \[2, 2, 9, 6\]; a cache serves one source"):
            make(num_kv_heads)(x, source, cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads to divide num_heads, got 3 and 4"),
        ({"num_heads": 5}, "num_heads to divide dim, got 5 and 24"),
        ({"kv_dim": 0}, "expected kv_dim to be an int of 1 or more, got 0"),
        ({"dropout": 1.0}, "dropout: expected 0 <= dropout < 1, got 1.0"),
        ({"scale": float("nan")}, "scale: expected a finite number"),
        ({"backend": "sdpaa"}, "did you mean 'sdpa'"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        CrossAttention(**{"dim": DIM, "num_heads": HEADS, **options})
