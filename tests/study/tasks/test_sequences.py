"""Tasks of whole answers: examples as documented, of the seed alone; exact answers counted as they are written."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from longitude.measure import from_frame, read_rows
from longitude.statistics import proportions
from longitude.study.plan import checked
from longitude.study.tasks import sequences
from longitude.study.tasks.base import Measuring, of_task, task_of
from longitude.study.tasks.sequences import END, PADDING, START, Pairs
from longitude.study.train import build_model
from tests.study.conftest import COPY, run, units_in
from tests.study.tasks.more import task_named

NAMES = ("copy", "reverse", "sort", "add")


def spoken(symbols) -> str:
    """Bytes as text; END is "." and padding "_"."""
    return "".join({END: ".", PADDING: "_"}.get(int(each)) or chr(int(each)) for each in symbols)


# ---- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_right(name, length):
    sources, answers = task_named(name).tests(length, 50)
    assert task_named(name).positions(length) == max(sources.shape[1], answers.shape[1])
    for source, answer in zip(map(spoken, sources), map(spoken, answers), strict=True):
        assert source.endswith(".") and answer.endswith(".")
        source, answer = source[:-1], answer[:-1]
        if name == "add":
            one, other = source[::2], source[1::2]
            assert len(one) == len(other) == length and len(answer) == length + 1 and source.isdigit()
            assert int(one[::-1]) + int(other[::-1]) == int(answer[::-1])
        else:
            assert len(source) == length and source.isalpha() and source.islower()
            assert answer == {"copy": source, "reverse": source[::-1], "sort": "".join(sorted(source))}[name]


def test_letters_and_lengths_are_equally_likely():
    pairs = Pairs(task_of("copy"), 4, 20_000, batch=1, seed=0)
    lengths = np.bincount(pairs.lengths[10_000:], minlength=5) / 10_000
    assert lengths[0] == 0 and np.abs(lengths[1:] - 0.25).max() < 0.02
    letters = np.bincount(pairs.draws.ravel(), minlength=26) / pairs.draws.size
    assert len(letters) == 26 and np.abs(letters - 1 / 26).max() < 0.005


def test_training_examples_belong_to_the_seed():
    task = task_of("copy")
    pairs, again, other = (Pairs(task, 5, 40, batch=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(again[7]["labels"], pairs[7]["labels"]) and pairs[7].keys() == {"input_ids", "labels"}
    whole = [i for i in range(40) if len(pairs[i]["labels"]) > 4]
    assert not any(torch.equal(pairs[i]["labels"], other[i]["labels"]) for i in whole)
    targets = 0
    for i in range(40):
        source, answer = (spoken(pairs[i][name]) for name in ("input_ids", "labels"))
        assert source[:-1] == answer[:-1] and source[-1] == answer[-1] == "."
        targets += len(answer)
        assert pairs.targets(i + 1) == targets


def test_the_examples_of_a_step_have_one_length_that_grows_over_half_of_them():
    pairs = Pairs(task_named("add"), 5, 8 * 100, batch=8, seed=1)
    steps = pairs.lengths.reshape(100, 8)
    assert (steps == steps[:, :1]).all()
    assert len(pairs[799]["labels"]) == steps[99, 0] + 2  # a carry, and the end
    limits = [steps[some : some + 10, 0].max() for some in range(0, 50, 10)]
    assert limits == [1, 2, 3, 4, 5] and set(steps[50:, 0]) == {1, 2, 3, 4, 5}
    assert set(Pairs(task_named("add"), 5, 3, batch=8, seed=1).lengths) == {1}  # a step that is not full


def test_test_examples_are_the_same_for_all_and_none_is_trained():
    task = task_of("copy")
    assert torch.equal(task.tests(9, 5)[0], task.tests(9, 8)[0][:5])
    pairs = Pairs(task, 9, 2000, batch=1, seed=0)
    trained = {spoken(pairs[i]["labels"][:9]) for i in range(2000) if pairs.lengths[i] == 9}
    assert len(trained) > 80 and not trained & {spoken(answer[:9]) for answer in task.tests(9, 200)[1]}


def test_sampled_positions_go_to_both_streams():
    config = checked(replace(COPY, positions="randomized"))
    assert config.position_range == 7  # of the longest example and its end
    [item, other] = (task_of(config.task).examples(config, None, 3)[i] for i in (5, 6))
    for name in ("position_ids", "decoder_position_ids"):
        assert len(item[name]) == len(item["labels"]) and (item[name].diff() > 0).all() and item[name].max() < 7
        assert not torch.equal(item[name], other[name])
    assert build_model(config, "learned", 0).config.max_position_embeddings == 7


# ---- measuring ---------------------------------------------------------------------------------------------------------


class Scribe(torch.nn.Module):
    """Knows the right answers, and spoils some of them."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, spoil):
        super().__init__()
        self.weight, self.spoil, self.asked = torch.nn.Parameter(torch.zeros(1)), spoil, 0

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample, num_beams):
        assert not do_sample and num_beams == 1 and attention_mask.all() and not self.training
        answer = task_of("copy").tests(input_ids.shape[1] - 1, self.asked + len(input_ids))[1][self.asked :]
        self.asked += len(input_ids)
        assert max_new_tokens == answer.shape[1]
        return self.spoil(torch.nn.functional.pad(answer, (1, 0), value=START))


