"""Masked text: which bytes are masked, what is scored, and an encoder that goes through a study."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from longitude.measure import from_frame, read_rows
from longitude.models.encoder import LongitudeForMaskedLM
from longitude.statistics.estimates import WEAK
from longitude.study.tasks.base import of_task, task_of
from longitude.study.tasks.masked import MASK, SHARE, Masked
from longitude.study.train import build_model
from tests.study.conftest import SHAPE, run, summary, units_in

TINY = of_task(
    "masked", encodings=("rope", "alibi"), train_length=16, test_lengths=(16, 24, 48), steps=4, batch_size=2, documents=4, **SHAPE
)  # fmt: skip


def test_training_windows_hide_their_share(data):
    examples = task_of(TINY.task).examples(replace(TINY, steps=20), data, 3)
    seen = set()
    for i in range(40):
        item = examples[i]
        hidden = item["labels"] >= 0
        assert hidden.sum() == round(SHARE * 16) == 2
        assert (item["input_ids"][hidden] == MASK).all() and (item["input_ids"][~hidden] < 256).all()
        assert torch.equal(examples[i]["labels"], item["labels"])  # of the seed and the window
        whole = torch.where(hidden, item["labels"], item["input_ids"])
        assert torch.equal(whole, examples.windows[i]["input_ids"])
        seen |= set(hidden.nonzero().flatten().tolist())
    assert seen == set(range(16)) and examples.targets(7) == 14


def test_losses_are_those_of_the_hidden_bytes_at_every_length(data):
    model, masked = build_model(TINY, "rope", 0).eval(), Masked()
    documents = [torch.cat([document, document[:40]]) for document in data.validation]  # a tail that no length covers
    counts = set()
    for window in (16, 24, 48):
        losses = masked.at_length(model, documents, window, 48)
        expected = []
        for index, document in enumerate(documents):
            size = (len(document) - 1) // 48 * 48
            hidden = torch.from_numpy(np.random.default_rng(index).random(len(document)) < SHARE)[:size]
            total = 0.0
            for start in range(0, size, window):
                text, mask = document[start : start + window], hidden[start : start + window]
                logits = model(input_ids=text.masked_fill(mask, MASK)[None]).logits[0]
                total += F.cross_entropy(logits[mask], text[mask], reduction="sum").item() if mask.any() else 0.0
            expected.append(total)
        np.testing.assert_allclose(losses.nats, expected, rtol=1e-5)
        counts.add(tuple(losses.tokens))
    assert len(counts) == 1 and 0.1 < sum(counts.pop()) / (sum(len(each) - 1 for each in documents)) < 0.2


@pytest.mark.slow
def test_a_study_of_encoders(tmp_path, numbers):
    assert run(TINY, tmp_path)[0].complete
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {(row.task, row.metric, row.method) for row in rows} == {
        ("masked", "bits_per_masked_byte", "non-overlapping")
    }
    labels = [(row.label, row.length) for row in rows]
    assert labels == [(label, length) for label in ("rope", "alibi") for length in (16, 24, 48)]
    table = pd.read_parquet(units_in(tmp_path, "rope", 0)["measure"] / "documents.parquet")
    sums = table[table["length"] == 48][["nats", "bytes"]].sum()
    assert rows[2].value == pytest.approx(sums["nats"] / sums["bytes"] / math.log(2))
    model = LongitudeForMaskedLM.from_pretrained(units_in(tmp_path, "rope", 0)["train"]).eval()
    again = Masked().at_length(model, Masked().prepare(TINY).validation, 48, 48)
    assert again.nats.sum() == pytest.approx(sums["nats"], rel=1e-5)
    assert set(summary(tmp_path).query("length > 16")["verdict"]) == {WEAK}  # four steps teach nothing
    losses = [
        json.loads(line) for line in (units_in(tmp_path, "rope", 0)["train"] / "losses.jsonl").read_text().splitlines()
    ]
    assert [entry["tokens"] for entry in losses] == [4, 8, 12, 16]
