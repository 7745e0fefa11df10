"""Scores by distance are the ones that the model's own weights are the softmax of, and a shuffle leaves no content in them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention
from longitude.study.train import build_model
from tests.study.conftest import TINY, reading_numbers

ONE = replace(TINY, heads=1, layers=1)
IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("label", ["nope", "rope", "rope:base=50", "rope+attention:scale=0.7"])
def test_scores_are_those_of_the_weights(label, monkeypatch):
    model = build_model(ONE, label, 0).double().eval()
    seen = []
    plain = attention.placed
    monkeypatch.setattr(attention, "placed", lambda *given: seen.append(plain(*given)) or seen[-1])
    as_it_is, shuffled = attention.scores(model, IDS)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    weights = model(input_ids=IDS, output_attentions=True).attentions[0][:, 0]
    torch.testing.assert_close(seen[0].masked_fill(~causal, -torch.inf).softmax(-1), weights, rtol=1e-9, atol=1e-12)
    assert as_it_is["octaves"] == attention.octaves(seen[0])
    assert shuffled["octaves"] == attention.octaves(torch.stack(seen[1:]).mean(0))


def test_octaves_are_means_of_diagonals():
    distance = torch.arange(8.0)[:, None] - torch.arange(8.0)
    assert attention.octaves(distance[None]) == [[0.0, 1.0, 2.5, 5.5]]  # 0; 1; 2, 3; 4 to 7, each distance alike


def test_where_queries_look_is_what_loops_give():
    length, trained = 13, 5
    scores = torch.randn(2, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    means = dict.fromkeys(("distance", "beyond", "entropy", "first"), 0.0)
    late = [(head, i) for head in range(2) for i in range(length // 2, length)]
    for head, i in late:
        row = weights[head, i, : i + 1].tolist()
        means["distance"] += sum(w * (i - j) for j, w in enumerate(row)) / len(late)
        means["beyond"] += sum(w for j, w in enumerate(row) if i - j >= trained) / len(late)
        means["entropy"] -= sum(w * math.log2(w) for w in row) / len(late)
        means["first"] += row[0] / len(late)
    assert attention.look(weights, trained) == pytest.approx(means, rel=1e-12)


def test_before_training_no_score_falls_with_distance():
    """Barbero et al. 2025, proposition 3.2: the mean over independent queries and keys is 0 at every distance."""
    trials = [SimpleNamespace(seed=seed) for seed in range(12)]
    run = SimpleNamespace(config=TINY, of=lambda label: trials, lengths=[16], train_length=16)
    with reading_numbers():
        rows = [row for row in attention.rows(run, ["rope"], 2, untrained=True) if row["shuffled"]]
    assert len(rows) == 12 and {row["of"] for row in rows} == {"scores"}
    means = np.array([row["octaves"] for row in rows]).mean(1)  # [seeds, octaves]
    assert (abs(means.mean(0)) < 4 * means.std(0, ddof=1) / math.sqrt(12)).all() and (means != 0).all()
