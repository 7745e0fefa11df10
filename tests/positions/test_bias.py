"""alibi and fire: slopes and biases against the papers, and against an independent port."""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import longitude as lg
from longitude.positions.bias import alibi_slopes

# Press et al. 2022, section 3, and the slopes of their code where the number of heads is no power of two.
SLOPES = {
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    3: [0.0625, 0.00390625, 0.25],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [
        0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
        0.70710678, 0.35355339, 0.17677670, 0.088388348,
    ],
    16: [2 ** (-h / 2) for h in range(1, 17)],
}  # fmt: skip


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(SLOPES[heads], rel=1e-7)
    assert lg.ALiBi(heads).slopes == alibi_slopes(heads)


def test_slopes_of_forty_heads() -> None:
    slopes = alibi_slopes(40)
    assert len(slopes) == 40
    assert slopes[31:34] == pytest.approx([0.00390625, 0.91700404, 0.77110541], rel=1e-8)
    assert slopes[0] == pytest.approx(2**-0.25) and slopes[39] == pytest.approx(2 ** (-0.125 * 15))


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 40])
def test_equals_bloom_below_the_diagonal(heads: int) -> None:
    """Bloom adds m j, which a causal softmax cannot tell from -m (i - j)."""
    theirs = build_alibi_tensor(torch.ones(1, 30), heads, torch.float32)[:, 0]
    ours = lg.ALiBi(heads).bias(torch.arange(30), torch.arange(30))
    for i in range(30):
        row = ours[:, i, : i + 1] - ours[:, i, :1]
        torch.testing.assert_close(row.float(), theirs[:, : i + 1], atol=1e-5, rtol=1e-6)


def test_alibi_bias_is_minus_slope_times_distance_both_ways() -> None:
    bias = lg.ALiBi(8).bias_at(torch.tensor([0, 1, 10, -10]))
    assert bias[0].tolist() == [0, -0.5, -5, -5]
    assert bias[7].tolist() == [0, -1 / 256, -10 / 256, -10 / 256]
    assert lg.ALiBi(2, slopes=[3, 0.5]).bias_at(2).tolist() == [-6, -1]


def test_alibi_far_neighbours_differ() -> None:
    """In a bfloat16 model too: the distance is never rounded to the model's dtype."""
    bias = lg.ALiBi(8).bfloat16().bias_at(torch.tensor([100_002, 100_003, 131_071]))
    assert bias.dtype == torch.float64
    assert bias[7].tolist() == [-100_002 / 256, -100_003 / 256, -131_071 / 256]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lg.ALiBi(0), "num_heads"),
        (lambda: lg.ALiBi(2.0), "num_heads"),
        (lambda: lg.ALiBi(4, slopes=[1.0, 2.0]), "num_heads=4 slopes, one per head, got 2"),
        (lambda: lg.ALiBi(2, slopes=[1.0, -2.0]), r"slopes\[1\] above 0, got -2.0"),
        (lambda: lg.Fire(4, c=0.0), "c above 0"),
        (lambda: lg.Fire(4, width=1.5), "width"),
        (lambda: lg.Fire(4).bias_at(3), "depends on both positions"),
    ],
)
def test_wrong_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- FIRE: Li et al. 2024, definition 3.2 and appendix C -----------------------------------------------------------------
def fire(a: float, b: float, **options) -> lg.Fire:
    """FIRE whose mlp is x -> a x + b, for x of 0 or more."""
    encoding = lg.Fire(1, width=1, **options).double()
    first, _, second = encoding.mlp
    with torch.no_grad():
        for p, value in ((first.weight, 1), (first.bias, 0), (second.weight, a), (second.bias, b)):
            p.fill_(value)
    return encoding


def test_fire_argument() -> None:
    share = fire(1, 0, c=0.1, threshold=512.0, eps=1e-12)
    got = share.bias(torch.tensor([10, 1000]), torch.tensor([4, 994]))
    assert got[0, 0, 0].item() == pytest.approx(0.1188354, abs=5e-8)  # below the threshold: ln 1.6 / ln 52.2
    assert got[0, 1, 1].item() == pytest.approx(0.1018399, abs=5e-8)  # beyond it: ln 1.6 / ln 101


def test_fire_row() -> None:
    row = fire(2, -1, c=0.1, threshold=8.0).bias(torch.tensor([2]), torch.arange(3))
    assert row[0, 0].tolist() == pytest.approx([-0.3796346, -0.6756986, -1.0], abs=1e-6)


def test_fire_argument_never_leaves_what_was_trained() -> None:
    share = fire(1, 0, threshold=16.0)
    for i in (3, 16, 50, 100_003):
        row = share.bias(torch.tensor([i]), torch.arange(0, i + 1, max(1, i // 7)))
        assert row.min() >= 0 and row.max() <= 1


def test_fire_starts_at_the_papers_numbers() -> None:
    encoding = lg.Fire(4)
    assert (encoding.c.item(), encoding.multiplier.item(), encoding.threshold) == (pytest.approx(0.1), 1.0, 512.0)
    assert [tuple(p.shape) for p in encoding.mlp.parameters()] == [(32, 1), (32,), (4, 32), (4,)]
    with torch.no_grad():
        encoding.c.fill_(-0.1)  # its sign does not matter: ln(|c x| + 1)
        flipped = encoding.bias(torch.arange(9), torch.arange(9))
        encoding.c.fill_(0.1)
        torch.testing.assert_close(encoding.bias(torch.arange(9), torch.arange(9)), flipped)


def test_fire_in_the_whole_formula() -> None:
    encoding = lg.testing.example("fire", threshold=5.0)()
    p = {name: x.detach() for name, x in encoding.named_parameters()}
    i, j = 9, 2

    def psi(x: float) -> float:
        return math.log(abs(p["c"].item() * x) + 1)

    share = psi(i - j) / (psi(max(i, abs(p["multiplier"].item() * 5))) + 1e-6)
    hidden = (p["mlp.0.weight"][:, 0] * share + p["mlp.0.bias"]).clamp(min=0)
    want = p["mlp.2.weight"] @ hidden + p["mlp.2.bias"]
    torch.testing.assert_close(encoding.bias(torch.tensor([i]), torch.tensor([j]))[:, 0, 0].detach(), want)
