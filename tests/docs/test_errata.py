"""docs/errata.md, lines on rotation and on what original sources disagree about: each has one test of the right value here,
through this library or plain arithmetic. The other lines: test_errata_scores.py."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longitude as lg
from longitude.positions.layouts import pair_order
from longitude.positions.scaling import NTK, Linear, LongRoPE, NTKByParts, YaRN
from tests.support import close, random as numbers


def inverse(scaling=None, dim: int = 64, **options) -> Tensor:
    return lg.rope_frequencies(dim, scaling=scaling, **options).inverse


def near(got, want, rel: float = 1e-6) -> None:
    got, want = (torch.as_tensor(each, dtype=torch.float64) for each in (got, want))
    close(got, want, 1e-9, rel)


def test_every_line_has_its_test() -> None:
    root = Path(__file__).parents[2]
    lines = [line for line in (root / "docs/errata.md").read_text().splitlines() if line.startswith("|")]
    rows = [line for line in lines if not line.startswith(("|---", "| claim |"))]
    named = [re.findall(r"`(test_\w+)`", line) for line in rows]
    assert len(rows) > 50 and all(len(names) == 1 for names in named)
    sources = [file.read_text() for file in sorted((root / "tests/docs").glob("test_errata*.py"))]
    tests = [name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)]
    tests.remove("test_every_line_has_its_test")
    assert sorted(names[0] for names in named) == sorted(tests)


# ---- rotation and its extension --------------------------------------------------------------------------------------
S = 5000 / 4096


def test_ntk_exponent() -> None:
    near(10_000 * S ** (64 / 62), 12_285.81)
    near(inverse(NTK(S)), inverse(base=12_285.81), 1e-5)
    near((inverse() / inverse(NTK(S)))[-1], S)  # the slowest pair reaches exactly so much further
    near((inverse() / inverse(base=10_000 * S ** (2 / 62)))[-1], 1.0062516)


def test_yarn_leaves_the_base() -> None:
    ratio = inverse(YaRN(4.0, 2048)) / inverse()
    assert bool((ratio[:9] == 1).all()) and bool((ratio[21:] == 0.25).all())
    by_base = inverse(NTK(4.0)) / inverse()
    assert bool((by_base[1:] < 1).all()) and by_base[20] > 0.3  # one base changes all pairs but the first


def test_yarn_temperature() -> None:
    near(lg.rope_frequencies(64, scaling=YaRN(4.0, 2048)).attention_factor, 1.1386294)
    assert lg.rope_frequencies(64, scaling=NTKByParts(4.0, 2048)).attention_factor == 1


def test_interpolation_keeps_fractions() -> None:
    p = torch.arange(5000)
    assert int(((p / S).floor().diff() == 0).sum()) == 904
    angle = p * inverse(Linear(S))[0]
    near(angle.diff(), torch.full((4999,), 1 / S), 1e-7)


def test_values_do_not_turn() -> None:
    q, k, v = numbers(3, 1, 2, 4, 8)
    out, weights = lg.attend(q, k, v, encoding=lg.Rotary(8, "half"), q_positions=7, k_positions=7, return_weights=True)
    near(out, weights @ v)


def test_rotation_blocks_absorption() -> None:
    """q' W_k c = (W_k' q)' c with no key ever built; with a rotation between, the absorbed matrix changes with the offset."""
    q, down, up, rope = numbers(8), numbers(5, 6), numbers(8, 5), lg.Rotary(8, "half")
    latent = down @ numbers(6)
    near(q @ (up @ latent), (up.T @ q) @ latent)
    rotated = [rope.rotate_keys(up.T, torch.full((5,), p)).T for p in (0, 3)]  # W_k rotated to key position p
    assert (rotated[0] - rotated[1]).abs().max() > 0.5


def test_two_layouts() -> None:
    x, y = numbers(2, 1, 6, 8)
    scores = [rope.rotate(x, 0) @ rope.rotate(y, 0).mT for rope in (lg.Rotary(8, "interleaved"), lg.Rotary(8, "half"))]
    assert (scores[0] - scores[1]).abs().max() > 0.5
    order, half = pair_order(8, to="half"), lg.Rotary(8, "half")
    near(half.rotate(x[..., order], 0) @ half.rotate(y[..., order], 0).mT, scores[0])


