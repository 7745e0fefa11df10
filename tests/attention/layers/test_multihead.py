"""The attention layer: projections around attend(), and its bookkeeping of positions, documents and padding."""

import pytest
import torch
from torch import nn

import longitude as lg
from longitude.attention.mixer import MixerInputs
from longitude.testing.examples import mixer_example
from tests.support import close, gradients, random, refused, refused_calls

DIM, HEADS = 16, 4


def layer(kv_heads=None, encoding=None, **options) -> lg.MultiHeadAttention:
    torch.manual_seed(0)
    return lg.MultiHeadAttention(DIM, HEADS, kv_heads, encoding, **options).double()


def tokens(batch=2, length=11) -> torch.Tensor:
    return random(batch, length, DIM, seed=1)


@pytest.mark.parametrize("bias", [True, False])
def test_equals_torch(bias):
    ours, theirs = layer(bias=bias), nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True).double()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
    parts = zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True)
    with torch.no_grad():
        for n, (projection, weight) in enumerate(parts):
            projection.weight.copy_(weight)
            if bias:
                projection.bias.copy_(theirs.in_proj_bias.chunk(3)[n])
        ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x, future = tokens(), torch.ones(11, 11, dtype=torch.bool).triu(1)
    expected, weights = theirs(x, x, x, attn_mask=future, average_attn_weights=False)
    out, ours_weights = ours(x, return_weights=True)
    close(out, expected)
    close(ours_weights, weights)
    close(ours(x), expected)
    close(ours(x, mask=lg.NoMask()), theirs(x, x, x)[0])


def test_head_dim_and_scale_may_be_given():
    wide = layer(encoding=lg.Rotary(6, "half"), head_dim=6, scale=0.3)
    assert wide.q_proj.out_features == 24 and wide.o_proj.in_features == 24
    x = tokens()
    q, k, v = (p(x).unflatten(-1, (HEADS, 6)).transpose(1, 2) for p in (wide.q_proj, wide.k_proj, wide.v_proj))
    by_hand = lg.attend(q, k, v, encoding=lg.Rotary(6, "half"), scale=0.3).transpose(1, 2).flatten(2)
    close(wide(x), wide.o_proj(by_hand))


def test_documents_join_the_callers_own():
    """documents= and a mask of documents hold both at once."""
    attention, x = layer(), tokens(1, 6)
    a, b = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([0, 0, 1, 1, 1, 2])
    both = attention(x, mask=lg.Causal() & lg.Documents(b), documents=a)
    close(both, attention(x, documents=torch.tensor([[0, 0, 1, 2, 2, 3]])))


def test_encoding_and_tables_may_be_handed_in():
    rope = lg.Rotary(4, "half")
    own, handed, x = layer(encoding=rope), layer(), tokens()
    close(handed(x, encoding=rope), own(x))
    close(handed(x, encoding=rope, tables=(rope.prepare(torch.arange(11), 11, torch.float64),)), own(x))
    assert not torch.allclose(handed(x), own(x))


@pytest.mark.parametrize(
    "given", [{"mask": lg.NoMask()}, {"positions": 3}, {"encoding": lg.Rotary(4, "half")}, {"return_weights": True}]
)
def test_nothing_is_ignored_beside_inputs(given):
    attention, x, inputs = layer(), tokens(), MixerInputs(lg.Causal())
    close(attention(x, inputs), attention(x))
    with refused("MultiHeadAttention", "inputs"):
        attention(x, inputs, **given)


# ---- parts around attention ----------------------------------------------------------------------------------------------
def convolving(*places, **options) -> lg.MultiHeadAttention:
    return layer(2, lg.Rotary(4, "half"), short_conv=places, **options)


@torch.no_grad()
@pytest.mark.parametrize(
    "part", [{"qk_norm": True}, {"output_gate": True}, {"softcap": 0.5}, {"short_conv": "input"}], ids=str
)
def test_every_mixer_that_takes_a_part_has_it(part):
    """With the same weights otherwise, the part changes what each of them gives."""
    examples = [mixer_example(name) for name in lg.list_mixers()]
    takers = [each for each in examples if all(map(each.has, part))]
    assert len(takers) > 3
    for each in takers:
        having, plain = each(**part), each()
        plain.load_state_dict({name: having.state_dict()[name] for name in plain.state_dict()})
        x = random(2, 11, having.dim, seed=1)
        assert (having(x) - plain(x)).abs().max() > 1e-3, each.name


