"""Cross-attention: equal to torch's own, made once per source, and zeros where there is no source to see."""

import pytest
import torch
from torch import nn

from longitude.attention.layers.cross import CrossAttention
from tests.support import close, random, refused_calls

DIM, HEADS, SOURCE = 24, 4, 20


def make(num_kv_heads=None, **options) -> CrossAttention:
    torch.manual_seed(3)
    return CrossAttention(DIM, HEADS, num_kv_heads, **{"kv_dim": SOURCE, **options}).double()


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 3), (3, 7)])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_torchs_multihead_attention(rows, keys, padded):
    """nn.MultiheadAttention with the weights copied: output, weights, and every gradient."""
    ours = make(bias=True)
    projections = ours.q_proj, ours.k_proj, ours.v_proj
    for project in (*projections, ours.o_proj):
        nn.init.normal_(project.bias)
    theirs = nn.MultiheadAttention(DIM, HEADS, kdim=SOURCE, vdim=SOURCE, batch_first=True).double()
    weights_of = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
    with torch.no_grad():
        for weight, project in zip(weights_of, projections, strict=True):
            weight.copy_(project.weight)
        theirs.in_proj_bias.copy_(torch.cat([project.bias for project in projections]))
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, source = random(2, rows, DIM).requires_grad_(), random(2, keys, SOURCE, seed=1).requires_grad_()
    valid = torch.arange(keys) < torch.tensor([[keys], [keys // 2 + 1]]) if padded else None
    out, weights = ours(x, source, valid=valid, return_weights=True)
    ignored = None if valid is None else ~valid
    expected, their_weights = theirs(x, source, source, key_padding_mask=ignored, average_attn_weights=False)
    close(out, expected)
    close(weights, their_weights)
    close(ours(x, source, valid=valid), out)

    direction = random(2, rows, DIM, seed=2)
    ours_of = [x, source, *(project.weight for project in (*projections, ours.o_proj))]
    mine = torch.autograd.grad(ours(x, source, valid=valid), ours_of, direction)
    other = torch.autograd.grad(expected, [x, source, *weights_of, theirs.out_proj.weight], direction)
    close(mine, other, atol=1e-10)


def test_scale_and_dropout():
    """scale multiplies scores; weights are dropped in training alone."""
    x, source = random(2, 7, DIM), random(2, 9, SOURCE, seed=1)
    tripled, dropping = make(), make(dropout=0.4)
    tripled.q_proj.weight.data *= 3
    close(make(scale=3 * (DIM // HEADS) ** -0.5)(x, source), tripled(x, source))
    close(dropping.eval()(x, source), make()(x, source))
    assert not torch.equal(dropping.train()(x, source), dropping(x, source))


def test_grouped_heads_are_repeated_heads():
    """Query head h reads head h // (H / Hkv) of keys and values."""
    grouped, wide, size = make(2, bias=True), make(bias=True), DIM // HEADS
    for name, x in grouped.state_dict().items():
        if name.startswith(("k_proj", "v_proj")):
            x = x.unflatten(0, (2, size)).repeat_interleave(HEADS // 2, 0).flatten(0, 1)
        wide.get_parameter(name).data.copy_(x)
    x, source = random(2, 5, DIM), random(2, 9, SOURCE, seed=1)
    close(grouped(x, source), wide(x, source))


@pytest.mark.parametrize("integer", [False, True])
def test_padding_of_the_source_is_not_there(integer):
    """Left, right or both: what is not valid may hold anything, and gets no gradient."""
    layer, x = make(2), random(3, 5, DIM)
    source = random(3, 9, SOURCE, seed=1)
    spans = ((0, 9), (3, 9), (2, 6))
    valid = torch.stack([(torch.arange(9) >= a) & (torch.arange(9) < b) for a, b in spans])
    filled = source.masked_fill(~valid[..., None], 1e6).requires_grad_()
    out = layer(x, filled, valid=valid.long() if integer else valid)
    for row, (a, b) in enumerate(spans):
        close(out[row : row + 1], layer(x[row : row + 1], source[row : row + 1, a:b]))
    (gradient,) = torch.autograd.grad(out.square().sum(), filled)
    assert (gradient[~valid] == 0).all() and (gradient[valid] != 0).any(-1).all()


def test_a_source_without_tokens_gives_zeros():
    layer, x = make(), random(2, 6, DIM).requires_grad_()
    source = random(2, 4, SOURCE, seed=1).requires_grad_()
    out = layer(x, source, valid=torch.tensor([[True] * 4, [False] * 4]))
    assert (out[1] == 0).all()
    close(out[:1], layer(x[:1], source[:1]))
    for gradient in torch.autograd.grad(out.square().sum(), [x, source]):
        assert (gradient[1] == 0).all() and gradient.isfinite().all()


def test_narrow_dtypes():
    """bfloat16 in, bfloat16 out, near the float64 answer; under autocast too, with a cache of either dtype."""
    layer, x, source = make(2), random(2, 6, DIM), random(2, 9, SOURCE, seed=1)
    exact = layer(x, source)
    narrow = layer.bfloat16()(x.bfloat16(), source.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.double() - exact).abs().max() < 0.05
    layer, cache = layer.float(), layer.cache_layer()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x.float(), source.float(), cache=cache)
    with torch.no_grad():
        out = layer(x.float(), cache=cache)  # which has the keys and values of the source
    assert out.dtype == torch.float32 and (out.double() - exact).abs().max() < 0.05


X, S = random(2, 5, DIM), random(2, 9, SOURCE)


def calling(x=X, source=S, **options):
    return lambda: make()(x, source, **options)


@torch.no_grad()
def another_source() -> None:
    """A second call with a shorter source than that of the cache."""
    layer = make(2)
    cache = layer.cache_layer()
    layer(X, S, cache=cache)
    layer(X, S[:, :4], cache=cache)


test_refusals = refused_calls(
    [
        (calling(X[0]), "x", f"[B, L, {DIM}]", f"[5, {DIM}]"),
        (calling(source=X), "source", f"[2, S, {SOURCE}]", f"[2, 5, {DIM}]"),
        (calling(source=S[:1]), "source", f"[2, S, {SOURCE}]", f"[1, 9, {SOURCE}]"),
        (calling(source=None), "source", "[B, S, kv_dim]"),
        (calling(valid=torch.ones(2, 5).bool()), "valid", "[2, 9]", "[2, 5]"),
        (calling(valid=torch.ones(2, 9)), "Padding", "[B, Lk]"),
        (another_source, "cache", "[2, 2, 9, 6]"),
    ]
)