def test_tables_belong_to_a_layout() -> None:
    x, rope = numbers(1, 1, 50, 8), lg.Rotary(8, "interleaved")
    near(rope.rotate(x, 0).norm(dim=-1), x.norm(dim=-1))
    angles = torch.arange(50.0)[:, None] * inverse(dim=8)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))  # as the half layout writes them
    wrong = x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin
    assert (wrong.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max() > 0.1


def test_longrope_is_a_search() -> None:
    """Any list is a LongRoPE: those of other schemes are where the search begins. There are two, and a factor."""

    def long(factors: Tensor) -> LongRoPE:
        return LongRoPE([1.0] * 32, factors.tolist(), 4096, factor=8.0)

    for scheme in (Linear(8.0), NTK(8.0), YaRN(8.0, 4096)):
        near(inverse(long(inverse() / inverse(scheme)), length=4097), inverse(scheme), 1e-12)
        near(inverse(long(inverse() / inverse(scheme)), length=4096), inverse(), 1e-12)
    near(long(torch.ones(32)).factors()[0], 1.1180340)


def yarn_ratio() -> Tensor:
    return inverse(YaRN(8.0, 4096), 128) / inverse(dim=128)


def test_yarn_of_litgpt() -> None:
    ratio = yarn_ratio()
    near(ratio[[0, 63]], [1.0, 0.125])
    kept = (ratio - 0.125) / 0.875
    near((1 - kept + kept / 8)[[0, 63]], [0.125, 1.0])  # the ramp upside down


def test_yarn_of_levanter() -> None:
    ratio = yarn_ratio()
    near(ratio[[0, 63]], [1.0, 0.125])
    near((ratio / 8)[[0, 63]], [0.125, 0.015625])  # positions divided on top of the ramp
    near(YaRN(8.0, 4096).factors()[0], 1.2079442)
    near(math.sqrt(1.2079442), 1.0990651)


def test_yarn_upper_border() -> None:
    """Pairs 45 to 70 of 64: what is beyond the last pair still counts."""
    assert YaRN(8.0, 131_072).borders(128, 10_000.0) == (45, 70)
    last = (inverse(YaRN(8.0, 131_072), 128) / inverse(dim=128))[-1]
    near(last, 1 - 18 / 25 * 7 / 8)
    assert last > 0.3 > 1 / 8  # 1/8, were the border clamped to 63


def test_yarn_truncate_per_layer_type() -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    ropes = {"full_attention": yarn | {"truncate": False}, "sliding_attention": yarn | {"truncate": True}}
    size: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    config = Gemma3TextConfig(**size, layer_types=["full_attention", "sliding_attention"], rope_parameters=ropes)
    read = lg.from_hugging_face(config)
    assert isinstance(read, dict) and read["full_attention"] is not None
    full = lg.rope_frequencies(32, **read["full_attention"].options(32)).inverse
    theirs: Any = Gemma3RotaryEmbedding(config)
    near(full, inverse(YaRN(8.0, 64, truncate=False), 32))
    assert (theirs.full_attention_inv_freq / full - 1).abs().max() > 0.1
    near(theirs.full_attention_inv_freq, inverse(YaRN(8.0, 64), 32))


def test_text_after_a_video() -> None:
    published = lg.multimodal_positions([3, (10, 2, 2), 1])
    assert published[-2].tolist() == [12, 4, 4] and published[-1].tolist() == [13, 13, 13]
    assert lg.multimodal_positions([3, (10, 2, 2), 1], next_text="extent")[-1].tolist() == [5, 5, 5]


def test_xpos_has_no_centre() -> None:
    q, k, v = numbers(3, 1, 2, 40, 8)
    xpos = lg.XPos(8, "half", scale_base=16)
    whole = lg.attend(q, k, v, encoding=xpos)
    near(lg.attend(q[:, :, -1:], k, v, encoding=xpos), whole[:, :, -1:])
    zeta = (torch.arange(0, 8, 2) / 8 + 0.4) / 1.4
    inconsistent = zeta ** ((39 // 2 - 40 // 2) / 16)  # keys centred on one length, a query on the next
    assert (inconsistent - 1).abs().max() > 0.05


def test_positions_in_bfloat16() -> None:
    p = torch.arange(65_536)
    assert p.bfloat16().unique().numel() == 1281
    x = torch.ones(1, 1, 1, 8)
    rotated = [lg.Rotary(8, "half").rotate(x, torch.tensor([place])) for place in (40_000, 40_001)]
    assert torch.tensor([40_000]).bfloat16() == torch.tensor([40_001]).bfloat16()
    assert (rotated[0] - rotated[1]).abs().max() > 0.5


# ---- between original sources ----------------------------------------------------------------------------------------
def test_yarn_ramp() -> None:
    theta = inverse(dim=128)
    code, paper = (inverse(YaRN(16.0, 4096, ramp=ramp), 128) for ramp in ("dimensions", "rotations"))
    assert 0.36 < ((code - paper).abs() / theta / (1 - 1 / 16)).max() < 0.37
    near((code / paper)[33], 2.6, 0.02)


def test_sandwich_index() -> None:
    near([lg.Sandwich(8, index_start=start).bias_at(1)[0] for start in (1, 0)], [-1.446619, -1.906316])


def test_sinusoid_frequencies() -> None:
    slow = [lg.Sinusoidal(512, frequencies=name).table(torch.tensor(1))[-2] for name in ("paper", "tensor2tensor")]
    near(slow, [1.0366329e-4, 1.0e-4])


def test_retnet_angles() -> None:
    retnet = 10_000 ** -torch.linspace(0, 1, 32, dtype=torch.float64)
    near(retnet[[0, -1]], [1.0, 1e-4])
    near(inverse()[-1], 1.3335214e-4)


def test_window_size() -> None:
    seen = lg.Window(4).allowed(torch.arange(10), torch.arange(10)).sum(-1)
    assert seen.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_longrope_search_range() -> None:
    near([1.25 * 16, 1 + 16], [20, 17])
    theta = inverse(dim=4)
    for slowest in (20.0, 17.0):
        near(theta[1] / inverse(LongRoPE([1.0, 1.0], [1.0, slowest], 64, factor=16.0), 4)[1], slowest)
