"""shaw and transformer_xl: the papers' signs, order of rows and terms, and numbers; XLNet's attention in transformers."""

import math

import pytest
import torch
from transformers import XLNetConfig, XLNetModel

import longitude as lg
from longitude.testing import fill
from tests.support import by_head, close, heads, random, refused_calls


# ---- Shaw et al. 2018 ---------------------------------------------------------------------------------------------------
def test_published_shaw() -> None:
    """Shaw et al. 2018, equations 3 and 4, one dimension, k = 1. With i - j for j - i it would be 1.751972, 2.058749."""
    encoding = lg.Shaw(1, max_distance=1).double()
    with torch.no_grad():
        encoding.key_table.copy_(torch.tensor([[0.1], [0.2], [0.3]]))
        encoding.value_table.copy_(torch.tensor([[0.0], [0.5], [1.0]]))
    q, k, v = torch.tensor([[1, 2], [0.5, -1], [1, 3]], dtype=torch.float64).view(3, 1, 1, 2, 1)
    out = lg.attend(q, k, v, encoding=encoding, mask=lg.NoMask())
    assert out.flatten().tolist() == pytest.approx([1.994540, 1.143310], abs=5e-7)


def test_shaw_written_out() -> None:
    """e_ij = q_i . (k_j + K[j - i]) / sqrt(d), o_i = sum_j a_ij (v_j + V[j - i]), clipped at max_distance."""
    encoding = lg.testing.example("shaw", max_distance=3)()
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    j_minus_i = (torch.arange(9) - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    keys, values = encoding.key_table[j_minus_i], encoding.value_table[j_minus_i]
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + keys) / 8**0.5
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    want = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + values)
    close(lg.attend(q, k, v, encoding=encoding), want)


def test_shaw_defaults() -> None:
    """16, as in the paper's models; 2 k + 1 rows, as Xavier fills them."""
    for values, names in ((True, ["key_table", "value_table"]), (False, ["key_table"])):
        tables = dict(lg.Shaw(24, values=values).named_parameters())
        assert list(tables) == names
        for table in tables.values():
            assert table.shape == (33, 24)
            assert 0.95 < float(table.detach().abs().max()) / math.sqrt(6 / (33 + 24)) <= 1


def test_shaw_rows() -> None:
    """Row 0 is the key max_distance before the query or farther, the middle one the query's own, the last the far future."""
    with torch.no_grad():
        offset = torch.tensor([9, 2, 1, 0, -1, -2, -9])
        rows = lg.Shaw(1, max_distance=2)
        rows.key_table.copy_(torch.arange(5.0)[:, None])
        rows.value_table.copy_(10 + torch.arange(5.0)[:, None])
        (term,) = rows.terms({})
        assert term.keys(offset)[:, 0].tolist() == [0, 0, 1, 2, 3, 4, 4]
        assert term.values is not None and term.values(offset)[:, 0].tolist() == [10, 10, 11, 12, 13, 14, 14]


# ---- Transformer-XL: Dai et al. 2019 --------------------------------------------------------------------------------------
def test_published_transformer_xl() -> None:
    """One dimension, q = 2, u = 0.5, v = 0.25, k = [1, -1], projected R(1) = 0.3, R(0) = 0.1: scores 3.175 and -2.275."""
    encoding = lg.TransformerXL(1, 1, 2).double()
    with torch.no_grad():
        encoding.u.fill_(0.5)
        encoding.v.fill_(0.25)
        encoding.project.weight.copy_(torch.tensor([[(0.3 - 0.1 * math.cos(1)) / math.sin(1), 0.1]]))
    q, k = (torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in ([2], [1, -1]))
    (term,) = encoding.terms({})
    content = encoding.queries(q, None) @ k.mT
    position = (encoding.queries(q, None) + term.shift) * term.keys(torch.tensor([1, 0])).view(1, 1, 1, 2)
    assert (content + position).flatten().tolist() == pytest.approx([3.175, -2.275], abs=1e-7)
    _, weights = lg.attend(q, k, k, encoding=encoding, return_weights=True, mask=lg.NoMask(), scale=1.0)
    assert weights.flatten().diff().item() == pytest.approx(-math.tanh((2.275 + 3.175) / 2), abs=1e-7)


@pytest.mark.parametrize(("rows", "keys", "clamp", "causal"), [(5, 5, -1, True), (3, 7, -1, True), (3, 6, 2, False)])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_transformer_xl_equals_xlnet(rows: int, keys: int, clamp: int, causal: bool, backend: str) -> None:
    """The same terms, with and without memory, a clamp, and the future, in float32."""
    config = XLNetConfig(d_model=6, n_head=2, vocab_size=8, d_inner=4, dropout=0.0, clamp_len=clamp, n_layer=1)
    model, encoding = XLNetModel(config).eval(), lg.TransformerXL(2, 3, 6, clamp_length=None if clamp < 0 else clamp)
    q, k, v = (random(n, 1, 2, 3, seed=n + s, dtype=torch.float32) for s, n in enumerate((rows, keys, keys)))
    r, layer = model.relative_positional_encoding(rows, keys), model.layer[0].rel_attn
    ahead = torch.ones(rows, keys).triu(keys - rows + 1)[..., None, None] if causal else None
    with torch.no_grad():
        for parameter in (encoding.u, encoding.v):
            parameter.normal_()
        layer.r_w_bias.copy_(encoding.u)
        layer.r_r_bias.copy_(encoding.v)
        k_r = encoding.project(r).unflatten(-1, (2, 3))
        want = layer.rel_attn_core(q, k, v, k_r, attn_mask=ahead)[:, 0]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        mask = lg.Causal() if causal else lg.NoMask()
        close(lg.attend(q, k, v, encoding=encoding, mask=mask, backend=backend)[0].transpose(0, 1), want, 2e-6)
    close(encoding.sinusoid(torch.arange(keys, -rows, -1)).float(), r[:, 0], 2e-7)


