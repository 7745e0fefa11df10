"""rope: published numbers, the two layouts against two independent ports, and far angles."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import longitude as lg

LAYOUTS = ("half", "interleaved")


# Su et al. 2021, section 3.4.2, for position 2 and d = 4: angles 2 and 0.02.
@pytest.mark.parametrize(
    ("layout", "x", "want"),
    [
        ("interleaved", [1, 0, 0, 0], [-0.4161468, 0.9092974, 0, 0]),
        ("half", [1, 0, 0, 0], [-0.4161468, 0, 0.9092974, 0]),
        ("interleaved", [0, 0, 0, 1], [0, 0, -0.0199987, 0.9998000]),
        ("half", [0, 1, 0, 0], [0, 0.9998000, 0, 0.0199987]),
    ],
)
def test_golden(layout: str, x: list, want: list) -> None:
    turned = lg.Rotary(4, layout).rotate(torch.tensor([x], dtype=torch.float64), 2)
    torch.testing.assert_close(turned[0], torch.tensor(want, dtype=torch.float64), atol=5e-8, rtol=0)


def test_frequencies() -> None:
    inverse, factor = lg.rope_frequencies(8)
    torch.testing.assert_close(inverse, torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64), atol=1e-15, rtol=0)
    assert factor == 1.0
    partial, _ = lg.rope_frequencies(64, base=500_000.0, rotary_dim=16)  # exponents over the dimensions that turn
    want = [500_000 ** (-2 * k / 16) for k in range(8)]
    torch.testing.assert_close(partial, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)


def test_half_layout_equals_llama() -> None:
    length, dim = 300, 32
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_theta=500_000.0)
    q, k = torch.randn(2, 1, 4, length, dim)
    positions = torch.arange(length)[None]
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions))
    rope = lg.Rotary(dim, "half", base=config.rope_parameters["rope_theta"], angle_dtype="float32")
    for x, want, turn in zip((q, k), theirs, (rope.rotate_queries, rope.rotate_keys), strict=True):
        torch.testing.assert_close(turn(x, 0), want, atol=2e-4, rtol=0)  # their frequencies are of float32
        torch.testing.assert_close(turn(x, positions[0]), want, atol=2e-4, rtol=0)


def test_interleaved_layout_equals_gptj() -> None:
    length, dim = 300, 16
    x = torch.randn(2, 4, length, dim)
    sin, cos = gptj.create_sinusoidal_positions(length, dim).chunk(2, -1)
    want = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    torch.testing.assert_close(lg.Rotary(dim, "interleaved").rotate(x, 0), want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_layouts_are_permutations_of_each_other(rotary_dim: int) -> None:
    """half(x[perm]) = interleaved(x)[perm]: conversion of a checkpoint reorders rows inside each head."""
    perm = torch.cat([torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, 16)])
    x = torch.randn(2, 3, 20, 16, dtype=torch.float64)
    half, interleaved = (lg.Rotary(16, layout, rotary_dim=rotary_dim) for layout in LAYOUTS)
    torch.testing.assert_close(half.rotate(x[..., perm], 5), interleaved.rotate(x, 5)[..., perm], atol=1e-14, rtol=0)
    assert not torch.allclose(half.rotate(x, 5), interleaved.rotate(x, 5), atol=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_turns_the_first_dimensions_only(layout: str) -> None:
    x = torch.randn(1, 2, 9, 16, dtype=torch.float64)
    turned = lg.Rotary(16, layout, rotary_dim=6).rotate(x, 3)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    torch.testing.assert_close(turned[..., :6], lg.Rotary(6, layout).rotate(x[..., :6], 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_turns_add_and_norms_stay(layout: str) -> None:
    rope, x = lg.Rotary(16, layout), torch.randn(1, 2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(rope.rotate(x, 1000).norm(dim=-1), x.norm(dim=-1))
    there = rope.rotate(rope.rotate(x, torch.full((9,), 40)), torch.full((9,), 2))
    torch.testing.assert_close(there, rope.rotate(x, torch.full((9,), 42)))
    assert torch.equal(rope.rotate(x, torch.zeros(9, dtype=torch.long)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_turns_written_out(layout: str) -> None:
    """q_i . k_j as a sum over pairs of cos and sin of (i - j) theta_k, in plain numpy."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8))
    i, j = 11, 4
    first = np.arange(0, 8, 2) if layout == "interleaved" else np.arange(4)
    second = first + (1 if layout == "interleaved" else 4)
    angle = (i - j) * 10_000.0 ** (-np.arange(4) / 4)
    dot, cross = q[first] * k[first] + q[second] * k[second], q[second] * k[first] - q[first] * k[second]
    want = (dot * np.cos(angle) - cross * np.sin(angle)).sum()
    rope = lg.Rotary(8, layout)
    turned_q, turned_k = rope.rotate_queries(torch.tensor(q)[None], i), rope.rotate_keys(torch.tensor(k)[None], j)
    assert float((turned_q * turned_k).sum()) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_far_angles(dtype: torch.dtype, base: float) -> None:
    """Within 1e-6 of float64 up to 131,071, whatever the model's dtype; and position 100,002 is not 100,003."""
    positions = torch.cat([torch.arange(0, 131_072, 997), torch.tensor([100_002, 100_003, 131_071])])
    rope = lg.Rotary(64, "half", base=base).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rope.prepare(positions, dtype=dtype)
    want = [[p * base ** (-2 * k / 64) for k in range(32)] for p in positions.tolist()]
    assert cos.dtype == sin.dtype == torch.promote_types(dtype, torch.float32)
    assert np.abs(cos.double().numpy() - np.cos(want)).max() <= 1e-6
    assert np.abs(sin.double().numpy() - np.sin(want)).max() <= 1e-6
    assert not torch.equal(cos[-3], cos[-2])


