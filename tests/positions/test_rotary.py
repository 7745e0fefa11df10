"""rope: published numbers, the two layouts against four independent ports, far angles, and what scaling does to it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import longitude as lg
from longitude.positions.rotation import as_pairs
from longitude.positions.scaling import from_dict
from tests.support import refused_calls

LAYOUTS = ("half", "interleaved")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rotary.json").read_text())


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
    rotated = lg.Rotary(4, layout).rotate(torch.tensor([x], dtype=torch.float64), 2)
    torch.testing.assert_close(rotated[0], torch.tensor(want, dtype=torch.float64), atol=5e-8, rtol=0)


@pytest.mark.parametrize("row", GOLDEN["turned"], ids=lambda row: row["source"])
def test_rotations_equal_those_of_other_libraries(row: dict) -> None:
    x, want = torch.tensor(row["x"]), torch.tensor(row["turned"])
    rope = lg.Rotary(x.shape[-1], row["layout"])
    for rotate in (rope.rotate_queries, rope.rotate_keys):
        torch.testing.assert_close(rotate(x, 0), want, atol=2e-6, rtol=0)
    other = lg.Rotary(x.shape[-1], LAYOUTS[row["layout"] == "half"])
    assert float((other.rotate(x, 0) - want).abs().max()) > 0.5


@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_float32_angles_equal_llama_to_the_bit(base: float, dim: int) -> None:
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_theta=base)
    positions = torch.tensor([[0, 1, 2, 77, 4095, 131_071]])
    cos, sin = (t[0, :, : dim // 2] for t in LlamaRotaryEmbedding(config)(torch.zeros(1), positions))
    assert config.rope_parameters["rope_theta"] == base
    table = lg.Rotary(dim, "half", base=base, angle_dtype="float32").prepare(positions[0])
    assert torch.equal(table.cos, cos)
    assert torch.equal(table.sin, sin)
    exact = lg.Rotary(dim, "half", base=base).prepare(positions[0])
    assert 1e-4 < float((table.cos - exact.cos).abs().max()) < 0.1  # what that rounding costs at 131,071


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_layouts_are_permutations_of_each_other(rotary_dim: int) -> None:
    """half(x[perm]) = interleaved(x)[perm]: conversion of a checkpoint reorders rows inside each head."""
    perm = torch.cat([torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, 16)])
    x = torch.randn(2, 3, 20, 16, dtype=torch.float64)
    half, interleaved = (lg.Rotary(16, layout, rotary_dim=rotary_dim) for layout in LAYOUTS)
    torch.testing.assert_close(half.rotate(x[..., perm], 5), interleaved.rotate(x, 5)[..., perm], atol=1e-14, rtol=0)
    assert not torch.allclose(half.rotate(x, 5), interleaved.rotate(x, 5), atol=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotates_the_first_dimensions_only(layout: str) -> None:
    x = torch.randn(1, 2, 9, 16, dtype=torch.float64)
    rotated = lg.Rotary(16, layout, rotary_dim=6).rotate(x, 3)
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    torch.testing.assert_close(rotated[..., :6], lg.Rotary(6, layout).rotate(x[..., :6], 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotations_add_and_norms_stay(layout: str) -> None:
    rope, x = lg.Rotary(16, layout), torch.randn(1, 2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(rope.rotate(x, 1000).norm(dim=-1), x.norm(dim=-1))
    there = rope.rotate(rope.rotate(x, torch.full((9,), 40)), torch.full((9,), 2))
    torch.testing.assert_close(there, rope.rotate(x, torch.full((9,), 42)))
    assert torch.equal(rope.rotate(x, torch.zeros(9, dtype=torch.long)), x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # the dtype stays as well
        assert rope.rotate(x.to(dtype), 3).dtype == dtype


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


def test_tables_of_rows_serve_all_heads() -> None:
    one_each = torch.tensor([[3], [40]])  # two rows of one token, as in decoding
    cos, _ = lg.Rotary(8, "half").prepare(one_each)
    assert torch.equal(cos, lg.Rotary(8, "half").prepare(one_each[:, 0]).cos.view(2, 1, 1, 4))
    rope, x = lg.Rotary(8, "half"), torch.randn(2, 3, 5, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 20, 30]])
    rows = [rope.rotate(x[b], positions[b]) for b in range(2)]
    torch.testing.assert_close(rope.rotate(x, positions), torch.stack(rows))


# ---- p-RoPE ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("angle_dtype", ["float64", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_proportion_of_pairs_rotates(layout: str, angle_dtype: str) -> None:
    """d = 16, p = 0.75: six pairs of rope's own frequencies, two that stand. Partial rotary has six others."""
    x, plain = torch.randn(3, 16, dtype=torch.float64), lg.Rotary(16, layout, angle_dtype=angle_dtype)
    part = lg.Rotary(16, layout, proportion=0.75, angle_dtype=angle_dtype)
    theta, want = part.frequencies().inverse, plain.frequencies().inverse
    assert torch.equal(theta, torch.cat([want[:6], want[6:] * 0]))
    assert float(want[5]) == pytest.approx(10_000 ** (-10 / 16))
    assert lg.Rotary(16, layout, rotary_dim=12).frequencies().inverse[5] != want[5]
    fixed = [6, 7, 14, 15] if layout == "half" else [12, 13, 14, 15]
    assert torch.equal(part.rotate(x, 9)[:, fixed], x[:, fixed])
    rotating = [d for d in range(16) if d not in fixed]
    torch.testing.assert_close(part.rotate(x, 9)[:, rotating], plain.rotate(x, 9)[:, rotating], atol=0, rtol=0)
    assert torch.equal(lg.Rotary(16, layout, proportion=1.0).rotate(x, 9), lg.Rotary(16, layout).rotate(x, 9))
    assert torch.equal(lg.Rotary(16, layout, proportion=0.0).rotate(x, 9), x)


