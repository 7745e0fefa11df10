"""t5 and clipped: buckets against the published code's, and the order of rows."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import longitude as lg
from longitude.positions.bias import t5_bucket
from tests.support import refused_calls

# Raffel et al. 2020, section 2.1 with 32 buckets up to 128; relative = key - query -> bucket.
BIDIRECTIONAL = {
    -200: 15, -128: 15, -64: 14, -16: 10, -15: 9, -8: 8, -7: 7, -1: 1,
    0: 0, 1: 17, 7: 23, 8: 24, 16: 26, 64: 30, 128: 31,
}  # fmt: skip
CAUSAL = {-200: 31, -127: 31, -64: 26, -16: 16, -15: 15, -8: 8, 0: 0, 1: 0, 50: 0}


@pytest.mark.parametrize(("buckets", "bidirectional"), [(BIDIRECTIONAL, True), (CAUSAL, False)])
def test_published_buckets(buckets: dict[int, int], bidirectional: bool) -> None:
    offset = -torch.tensor(list(buckets))
    assert t5_bucket(offset, bidirectional=bidirectional).tolist() == list(buckets.values())


SHAPES = [(32, 128), (64, 1024), (32, 256), (128, 2048), (64, 128), (8, 20), (4, 3), (6, 10), (10, 37)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_buckets_equal_those_of_transformers(shape: tuple[int, int], bidirectional: bool) -> None:
    offset = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(-offset, bidirectional, *shape)
    assert torch.equal(t5_bucket(offset, *shape, bidirectional), theirs)


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "bidirectional", "want"),
    [
        (2, 2, False, [0, 0, 1, 1, 1]),  # the smallest: this token and the past
        (3, 2, False, [0, 0, 1, 2, 2]),
        (4, 2, True, [3, 2 + 1, 1, 1, 1]),
        (6, 4, True, [5, 4, 1, 2, 2]),  # halves of 3 buckets: 0, 1, and 2 from distance 2 on
    ],
)
def test_few_buckets_work(num_buckets: int, max_distance: int, bidirectional: bool, want: list[int]) -> None:
    encoding = lg.T5Bias(1, num_buckets, max_distance, bidirectional)
    with torch.no_grad():
        encoding.table[:, 0] = torch.arange(num_buckets)
    assert encoding.bias_at(torch.tensor([-4, -1, 1, 2, 4]))[0].tolist() == want
    assert encoding.bias_at(0).tolist() == [0]


def test_t5_bias_reads_its_table() -> None:
    """With the numbers of a T5 decoder by default: 32 buckets up to 128, for the past alone; small at first."""
    encoding = lg.T5Bias(4)
    assert encoding.table.shape == (32, 4)
    i, j = torch.arange(200, 210), torch.arange(210)
    want = encoding.table[t5_bucket(i[:, None] - j, 32, 128, bidirectional=False)]
    assert torch.equal(encoding.bias(i, j), want.movedim(-1, 0))
    start = lg.T5Bias(20_000).table.detach()
    assert float(start.mean()) == pytest.approx(0, abs=2e-4) and float(start.std()) == pytest.approx(0.02, rel=0.005)


def test_clipped_rows() -> None:
    """Row 0 is the far future, the last the far past; a listing's r_max = 3 is max_distance = 2."""
    encoding = lg.ClippedBias(1, max_distance=2)
    assert torch.equal(encoding.table, torch.zeros(1, 5))
    with torch.no_grad():
        encoding.table.copy_(torch.arange(5.0))
    assert encoding.bias(torch.arange(2), torch.arange(4))[0].tolist() == [[2, 1, 0, 0], [3, 2, 1, 0]]
    assert encoding.bias_at(torch.tensor([-131_071, -2, 0, 2, 131_071]))[0].tolist() == [0, 0, 2, 4, 4]
    assert lg.ClippedBias(4).table.shape == (4, 255)


test_wrong_options = refused_calls(
    [
        (lambda: lg.T5Bias(4, num_buckets=31, bidirectional=True), "T5", "31"),
        (lambda: lg.T5Bias(4, num_buckets=1), "num_buckets", "2"),
        (lambda: lg.T5Bias(4, num_buckets=32, max_distance=16), "max_distance", "16"),
        (lambda: lg.T5Bias(4, num_buckets=6, max_distance=1, bidirectional=True), "max_distance", "1", "num_buckets=6"),
    ]
)