def test_parts_by_hand():
    """Convolution of the input, QK-norm before the rotation, a gate that reads what the projections read."""
    rope = lg.Rotary(4, "half")
    attention, x = layer(2, rope, qk_norm=True, output_gate=True, short_conv="input", conv_kernel=3), tokens()
    for norm in (attention.q_norm, attention.k_norm):
        nn.init.normal_(norm.weight)
    taps = attention.input_conv.weight[:, 0]  # [DIM, 3], the token itself last
    before = torch.cat([torch.zeros(2, 2, DIM).double(), x], 1)
    y = x + sum(taps[:, n] * before[:, n : n + 11] for n in range(3))
    q, k, v = (
        p(y).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    unit = [z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k)]
    q, k = (z * norm.weight for z, norm in zip(unit, (attention.q_norm, attention.k_norm), strict=True))
    out = lg.attend(q, k, v, encoding=rope).transpose(1, 2).flatten(2) * attention.gate_proj(y).sigmoid()
    close(attention(x), attention.o_proj(out))


@pytest.mark.parametrize("encoding", [None, lg.Rotary(4, "half"), "values"], ids=["nope", "rope", "rotated values"])
def test_exclusive_attention_by_hand(encoding):
    """Zhai 2026: z = y - s (y.u) u for each head, u along the value that its head of keys has at the token itself."""
    encoding = lg.Rotary(4, "half", rotate_values=True) if encoding == "values" else encoding
    attention, plain, x = layer(2, encoding, xsa=True, output_gate=True), layer(2, encoding, output_gate=True), tokens()
    plain.load_state_dict({name: value for name, value in attention.state_dict().items() if name != "xsa_strength"})
    close(attention(x), plain(x))  # nothing at first
    nn.init.normal_(attention.xsa_strength)
    q, k, v = (
        p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    y = lg.attend(q, k, v, encoding=encoding)
    z = torch.empty_like(y)
    for head in range(HEADS):
        u = v[:, head // 2] / v[:, head // 2].square().sum(-1, keepdim=True).sqrt()
        z[:, head] = y[:, head] - attention.xsa_strength[head] * (y[:, head] * u).sum(-1, keepdim=True) * u
    want = attention.o_proj(z.transpose(1, 2).flatten(2) * attention.gate_proj(x).sigmoid())
    close(attention(x), want)
    parameters = [*attention.parameters()]
    close(*(gradients(out, parameters) for out in (attention(x), want)))


@torch.no_grad()
def test_tails_of_convolutions_move_with_their_cache():
    """To the CPU and back, and nowhere where a crop is refused; a cache without them is another layer's."""
    attention, x = convolving("kv", "output"), tokens()
    whole, cache = attention(x), attention.cache_layer()
    attention(x[:, :7], cache=cache)
    cache.offload()
    cache.prefetch()
    with refused(what="crop"):
        cache.crop(-1)
    close(attention(x[:, 7:], cache=cache), whole[:, 7:])
    plain = layer(2, lg.Rotary(4, "half")).cache_layer()
    layer(2)(x, cache=plain)
    with refused(what="cache"):
        attention(x, cache=plain)


RUNS = lg.Documents(torch.zeros(2, 11, dtype=torch.long))
GATED = lg.MultiHeadAttention(16, 4, encoding=lg.FoX(16, 4))
test_refusals = refused_calls(
    [
        (lambda: lg.MultiHeadAttention(16, 3), "num_heads", "3", "16", "head_dim"),
        (lambda: lg.MultiHeadAttention(16, 4, 3), "num_kv_heads", "num_heads", "3", "4"),
        (lambda: convolving("inputs"), "'inputs'", "'input'"),
        (lambda: convolving("qkv", "kv"), "'qkv'", "'kv'"),
        (lambda: convolving(conv_kernel=3), "conv_kernel", "3", "short_conv"),
        (lambda: layer(short_conv=True), "short_conv", "True"),
        (lambda: layer(softcap=-1.0), "softcap", "-1.0"),
        (lambda: lg.mixer("latent", dim=16, num_heads=4, short_conv="qkv"), "'qkv'", "'input'", "'output'"),
        (lambda: convolving("input")(tokens(), mask=lg.NoMask()), "mask", "short_conv", "NoMask"),
        (lambda: convolving("input")(tokens(), mask=lg.Causal() & RUNS), "mask", "short_conv", "documents="),
        # the encoding's context would not know of documents in the mask alone
        (lambda: GATED(tokens().float(), mask=RUNS), "padding", "documents"),
    ]
)


def test_exclusive_attention_of_zeros_is_finite_in_float16() -> None:
    """A token of zeros has a value without a direction: padding is such a token."""
    layer = lg.MultiHeadAttention(16, 2, xsa=True).half()
    torch.nn.init.ones_(layer.xsa_strength)
    x = torch.cat([torch.zeros(1, 2, 16), random(1, 3, 16, dtype=torch.float32)], 1).half().requires_grad_()
    out = layer(x)
    gradient = torch.autograd.grad(out.float().sum(), [x, *layer.parameters()])
    assert out.isfinite().all() and all(part.isfinite().all() for part in gradient)
