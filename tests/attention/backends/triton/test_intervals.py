"""Masks as intervals of keys: the same pairs as `allowed`, ends that never fall, and blocks found from them."""

import random

import pytest
import torch

import longitude as lg
from longitude.attention.backends.triton import intervals
from longitude.attention.backends.triton.intervals import intervals_of, refusal
from longitude.attention.masks import Band, Prefix
from longitude.attention.request import Request
from tests.support import Reads


def request(mask, rows, keys, batch=2):
    q, k = torch.zeros(batch, 1, rows, 1), torch.zeros(batch, 1, keys, 1)
    return Request(q, k, k, (), mask, 0, 0, 1.0, q_order=keys - rows)


def joined_masks(draw):
    """A joined mask of 2 sequences of 1 to 40 tokens, and how many of them are queries."""
    keys = draw.randint(1, 40)
    rows, token, mask = draw.choice([keys, draw.randint(1, keys)]), torch.arange(keys), lg.NoMask()

    def sequences(make):
        """For both sequences, or one for each."""
        return torch.stack([make() for _ in range(draw.randint(1, 2))])

    def within():
        first, last = draw.randint(0, keys), draw.randint(0, keys)
        return (token >= first) & (token < last)

    bands = [lg.Causal(), lg.Window(1), lg.Window(7), Band(3, 5), Band(0, 0) & lg.Causal(), Band(9, 40)]
    if draw.random() < 0.5:
        mask = mask & draw.choice(bands)
    if draw.random() < 0.5:
        often = draw.choice([0.1, 0.5])
        mask = mask & lg.Documents(sequences(lambda: torch.tensor([draw.random() < often for _ in token])).cumsum(1))
    if draw.random() < 0.5:
        mask = mask & lg.Padding(sequences(within))
    if rows == keys and draw.random() < 0.5:
        lengths = [draw.randint(0, keys + 3) for _ in range(2)]
        mask = mask & Prefix(draw.choice([lengths[0], torch.tensor(lengths)]))
    return mask, rows, keys


@pytest.mark.parametrize("block", [1, 4, 16])
def test_they_are_the_mask(block):
    draw = random.Random(block)
    for _ in range(100):
        require_the_mask(*joined_masks(draw), block)


def require_the_mask(mask, rows, keys, block):
    r = request(mask, rows, keys)
    assert refusal(r) is None
    ends = intervals_of(r)
    lo, hi = (x[..., None] for x in ends)
    key = torch.arange(keys)
    seen = (lo <= key) & (key < hi)
    assert torch.equal(seen.expand(2, rows, keys), r.allowed().expand(2, 1, rows, keys)[:, 0])
    assert (lo.diff(dim=1) >= 0).all() and (hi.diff(dim=1) >= 0).all() and (lo <= hi).all()

    bounds = ends.first_queries(keys, block).long()
    row = torch.arange(rows)[:, None]
    for n, start in enumerate(range(0, keys, block)):
        of_block = seen[..., start : start + block]
        first, full, rest, last = bounds[:, :, n].T[..., None, None]
        assert not (of_block & ((row < first) | (row >= last))).any(), "a query outside attends to one of the keys"
        assert of_block.all(-1, keepdim=True)[((row >= full) & (row < rest)).expand(len(seen), rows, 1)].all()


def test_another_stream_has_its_own(monkeypatch):
    """It may not be made yet where another stream goes on; and what a CUDA graph makes is the graph's."""
    r = request(lg.Causal(), 8, 8)
    first = intervals_of(r)
    assert intervals_of(r) is first
    monkeypatch.setattr(intervals, "stream_of", lambda device: 7)
    other = intervals_of(r)
    assert other is not first and intervals_of(r) is other
    monkeypatch.setattr(intervals, "captured", lambda device: True)
    assert intervals_of(r) is not other and intervals_of(r) is not intervals_of(r)
    assert all(torch.equal(a, b) for a, b in zip(intervals_of(r), first, strict=True))


def test_no_number_is_read_by_the_host():
    """On a device without memory every read raises: chunks, a window, a prefix."""
    for mask in (lg.Window(3) & lg.Chunks(4), lg.Chunks(5) & Prefix(3)):
        q, k = torch.zeros(2, 1, 7, 1, device="meta"), torch.zeros(2, 1, 12, 1, device="meta")
        r = Request(q, k, k, (), mask, 5, 0, 1.0, q_order=5)
        assert refusal(r) is None
        made = intervals_of(r)
        assert made.lo.shape == made.hi.shape and made.lo.shape[1] == 7
        assert made.lo.device.type == made.first_queries(12, 4).device.type == "meta"


def test_one_number_is_read_where_nobody_knows():
    """Once for all layers: whether documents come back, and whether padding is in the middle."""
    r = request(lg.Causal() & lg.Documents(torch.arange(8) // 4) & lg.Padding(torch.arange(8) > 1), 8, 8)
    with Reads() as reads:
        assert refusal(r) is None
        intervals_of(r)
        assert refusal(r.of_layer(r.q, r.k, r.v)) is None
    assert reads.count == 1