def test_float32_angles_repeat_the_rounding_of_ports() -> None:
    """angle_dtype="float32" is float32(position) * float32(frequency), off by more than 1e-4 at 131,071."""
    positions = torch.tensor([131_071])
    inverse = lg.rope_frequencies(64).inverse.float()
    cos, _ = lg.Rotary(64, "half", angle_dtype="float32").prepare(positions)
    assert torch.equal(cos, (positions[:, None].float() * inverse).cos())
    exact, _ = lg.Rotary(64, "half").prepare(positions)
    assert float((cos - exact).abs().max()) > 1e-4


def test_tables_of_rows_serve_all_heads() -> None:
    rope, x = lg.Rotary(8, "half"), torch.randn(2, 3, 5, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 20, 30]])
    rows = [rope.rotate(x[b], positions[b]) for b in range(2)]
    torch.testing.assert_close(rope.rotate(x, positions), torch.stack(rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(layout: str) -> None:
    """Views with odd strides and offsets, and their gradients."""
    base = torch.randn(3, 5, 2, 9, dtype=torch.float64, requires_grad=True)
    rope = lg.Rotary(8, layout)
    x = base[1:, :, :, 1:].transpose(1, 2)
    turned = rope.rotate(x, 4)
    torch.testing.assert_close(turned, rope.rotate(x.contiguous(), 4))
    weight = torch.randn_like(turned)
    (gradient,) = torch.autograd.grad((turned * weight).sum(), base)
    back = (rope.rotate(torch.eye(8, dtype=torch.float64).expand(5, 8, 8).transpose(0, 1), 4) * 1).transpose(0, 1)
    want = torch.einsum("bhlo,lio->bhli", weight, back)  # the turn of each unit vector, at each position
    torch.testing.assert_close(gradient[1:, :, :, 1:].transpose(1, 2), want)


WRONG = [
    (lambda: lg.Rotary(7, "half"), "even rotary_dim"),
    (lambda: lg.Rotary(8, "half", rotary_dim=10), "at most head_dim=8, got 10"),
    (lambda: lg.Rotary(8, "half", rotary_dim=0), "rotary_dim"),
    (lambda: lg.Rotary(8, "neox"), r"'half' \(GPT-NeoX, Llama\) or 'interleaved' \(paper, GPT-J\), got 'neox'"),
    (lambda: lg.Rotary(8, "half", angle_dtype="bfloat16"), "angle_dtype"),
    (lambda: lg.Rotary(8, "half", base=-1.0), "base"),
    (lambda: lg.encoding("rope", head_dim=8), "'rope' needs the option 'layout'"),
    (lambda: lg.Rotary(8, "half").rotate(torch.zeros(2, 6), 0), r"\[B, H, L, 8\]"),
    (lambda: lg.Rotary(8, "half").prepare(torch.tensor([1.5])), "integer positions"),
    (lambda: lg.Rotary(8, "half").prepare(torch.tensor([-3])), "got -3 .. -3"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_values_do_not_turn() -> None:
    """One key: the output is its value, wherever it stands."""
    q, k, v = torch.randn(3, 1, 2, 1, 8)
    torch.testing.assert_close(lg.attend(q, k, v, encoding=lg.Rotary(8, "half"), q_positions=77), v)


def test_first_angles_are_positions() -> None:
    """The fastest pair turns one radian per position."""
    cos, sin = lg.Rotary(8, "half").prepare(torch.arange(7), dtype=torch.float64)
    assert cos[:, 0].tolist() == pytest.approx([math.cos(p) for p in range(7)])
    assert sin[:, 0].tolist() == pytest.approx([math.sin(p) for p in range(7)])


def test_memory_that_no_complex_number_fits() -> None:
    """A slice at an odd place in memory turns as its copy does."""
    rope = lg.Rotary(4, "interleaved")
    for odd in (torch.arange(5.0).view(1, 1, 1, 5)[..., 1:], torch.arange(81.0)[1:].view(2, 2, 5, 4)):
        assert torch.equal(rope.rotate(odd, 3), rope.rotate(odd.clone(), 3))