# ---- scaling ---------------------------------------------------------------------------------------------------------
def test_scaling_changes_the_frequencies() -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    spec = {"name": "linear", "factor": 4.0}
    scaled = lg.Rotary(16, "half", base=500.0, rotary_dim=8, scaling=spec)
    positions = torch.arange(5)
    want = lg.Rotary(16, "half", base=500.0, rotary_dim=8).rotate(x, positions)
    torch.testing.assert_close(scaled.rotate(x, 4 * positions), want, atol=1e-14, rtol=0)
    as_object = lg.Rotary(16, "half", base=500.0, rotary_dim=8, scaling=from_dict(spec))
    assert torch.equal(as_object.rotate(x, 7), scaled.rotate(x, 7))
    rounded = lg.Rotary(16, "half", scaling=spec, angle_dtype="float32").prepare(torch.tensor([400]))
    unscaled = lg.Rotary(16, "half", angle_dtype="float32").prepare(torch.tensor([100]))
    torch.testing.assert_close(rounded.cos, unscaled.cos, atol=2e-5, rtol=0)
    assert scaled.softmax_factor == 1.0
    assert scaled.stable_keys
    assert scaled.length_at(3, 9) is None
    assert "rotary_dim=8" in repr(scaled)
    assert "factor=4.0" in repr(scaled)
    assert "scaling" not in repr(lg.Rotary(16, "half"))


def test_factors_of_scaling() -> None:
    """YaRN, s = 40: cos and sin times 0.1 ln 40 + 1 = 1.3688879; DeepSeek-V2's g(0.707)^2 = 1.5896262 for the scores."""
    yarn = {"name": "yarn", "factor": 40.0, "original_max_length": 4096}
    rope, positions = lg.Rotary(16, "half", scaling=yarn), torch.arange(20)
    cos, sin = rope.prepare(positions)
    torch.testing.assert_close(torch.hypot(cos, sin), torch.full((20, 8), 1.3688879), atol=1e-6, rtol=0)
    assert (rope.softmax_factor, lg.Rotary.softmax_factor) == (1.0, 1.0)
    deepseek = lg.Rotary(16, "half", scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 0.707})
    assert deepseek.softmax_factor == pytest.approx(1.5896262, abs=1e-7)
    torch.testing.assert_close(deepseek.prepare(positions).cos, cos / 1.3688879, atol=1e-6, rtol=0)
    torch.testing.assert_close(deepseek.prepare(positions).sin, sin / 1.3688879, atol=1e-6, rtol=0)


