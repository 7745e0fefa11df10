"""Tasks of questions: what is drawn is right by a rule written here again, symbol by symbol; scored as a loop would."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pandas as pd
import pytest
import torch

from longitude.measure.rows import from_frame, read_rows
from longitude.models import LongitudeForCausalLM
from longitude.study.plan import checked
from longitude.study.tasks import languages
from longitude.study.tasks.base import TASKS, of_task, task_of
from longitude.study.tasks.questions import NOT_ASKED, Drawn, Questions, by_distance
from longitude.study.train import build_model
from tests.study.conftest import SHAPE, run, units_in
from tests.study.tasks.more import MORE, task_named
from tests.support import refused

OURS = [name for name, kind in TASKS.items() if issubclass(kind, Questions)]
NAMES = [*OURS, *(name for name, kind in sorted(MORE.items()) if issubclass(kind, Questions))]
LENGTHS = {"recall": (32, 80), "selective-copy": (33, 70)}
"""Two lengths of each task that are not its defaults."""


def lengths(name):
    return LENGTHS.get(name, (12, 30))


def by_hand(name, tokens):
    """What is to be answered after each token, None where nothing is asked: a loop over the tokens, in Python."""
    task = task_named(name)
    if name == "flip-flop":
        answers, bit = [], None
        for instruction, symbol in zip(tokens[::2], tokens[1::2], strict=True):
            bit = symbol if instruction == languages.WRITE else bit
            answers += [bit if instruction == languages.READ else None, None]
        return answers
    if name in ("parity", "modular-sum", "z60"):
        return [sum(tokens[: t + 1]) % task.symbols for t in range(len(tokens))]
    if name in ("a5", "s5"):
        every = [p for p in permutations(range(5)) if name == "s5" or even(p)]
        product, answers = tuple(range(5)), []
        for token in tokens:
            product = tuple(product[x] for x in every[token])
            answers.append(every.index(product))
        return answers
    if name == "dyck":
        answers, opened = [None] * len(tokens), []
        for t, token in enumerate(tokens):
            if token < 8:
                opened.append(token)
            else:
                answers[t - 1] = opened.pop() + 8
        assert not opened
        return answers
    if name == "recall":
        pairs = len(tokens) // 16
        values = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(values) == pairs
        return [None if t < 2 * pairs else values.get(token) for t, token in enumerate(tokens)]
    if name == "lookback":
        return [None] * 8 + tokens[:-8]
    if name == "induction":
        return [None] * (len(tokens) - 1) + [tokens[tokens.index(0) + 1]]
    if name == "selective-copy":
        return [None] * (len(tokens) - 16) + [token for token in tokens if token < 14]
    if name == "passkey":
        mark = tokens.index(11)
        return [None] * (len(tokens) - 5) + tokens[mark + 1 : mark + 6]
    mark = tokens.index(task.symbols - 2)
    question, answer = tokens[:mark], tokens[mark + 1 :]
    if name.startswith("addition"):
        digits = [token for token in question if token <= 10]
        plus = digits.index(10)
        order = -1 if name == "addition-reversed" else 1
        one, other = (int("".join(map(str, part[::order]))) for part in (digits[:plus], digits[plus + 1 :]))
        total = [int(digit) for digit in str(one + other).zfill(plus + 1)][::order]
        if name == "addition-hints":
            first = question[-2]  # of the least digit
            assert question[0] == first + plus - 1
            total = [x for i, digit in enumerate(total) for x in (first + plus - i, digit)]
    else:
        total = {"copy": question, "reverse": question[::-1], "sort": sorted(question)}[name.removesuffix("-decoder")]
    assert answer == total
    return [None] * mark + [*total, task.symbols - 1]


def even(p):
    return sum(a > b for i, a in enumerate(p) for b in p[i + 1 :]) % 2 == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_is_what_a_loop_finds(name):
    task = task_named(name)
    for length in lengths(name):
        for method in task.methods:
            sample = task.tests(length, 20, method)
            assert sample.tokens.shape == sample.labels.shape == (20, task.positions(length))
            assert sample.tokens.min() >= 0 and max(sample.tokens.max(), sample.labels.max()) < task.symbols
            for tokens, labels in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True):
                assert [None if label == NOT_ASKED else label for label in labels] == by_hand(name, tokens)


@pytest.mark.parametrize(
    "name",
    [
        "flip-flop",
        "dyck",
        "recall",
        "induction",
        "selective-copy",
        "passkey",
        "lookback",
        "copy-decoder",
        "reverse-decoder",
    ],
)
def test_distances_lead_to_the_symbol_asked_for(name):
    for length in lengths(name):
        sample = task_named(name).tests(length, 20)
        for row, t in zip(*np.nonzero(sample.labels != NOT_ASKED), strict=True):
            if sample.labels[row, t] == 27 and name.endswith("decoder"):
                continue  # the end
            decided_by = sample.tokens[row, t - sample.distances[row, t]]
            assert decided_by == sample.labels[row, t] - (8 if name == "dyck" else 0)


@pytest.mark.parametrize("name", OURS)
def test_a_task_begins_with_a_label_that_solves_it_and_goes_well_past_training(name):
    config, ceiling = of_task(name), task_of(name).ceiling
    assert ceiling is None or ceiling in config.encodings
    assert config.train_length in config.test_lengths and config.longest >= 4 * config.train_length
    described = task_of(name).prepare(replace(config, documents=2)).description
    assert described["ceiling"] == ceiling and {*map(int, described["floor"])} == {*config.test_lengths}


def test_flip_flop_ignores_as_often_as_its_sets_say():
    for method, ignored in (("forward", 0.8), ("sparse", 0.98), ("dense", 0.1)):
        inner = task_of("flip-flop").tests(512, 100, method).tokens[:, 2:-2:2]
        counts = np.bincount(inner.ravel(), minlength=5)[2:] / inner.size
        np.testing.assert_allclose(counts, [(1 - ignored) / 2, (1 - ignored) / 2, ignored], atol=0.01)


def test_keys_stand_again_by_a_power_law():
    sample = task_of("recall").tests(30, 5000)  # one pair, then 14 places
    places = (np.nonzero(sample.labels != NOT_ASKED)[1] - 2) // 2
    weights = np.arange(1, 15) ** -0.99
    np.testing.assert_allclose(np.bincount(places, minlength=14) / 5000, weights / weights.sum(), atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_training_examples_are_of_the_seed_and_the_step(name):
    task, longest = task_named(name), lengths(name)[1]
    drawn, again, other = (Drawn(task, longest, 6, 4, seed) for seed in (1, 1, 2))
    whole = [again[i] for i in reversed(range(len(again)))][::-1]
    tokens = 0
    for i, item in enumerate(whole):
        assert all(torch.equal(item[part], drawn[i][part]) for part in ("input_ids", "shift_labels"))
        assert len(item["input_ids"]) == len(whole[i // 4 * 4]["input_ids"])  # of one length in a step
        tokens += len(item["input_ids"])
        assert drawn.targets(i + 1) == tokens
    same = [torch.equal(a["input_ids"], other[i]["input_ids"]) for i, a in enumerate(whole)]
    assert not all(same) and not torch.equal(whole[20]["input_ids"], whole[21]["input_ids"])
    assert any(len(a["input_ids"]) != len(b["input_ids"]) for a, b in pairwise(whole)) == task.grows


@pytest.mark.parametrize(
    ("name", "length"),
    [("flip-flop", 13), ("flip-flop", 2), ("dyck", 7), ("recall", 15), ("recall", 33), ("recall", 2048),
     ("induction", 2), ("selective-copy", 31), ("passkey", 10), ("lookback", 8), ("addition-hints", 100)],
)  # fmt: skip
def test_lengths_that_do_not_fit_are_refused(name, length):
    with refused(name, got=str(length)):
        task_named(name).tests(length, 2)


@pytest.mark.parametrize("option", ["train_length", "test_lengths"])
def test_a_study_refuses_them_before_anything_is_trained(option):
    given = {"train_length": 12, "test_lengths": (12, 24)} | {option: 13 if option == "train_length" else (12, 13)}
    with refused(f"--{option.replace('_', '-')}", "flip-flop", "13"):
        checked(of_task("flip-flop", **given))


def test_a_whole_answer_with_one_wrong_symbol_is_wrong_at_its_distance():
    asked, distances = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[4, 5, 6], [8, 9, 10]])
    right = torch.tensor([[True, True, False], [True, True, True]])
    shares = by_distance(right, asked, distances, whole=False)
    assert shares["distance"].tolist() == [4, 8] and shares["exact"].tolist() == pytest.approx([2 / 3, 1])
    assert by_distance(right, asked, distances, whole=True)["exact"].tolist() == [0, 1]


def test_a_study_of_questions(tmp_path, numbers):
    config = of_task(
        "flip-flop", encodings=("rope",), train_length=8, test_lengths=(8, 16), steps=3, batch_size=2, documents=6, **SHAPE
    )  # fmt: skip
    assert run(config, tmp_path)[0].complete
    every = from_frame(read_rows(tmp_path / "results.parquet"))
    rows = {(r.method, r.length, r.metric): r for r in every if r.distance is None}
    assert len(rows) == 3 * 2 * 2 and {r.method for r in every if r.distance} == {"by-distance"}
    model = LongitudeForCausalLM.from_pretrained(units_in(tmp_path, "rope", 0)["train"]).eval()
    tables = pd.read_parquet(units_in(tmp_path, "rope", 0)["measure"] / "documents.parquet")
    for method in ("forward", "sparse", "dense"):
        sample, shares, exact = task_of("flip-flop").tests(16, 6, method), [], []
        for tokens, labels in zip(torch.from_numpy(sample.tokens), torch.from_numpy(sample.labels), strict=True):
            answers = model(tokens[None]).logits[0].argmax(-1)
            right = [bool(s == label) for s, label in zip(answers, labels, strict=True) if label != NOT_ASKED]
            shares.append(sum(right) / len(right))
            exact.append(all(right))
        assert rows[method, 16, "accuracy"].value == pytest.approx(np.mean(shares))
        assert rows[method, 16, "exact_match"].value == pytest.approx(np.mean(exact))
        own = tables[(tables["method"] == method) & (tables["length"] == 16)]
        np.testing.assert_allclose(own["exact"], shares)
    whole = tables[(tables["method"] == "forward") & (tables["length"] == 16)]
    far = tables[(tables["method"] == "by-distance") & (tables["length"] == 16)]
    assert set(far["distance"]) <= {1, 2, 4, 8} and far["symbols"].sum() == whole["symbols"].sum()
    assert (far["exact"] * far["symbols"]).sum() == pytest.approx(whole["right"].sum())
    assert build_model(config, "rope", 0).config.vocab_size == 5
