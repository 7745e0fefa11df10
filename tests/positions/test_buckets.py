"""t5 and clipped: buckets against the published code's, and the order of rows."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import longitude as lg
from longitude.positions.buckets import t5_bucket

# Raffel et al. 2020, section 2.1 with 32 buckets up to 128; relative = key - query -> bucket.
BIDIRECTIONAL = {
    -200: 15, -128: 15, -64: 14, -16: 10, -15: 9, -8: 8, -7: 7, -1: 1,
    0: 0, 1: 17, 7: 23, 8: 24, 16: 26, 64: 30, 128: 31,
}  # fmt: skip
CAUSAL = {-200: 31, -127: 31, -64: 26, -16: 16, -15: 15, -8: 8, 0: 0, 1: 0, 50: 0}


@pytest.mark.parametrize(("golden", "bidirectional"), [(BIDIRECTIONAL, True), (CAUSAL, False)])
def test_golden_buckets(golden: dict[int, int], bidirectional: bool) -> None:
    offset = -torch.tensor(list(golden))
    assert t5_bucket(offset, bidirectional=bidirectional).tolist() == list(golden.values())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("shape", [(32, 128), (64, 1024), (32, 256), (128, 2048), (64, 128), (8, 20), (4, 3), (10, 37)])
def test_buckets_equal_transformers(shape: tuple[int, int], bidirectional: bool) -> None:
    offset = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(-offset, bidirectional, *shape)
    assert torch.equal(t5_bucket(offset, *shape, bidirectional), theirs)


def test_buckets_grow_with_distance_and_mirror() -> None:
    past = t5_bucket(torch.arange(0, 100_000, 7), bidirectional=True)
    assert bool((past[1:] >= past[:-1]).all()) and past.max() == 15
    future = t5_bucket(-torch.arange(7, 100_000, 7), bidirectional=True)
    assert torch.equal(future, past[1:] + 16)  # so bucket 16 is never used


def test_t5_bias_reads_its_table() -> None:
    encoding = lg.T5Bias(4)
    assert encoding.table.shape == (32, 4)
    bias = encoding.bias(torch.arange(200, 210), torch.arange(210))
    assert bias.shape == (4, 10, 210)
    for i, j in ((200, 0), (205, 205), (203, 209), (209, 190)):
        bucket = T5Attention._relative_position_bucket(torch.tensor(j - i), False, 32, 128)
        assert torch.equal(bias[:, i - 200, j], encoding.table[bucket])


def test_clipped_rows() -> None:
    """Row 0 is the far future, the last the far past; a listing's r_max = 3 is max_distance = 2."""
    encoding = lg.ClippedBias(1, max_distance=2)
    assert torch.equal(encoding.table, torch.zeros(1, 5))
    with torch.no_grad():
        encoding.table.copy_(torch.arange(5.0))
    assert encoding.bias(torch.arange(2), torch.arange(4))[0].tolist() == [[2, 1, 0, 0], [3, 2, 1, 0]]
    assert encoding.bias_at(torch.tensor([-131_071, -2, 0, 2, 131_071]))[0].tolist() == [0, 0, 2, 4, 4]
    assert lg.ClippedBias(4).table.shape == (4, 255)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lg.T5Bias(4, num_buckets=31, bidirectional=True), "even if bidirectional, got 31"),
        (lambda: lg.T5Bias(4, num_buckets=1), "num_buckets of 2 or more"),
        (lambda: lg.T5Bias(4, num_buckets=2, bidirectional=True), "num_buckets of 4 or more"),
        (lambda: lg.T5Bias(4, num_buckets=32, max_distance=16), "max_distance above 16"),
        (lambda: lg.T5Bias(0), "num_heads"),
        (lambda: lg.ClippedBias(4, max_distance=0), "max_distance"),
        (lambda: lg.ClippedBias(4, max_distance=1.5), "max_distance"),
    ],
)
def test_wrong_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