def test_scaling_that_follows_the_length() -> None:
    spec = {"name": "dynamic_ntk", "factor": 2.0, "original_max_length": 16, "max_length": 64}
    positions = torch.arange(40)
    for follow, lengths in (("row", (16, 40)), ("sequence", (40, 40))):
        rope = lg.Rotary(8, "half", scaling={**spec, "follow": follow})
        assert not rope.stable_keys
        assert (rope.length_at(3, 39), rope.length_at(39, 39)) == lengths
        assert rope.length_at(torch.tensor([3, 39]), torch.tensor([39, 39])).tolist() == list(lengths)
        assert torch.equal(rope.prepare(positions, 16).cos, lg.Rotary(8, "half").prepare(positions).cos)
        base = 10_000.0 * (2 * 40 / 16 - 1) ** (8 / 6)
        want = lg.Rotary(8, "half", base=base).prepare(positions).cos
        torch.testing.assert_close(rope.prepare(positions, 40).cos, want, atol=1e-7, rtol=0)
    declared = lg.Rotary(8, "half", scaling=spec)
    assert declared.stable_keys
    assert declared.length_at(3, 39) is None
    want = lg.Rotary(8, "half", base=10_000.0 * 7 ** (8 / 6)).prepare(positions).cos
    torch.testing.assert_close(declared.prepare(positions).cos, want, atol=1e-7, rtol=0)


# ---- what is refused -------------------------------------------------------------------------------------------------
WRONG = [
    (lambda: lg.Rotary(7, "half"), "even rotary_dim"),
    (lambda: lg.Rotary(8, "half", rotary_dim=10), "at most head_dim=8, got 10"),
    (lambda: lg.Rotary(8, "half", rotary_dim=0), "rotary_dim"),
    (lambda: lg.Rotary(8, "neox"), r"'half' \(GPT-NeoX, Llama\) or 'interleaved' \(GPT-J\), got 'neox'"),
    (lambda: lg.Rotary(8, "half", angle_dtype="bfloat16"), "angle_dtype"),
    (lambda: lg.Rotary(8, "half", base=-1.0), "base"),
    (lambda: lg.encoding("rope", head_dim=8), "'rope' needs the option 'layout'"),
    (lambda: lg.Rotary(8, "half", proportion=1.5), "proportion from 0 to 1"),
    (lambda: lg.Rotary(8, "half", scaling={"name": "yarm"}), "did you mean 'yarn'"),
    (lambda: lg.Rotary(8, "half", scaling="yarn"), "expected a scheme"),
    (lambda: lg.Rotary(8, "half").rotate(torch.zeros(2, 6), 0), r"rope: expected \[B, H, L, 8\], got \[1, 1, 2, 6\]"),
    (lambda: lg.Rotary(8, "half").prepare(torch.tensor(3)), r"rope: expected positions \[L\], \[B, L\] .* got \[\]"),
    (lambda: lg.Rotary(8, "half").prepare(torch.zeros(2, 3, 2, dtype=torch.long)), r"\[B, L\].* got \[2, 3, 2\]"),
    (lambda: lg.Rotary(8, "half").prepare(torch.tensor([1.5])), "integer positions"),
    (lambda: lg.Rotary(8, "half").prepare(torch.tensor([-3])), "got -3 .. -3"),
]


test_wrong_options = refused_calls(WRONG)


def test_values_are_not_rotated() -> None:
    """One key: the output is its value, wherever it stands."""
    q, k, v = torch.randn(3, 1, 2, 1, 8)
    torch.testing.assert_close(lg.attend(q, k, v, encoding=lg.Rotary(8, "half"), q_positions=77), v)


def test_defaults() -> None:
    """Su et al. 2021: all dimensions, base 10,000; the layout of a model of our own is the paper's, of checkpoints none."""
    rope = lg.Rotary(8, "half")
    assert (rope.base, rope.rotary_dim, rope.scaling, rope.proportion) == (10_000.0, 8, None, 1.0)
    assert (rope.angle_dtype, rope.softmax_factor, rope.axes, rope.shared) == ("float64", 1.0, 1, True)
    assert (rope.relative, rope.stable_keys, rope.length_at(3, 9)) == (True, True, None)
    for kind in (lg.Rotary, lg.AxialRotary, lg.MultimodalRotary, lg.XPos):
        assert kind.model_defaults == {"layout": "interleaved"}


def test_memory_that_reads_as_complex_numbers_is_not_copied() -> None:
    whole = torch.randn(4, 6, 8)
    for readable in (whole, whole[1:], whole.transpose(0, 1), whole[..., 2:6], whole[:, ::2]):
        assert as_pairs(readable) is readable
    for odd in (
        whole[..., 1:5],
        torch.randn(3, 4, 7)[..., :6],
        torch.randn(6, 4).T,
        whole[..., ::2],
        whole.permute(1, 2, 0),
    ):
        copy = as_pairs(odd)
        assert torch.equal(copy, odd)
        pairs = torch.view_as_complex(copy.unflatten(-1, (-1, 2)))
        assert torch.equal(torch.view_as_real(pairs).flatten(-2), odd)
