"""The number of keys that a mask lets each query attend to, against a sum over its pairs."""

import pytest
import torch

import longitude as lg
from longitude.attention import pairs as home
from longitude.attention.pairs import AllowedPairs

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 3] * 2, [5] * 10 + [-2] * 14])
VALID = torch.arange(48).view(2, 24) % 5 > 0
MASKS = {
    "causal": lg.Causal(),
    "window": lg.Window(5),
    "band": lg.Band(2, 3),
    "none": lg.NoMask(),
    "documents that come back": lg.Causal() & lg.Documents(IDS),
    "window, documents, padding": lg.Window(3) & lg.Documents(IDS) & lg.Padding(VALID),
    "prefix": lg.Prefix(torch.tensor([5, 2])),
    "global": (lg.Window(3) | lg.Global([1])) & lg.Causal(),
}


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_counts_are_sums_over_pairs(mask, rows, monkeypatch):
    monkeypatch.setattr(home, "BLOCK", 200)  # several blocks of queries
    allowed = mask.allowed(torch.arange(24 - rows, 24), torch.arange(24)).expand(2, 1, rows, 24)
    pairs = AllowedPairs(mask, 2, rows, 24, 24 - rows)
    counts = home.visible_keys(pairs, torch.device("cpu"))
    assert torch.equal(counts.expand(2, -1), allowed.sum(-1)[:, 0])


@pytest.mark.parametrize("mask", [lg.Causal(), lg.Padding(VALID[:, :9]), lg.Window(3)])
def test_more_queries_than_keys(mask):
    allowed = mask.allowed(torch.arange(-15, 9), torch.arange(9)).expand(2, 1, 24, 9)
    counts = home.visible_keys(AllowedPairs(mask, 2, 24, 9, 9 - 24), torch.device("cpu"))
    assert torch.equal(counts.expand(2, -1), allowed.sum(-1)[:, 0])