def test_sinusoid_of_transformer_xl() -> None:
    """All sines, then all cosines: dim 4 at 3, the numbers of Vaswani et al. 2017 in this order; odd in its sines."""
    near, mirrored, far = lg.TransformerXL(1, 1, 4).bfloat16().sinusoid(torch.tensor([3, -3, 131_071])).tolist()
    want = [0.1411200, 0.0299955, -0.9899925, 0.9995500]
    assert near == pytest.approx(want, abs=5e-8)
    assert mirrored == pytest.approx([-want[0], -want[1], *want[2:]], abs=5e-8)
    assert far == pytest.approx([f(x) for f in (math.sin, math.cos) for x in (131_071, 1310.71)], abs=1e-10)


test_wrong_options = refused_calls(
    [
        (lambda: lg.TransformerXL(4, 8, 15), "for", "sines", "TransformerXL", "15"),
        (lambda: lg.TransformerXL(4, 8, 16).queries(torch.zeros(1, 3, 5, 8), None),
         "TransformerXL", "[B, 4, L, 8]", "[1, 3, 5, 8]"),
    ]
)  # fmt: skip


# ---- Inkling ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("window", "floor"), [(None, None), (None, 7), (6, 7)])
def test_inkling_is_the_attention_of_transformers(window, floor):
    """Values and gradients past the extent, with QK-norm and its scale; window layers have no temperature."""
    pytest.importorskip("transformers.models.inkling", reason="transformers is older than the model")
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingAttention

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = InklingTextConfig(
        hidden_size=16, num_hidden_layers=1, d_rel=3, rel_extent=10, log_scaling_n_floor=floor, **sizes,
        **{f"swa_{name}": size for name, size in sizes.items()}, sliding_window_size=window or 512,
        layer_types=["hybrid_sliding" if window else "hybrid"], _attn_implementation="eager",
    )  # fmt: skip
    theirs = fill(InklingAttention(config, 0).double(), std=0.4)
    for conv in (theirs.k_sconv, theirs.v_sconv):
        conv.conv1d.weight.data.zero_()  # a residual is left
    extent = window or 10
    options = {} if window or not floor else {"log_scaling_n_floor": floor}
    ours = lg.encoding("inkling", dim=16, num_heads=4, d_rel=3, extent=extent, **options).double()
    ours.load_state_dict({"project.weight": theirs.r_proj.weight, "profiles": theirs.rel_logits_proj.proj})
    x, mask = random(2, 25, 16), lg.Causal() if window is None else lg.Window(window)
    seen = mask.allowed(torch.arange(25), torch.arange(25))
    want, _ = theirs(x, torch.where(seen, 0.0, -torch.inf)[None, None].double())
    q, k, v = (by_head(project(x), n) for project, n in ((theirs.q_proj, 4), (theirs.k_proj, 2), (theirs.v_proj, 2)))
    context = ours.context(x)[0]
    for backend in ("reference", "chunked", "table"):
        got = lg.attend(
            theirs.q_norm(q), theirs.k_norm(k.float().double()), v.float().double(), encoding=ours, context=context, mask=mask,
            scale=1 / 8, backend=backend,
        )  # fmt: skip
        got = theirs.o_proj(got.transpose(1, 2).flatten(2))
        close(got, want, 1e-6)  # their softmax and temperature are in float32
        direction = random(*want.shape, seed=3)
        for mine, other in zip(
            torch.autograd.grad(got, [ours.project.weight, ours.profiles], direction, retain_graph=True),
            torch.autograd.grad(
                want, [theirs.r_proj.weight, theirs.rel_logits_proj.proj], direction, retain_graph=True
            ),
            strict=True,
        ):
            close(mine, other, 1e-5)


def inkling(**options):
    return fill(lg.encoding("inkling", dim=16, num_heads=4, d_rel=3, extent=6, **options).double(), std=0.4)


@pytest.mark.parametrize("backend", ["reference", "chunked", "table"])
def test_inkling_by_hand_with_keys_on_both_sides_beside_shaw(backend):
    """Later keys have no bias, and vectors of another encoding are read off the query alone."""
    ours, shaw = inkling(), lg.Shaw(8, 3, values=False).double()
    (q, k, v), context = heads(20), ours.context(random(2, 20, 16, seed=5))[0]
    offset = torch.arange(20)[:, None] - torch.arange(20)
    near = ((offset >= 0) & (offset < 6))[..., None]
    keys = k.repeat_interleave(2, 1)[:, :, None] + shaw.key_table[(-offset).clamp(-3, 3) + 3]
    scores = torch.einsum("bhid,bhijd->bhij", q, keys) / math.sqrt(8)
    scores = scores + torch.einsum("bhin,ijn->bhij", context["mix"], ours.profiles.T[offset.clamp(0, 5)] * near)
    got = lg.attend(q, k, v, encoding=[shaw, ours], context=context, mask=lg.NoMask(), backend=backend)
    close(got, scores.softmax(-1) @ v.repeat_interleave(2, 1))