def measured(spoil):
    """Rows by metric, and the table of six words of four letters."""
    labels = {"task": "copy", "label": "rope", "seed": 0}
    asked = Measuring(Scribe(spoil), replace(COPY, documents=6), None, [4], labels, lambda done, total: None)
    rows, [table] = task_of("copy").measure(asked)
    assert all(row.position_to == row.position_from + 1 for row in rows[2:])
    places = [row.value for row in rows if row.position_from is not None]
    return {row.metric: row for row in rows if row.position_from is None} | {"places": places}, table


def test_right_answers_count_fully():
    rows, table = measured(lambda written: written)
    exact, symbols = rows["exact_match"], rows["symbol_accuracy"]
    assert (exact.value, exact.low, exact.high) == proportions.mean([1.0] * 6) and exact.low < 0.7
    assert (exact.task, exact.method, exact.length, exact.documents, exact.count, exact.tokens) == (
        "copy", "greedy", 4, 6, 6, 24,
    )  # fmt: skip
    assert (symbols.value, symbols.count) == (1.0, 24) and rows["places"] == [1.0] * 4
    assert list(table["exact"]) == [1] * 6 and list(table["right"]) == [4] * 6 and set(table["symbols"]) == {4}


def test_a_wrong_symbol_a_missing_end_and_an_early_end_are_wrong_answers():
    def spoil(written):
        written[0, 2] = ord("!")  # one symbol of four
        written[1, 5] = ord("a")  # continues where it should end
        written[2, 3:] = torch.tensor([END, PADDING, PADDING])  # ends after two of four
        return written

    rows, table = measured(spoil)
    assert list(table["exact"]) == [0, 0, 0, 1, 1, 1] and list(table["right"]) == [3, 4, 2, 4, 4, 4]
    assert rows["exact_match"].value == 0.5 and rows["symbol_accuracy"].value == pytest.approx(21 / 24)
    assert rows["places"] == pytest.approx([1, 5 / 6, 5 / 6, 5 / 6])
    rows, _ = measured(lambda written: torch.nn.functional.pad(written[:, :2], (0, 1), value=END))  # all end early
    assert rows["exact_match"].value == 0 and rows["symbol_accuracy"].value == 0.25


def test_answers_are_generated_as_the_whole_pass_would_say(tmp_path):
    """Greedy generation with the cache writes what the model finds likeliest, given what it wrote."""
    model, task = build_model(COPY, "rope", 0).eval(), task_of("copy")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) / 4)
    source, _ = task.tests(5, 7)
    written = sequences.answers(model, source, 6)
    for row, words in zip(source, written, strict=True):
        length = int((words == END).nonzero()[0]) + 1 if (words == END).any() else 6
        read = torch.cat([torch.tensor([START]), words[: length - 1]])[None]
        logits = model(input_ids=row[None], decoder_input_ids=read).logits[0]
        assert torch.equal(logits.argmax(-1), words[:length]) and (words[length:] == PADDING).all()


# ---- a study -----------------------------------------------------------------------------------------------------------


def test_a_study_of_answers(tmp_path):
    config = replace(COPY, encodings=("rope", "learned"))
    outcome, _ = run(config, tmp_path)
    assert outcome.complete
    assert outcome.trials[1].reason == "learned has no positions from 5 on, so it was not measured at 6"
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {(row.task, row.metric, row.method, row.weighting) for row in rows} == {
        ("copy", "exact_match", "greedy", "example"), ("copy", "symbol_accuracy", "greedy", "example"),
    }  # fmt: skip
    lengths = [(row.label, row.length) for row in rows if row.metric == "exact_match"]
    assert lengths == [*(("rope", length) for length in (2, 4, 6)), ("learned", 2), ("learned", 4)]
    assert {row.train_length for row in rows} == {4} and {row.documents for row in rows} == {6}
    study = json.loads((tmp_path / "question.json").read_text())
    assert study["configuration"]["task"] == "copy" and study["data"]["source"].startswith("generated: A word of")
    losses = [
        json.loads(line) for line in (units_in(tmp_path, "rope", 0)["train"] / "losses.jsonl").read_text().splitlines()
    ]
    assert losses[-1]["tokens"] == Pairs(task_of("copy"), 4, 32, 4, 0).targets(32)
    table = pd.read_parquet(units_in(tmp_path, "rope", 0)["measure"] / "documents.parquet")
    assert list(table) == "label seed method length document exact right symbols".split() and len(table) == 18
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".txt"]  # examples are nowhere on the disk


@pytest.mark.slow
def test_it_learns(tmp_path):
    """A small encoder-decoder copies short words after 700 steps, and knows where they end."""
    config = of_task(
        "copy", encodings=("rope",), train_length=3, test_lengths=(3,), steps=700, batch_size=32, layers=1, hidden=48,
        heads=4, documents=50, device="cpu",
    )  # fmt: skip
    assert run(config, tmp_path)[0].complete
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert next(row.value for row in rows if row.metric == "exact_match") > 0.7
