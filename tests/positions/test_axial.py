"""axial_rope and mrope: published numbers, tables and positions of two published models, and several coordinates per token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import longitude as lg
from longitude.positions.multimodal import multimodal_positions
from longitude.positions.rotary import AxialRotary, MultimodalRotary
from tests.support import refused_calls

LAYOUTS = ("half", "interleaved")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rotary.json").read_text())


def angles_of(rope: lg.Rotary, *coordinates: int) -> list[float]:
    """The angles at one position: below pi, or by a table less."""
    cos, sin = rope.prepare(torch.tensor([coordinates]), dtype=torch.float64)
    return torch.atan2(sin, cos)[0].tolist()


# ---- axial -----------------------------------------------------------------------------------------------------------
# Qwen2-VL's vision tower: d = 16, phi = 1, 0.1, 0.01, 0.001, (h, w) = (2, 5).
@pytest.mark.parametrize("layout", LAYOUTS)
def test_axial_golden(layout: str) -> None:
    want = [2, 0.2, 0.02, 0.002, 5 - 2 * np.pi, 0.5, 0.05, 0.005]
    assert angles_of(AxialRotary(16, layout), 2, 5) == pytest.approx(want, abs=1e-12)
    three = AxialRotary(12, layout, axes=3, base=100.0)  # phi = 1, 0.1
    assert angles_of(three, 1, 2, 3) == pytest.approx([1, 0.1, 2, 0.2, 3, 0.3], abs=1e-12)
    assert (three.axes, AxialRotary(16, layout).axes, lg.Rotary.axes) == (3, 2, 1)
    assert "axes=3" in repr(three)
    assert (three.softmax_factor, three.stable_keys, three.length_at(3, 9)) == (1.0, True, None)
    cos, sin = three.prepare(torch.tensor([[1, 2, 3]]), dtype=torch.float64)
    torch.testing.assert_close(torch.hypot(cos, sin), torch.ones(1, 6, dtype=torch.float64), atol=1e-15, rtol=0)


def test_axial_equals_the_vision_tower_of_qwen2_vl() -> None:
    row = GOLDEN["axial"]
    x, positions, want = (torch.tensor(row[name]) for name in ("x", "positions", "turned"))
    x, want = x.transpose(0, 1)[None], want.transpose(0, 1)[None]
    rope = AxialRotary(16, "half")
    torch.testing.assert_close(rope.rotate_queries(x, positions), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(rope.rotate_keys(x, positions[None]), want, atol=1e-5, rtol=0)
    rounded = AxialRotary(16, "half", angle_dtype="float32")
    torch.testing.assert_close(rounded.rotate(x, positions), want, atol=1e-6, rtol=0)
    phi = 1.0 / 10_000.0 ** (torch.arange(0, 8, 2).float() / 8)
    assert torch.equal(rounded.prepare(positions).cos, (positions[:, :, None] * phi).cos().flatten(1))


@pytest.mark.parametrize("make", [AxialRotary, MultimodalRotary])
def test_shapes_of_positions(make) -> None:
    """[L], [B, L] and [B, L, 1] stand on the diagonal; [L, axes] and [B, L, axes] say each coordinate."""
    rope, x = make(24, "half"), torch.randn(2, 3, 5, 24)
    n = rope.axes
    line = torch.arange(5) + torch.tensor([[0], [40]])
    diagonal = line[..., None].expand(2, 5, n)
    want = rope.rotate(x, diagonal)
    assert rope.prepare(diagonal).cos.shape == (2, 1, 5, 12)
    assert rope.prepare(line).cos.shape == (2, 1, 5, 12)
    assert rope.prepare(line[0]).cos.shape == rope.prepare(diagonal[0]).cos.shape == (5, 12)
    assert torch.equal(rope.rotate(x, line), want)
    assert torch.equal(rope.rotate(x, line[..., None]), want)
    assert torch.equal(rope.rotate(x[:1], line[0]), want[:1])
    assert torch.equal(rope.rotate(x[:1], diagonal[0]), want[:1])
    assert torch.equal(rope.rotate(x[:1], 0), want[:1])
    grid = torch.stack([line + 7 * axis for axis in range(n)], -1)
    rows = torch.cat([rope.rotate(x[b : b + 1], grid[b]) for b in range(2)])
    torch.testing.assert_close(rope.rotate(x, grid), rows, atol=0, rtol=0)
    assert not torch.allclose(rows, want, atol=0.1)
    for wrong in ([2, 5, n + 1], [2, 5, n - 1], [2, 5, n, 1], []):
        if wrong[-1:] != [1] or len(wrong) == 4:
            with pytest.raises(
                ValueError, match=rf"{rope.registered_name}: expected positions \[L\], \[B, L\] or \[B, L, {n}\]"
            ):
                rope.prepare(torch.zeros(wrong, dtype=torch.long))


# ---- multimodal ------------------------------------------------------------------------------------------------------
ROWS = [row for row in GOLDEN["multimodal"] if (row["source"], row["sections"]) != ("qwen3", [2, 3, 3])]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['source']}-{row['sections']}")
def test_tables_equal_those_of_published_models(row: dict) -> None:
    arrangement = {"qwen2": "contiguous", "qwen3": "interleaved"}[row["source"]]
    sections, positions = row["sections"], torch.tensor(row["positions"])
    options = {"base": row["base"], "sections": sections, "arrangement": arrangement}
    cos, sin = torch.tensor(row["cos"]), torch.tensor(row["sin"])
    table = MultimodalRotary(2 * sum(sections), "half", **options).prepare(positions)
    torch.testing.assert_close(table.cos, cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(table.sin, sin, atol=1e-4, rtol=0)
    rounded = MultimodalRotary(2 * sum(sections), "half", **options, angle_dtype="float32").prepare(positions)
    torch.testing.assert_close(rounded.cos, cos, atol=2e-7, rtol=0)
    torch.testing.assert_close(rounded.sin, sin, atol=2e-7, rtol=0)


def test_default_sections_are_the_published_ones() -> None:
    """Qwen2-VL 16:24:24 of 64 pairs; Qwen3-VL 24:20:20. Time takes what division leaves."""
    kinds = {
        "contiguous": {128: (16, 24, 24), 32: (4, 6, 6), 24: (4, 4, 4), 8: (2, 1, 1), 2: (1, 0, 0)},
        "interleaved": {128: (24, 20, 20), 32: (6, 5, 5), 24: (6, 3, 3), 8: (2, 1, 1), 2: (1, 0, 0)},
    }
    for arrangement, wanted in kinds.items():
        for head_dim, sections in wanted.items():
            assert MultimodalRotary(head_dim, "half", arrangement=arrangement).sections == sections
    assert MultimodalRotary(64, "half", rotary_dim=32).sections == (4, 6, 6)


def test_which_axis_pairs_read() -> None:
    rope = MultimodalRotary(16, "half", sections=[2, 3, 3])
    assert list(rope.axis_of_pair) == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = MultimodalRotary(16, "half", sections=(3, 3, 2), arrangement="interleaved")
    assert list(interleaved.axis_of_pair) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert list(MultimodalRotary(16, "half", arrangement="interleaved").axis_of_pair) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert angles_of(MultimodalRotary(6, "half", base=1000.0, sections=[1, 1, 1]), 1, 2, 30) == pytest.approx(
        [1, 0.2, 0.3]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ["contiguous", "interleaved"])
def test_text_is_rope_to_the_bit(arrangement: str, layout: str) -> None:
    x = torch.randn(1, 2, 9, 32)
    for options in ({}, {"rotary_dim": 16, "base": 500.0}, {"scaling": {"name": "linear", "factor": 2.0}}):
        rope = lg.Rotary(32, layout, **options)
        mrope = MultimodalRotary(32, layout, arrangement=arrangement, **options)
        want = rope.rotate(x, 1000)
        assert torch.equal(mrope.rotate(x, 1000), want)
        assert torch.equal(mrope.rotate(x, torch.arange(1000, 1009)[:, None].expand(-1, 3)), want)


# ---- where tokens stand ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", GOLDEN["streams"], ids=lambda row: f"{row['source']}-{row['segments']}")
def test_positions_equal_those_of_transformers(row: dict) -> None:
    """It advances by the extent of a grid; the published rule agrees while no video has more frames than that."""
    segments, want = row["segments"], torch.tensor(row["positions"]).T
    got = multimodal_positions(segments, next_text="extent")
    assert torch.equal(got, want)
    assert int(got.max()) + 1 - len(got) == row["delta"]
    short = all(isinstance(s, int) or s[0] <= max(s[1:]) for s in segments)
    assert torch.equal(multimodal_positions(segments), want) == short


def test_positions() -> None:
    """An image from 3, text after it at 5; after a video of 10 frames from 3, text at 13, by the rule of extent at 5."""
    image = multimodal_positions([3, (1, 2, 3), 2])
    assert image.tolist() == [
        *([n, n, n] for n in range(3)),
        *([3, 3 + row, 3 + column] for row in range(2) for column in range(3)),
        *([n, n, n] for n in (6, 7)),
    ]
    assert image.dtype == torch.int64
    video = multimodal_positions([3, (10, 2, 2), 2])
    assert video[3:43].tolist() == [[3 + t, 3 + h, 3 + w] for t in range(10) for h in range(2) for w in range(2)]
    assert video[43:].tolist() == [[13] * 3, [14] * 3]
    assert multimodal_positions([3, (10, 2, 2), 2], next_text="max").tolist() == video.tolist()
    extent = multimodal_positions([3, (10, 2, 2), 2], next_text="extent")
    assert torch.equal(extent[:43], video[:43])
    assert extent[43:].tolist() == [[5] * 3, [6] * 3]
    tall = multimodal_positions([(1, 5, 2), (1, 2, 4), 1], next_text="extent")
    assert tall[-1].tolist() == [9, 9, 9]
    assert multimodal_positions([]).shape == (0, 3)
    assert multimodal_positions([4]).tolist() == [[n] * 3 for n in range(4)]


WRONG = [
    (lambda: AxialRotary(14, "half"), "axial_rope: expected head_dim to be a multiple of 4, .* got 14"),
    (lambda: AxialRotary(8, "half", axes=3), "multiple of 6"),
    (lambda: AxialRotary(8, "half", axes=0), "axial_rope: expected axes to be an int of 1 or more, got 0"),
    (lambda: AxialRotary(0, "half"), "axial_rope: expected head_dim to be an int of 1 or more, got 0"),
    (lambda: AxialRotary(8, "neox"), "axial_rope: expected layout"),
    (lambda: AxialRotary(8, "half", angle_dtype="float16"), "axial_rope: expected angle_dtype"),
    (lambda: AxialRotary(8, "half", base=0.0), "base"),
    (lambda: AxialRotary(8, "half").prepare(torch.tensor([[1, -1]])), "axial_rope: .* got -1 .. 1"),
    (lambda: AxialRotary(8, "half").prepare(torch.tensor([[1.0, 1.0]])), "axial_rope: expected integer positions"),
    (lambda: AxialRotary(8, "half").rotate(torch.zeros(2, 6), 0), r"axial_rope: expected \[B, H, L, 8\]"),
    (lambda: MultimodalRotary(16, "half", sections=[2, 3, 4]), r"mrope: .* sum to rotary_dim/2 = 8, got \[2, 3, 4\]"),
    (lambda: MultimodalRotary(16, "half", sections=[4, 4]), "time, height and width"),
    (lambda: MultimodalRotary(16, "half", sections=[9, 0, -1]), r"sum to rotary_dim/2 = 8, got \[9, 0, -1\]"),
    (lambda: MultimodalRotary(16, "half", sections=[4.0, 2, 2]), "sections"),
    (lambda: MultimodalRotary(16, "half", sections=[2, 3, 3], arrangement="interleaved"), r"read \(3, 3, 2\)"),
    (lambda: MultimodalRotary(16, "half", arrangement="mixed"), "'contiguous' or 'interleaved', got 'mixed'"),
    (lambda: MultimodalRotary(16, "half", rotary_dim=7), "even rotary_dim"),
    (lambda: MultimodalRotary(16, "full"), "mrope: expected layout"),
    (lambda: multimodal_positions([3, (1, 2), 2]), r"\(frames, height, width\), .* got \(1, 2\)"),
    (lambda: multimodal_positions([0]), "1 or more, got 0"),
    (lambda: multimodal_positions([True]), "got True"),
    (lambda: multimodal_positions([2.5]), "got 2.5"),
    (lambda: multimodal_positions([(1, 2, 0)]), r"got \(1, 2, 0\)"),
    (lambda: multimodal_positions([3], next_text="last"), "next_text 'max' or 'extent', got 'last'"),
]


test_wrong_options = refused_calls(WRONG)
