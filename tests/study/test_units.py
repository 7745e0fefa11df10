"""What decides a unit of a study: another number is another unit, and what decides none is the same."""

import shutil
from dataclasses import replace
from operator import methodcaller
from typing import Any

import pytest

from longitude.study import run_trial
from longitude.study.results import read_run
from longitude.study.units import TRAINING, ngrams_unit, units_of
from tests.study.conftest import COPY, NUMBERS, SHORT, edit_question, run, trial_of

pytestmark = pytest.mark.usefixtures("numbers")
DATA = {"training_sha256": "a", "selection_sha256": "b", "sha256": "c"}


@pytest.fixture
def four(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def keys(config, data: Any = DATA, **trial):
    units = units_of(config, replace(trial_of("rope", 0, config), **trial), data)
    return units.training.key, units.measuring.key


# ---- keys --------------------------------------------------------------------------------------------------------------
OTHER: dict[str, Any] = {
    "train_length": 8, "positions": "skipped", "batch_size": 3, "warmup": 0.2, "weight_decay": 0.0, "layers": 2, "hidden": 32,
    "heads": 1, "device": "cuda", "threads": 2, "precision": "bfloat16", "task": "recall",
    "position_range": 64, "steps": 5, "test_lengths": (16, 24), "methods": ("sliding",), "stride": 8, "documents": 5,
    "encodings": ("alibi",), "seeds": (5,), "learning_rates": (0.5,), "data": ("other",),
}  # fmt: skip
MEASURING, BESIDE = ("test_lengths", "methods", "stride", "documents"), ("encodings", "seeds", "learning_rates", "data")


# the tokens of a tokenizer are hashed as the text
@pytest.mark.parametrize("name", [name for name in (*TRAINING, *MEASURING, *BESIDE) if name != "tokenizer"])
def test_what_an_option_decides(name):
    """Of training the model and what is measured of it, of measuring that alone, and what stands beside a trial nothing."""
    before = replace(SHORT, positions="skipped", position_range=32) if name == "position_range" else SHORT
    changed = keys(replace(before, **{name: OTHER[name]}), rate=0.005)
    same = [one == other for one, other in zip(changed, keys(before, rate=0.005), strict=True)]
    assert same == [name not in TRAINING, name in BESIDE]


@pytest.mark.parametrize("change", [{"label": "alibi"}, {"seed": 1}, {"rate": 0.5}], ids=str)
def test_a_trial_has_units_of_its_own(change):
    assert not {*keys(SHORT, **change)} & {*keys(SHORT)}


def test_text_and_weights_are_part_of_a_key():
    assert keys(SHORT, DATA | {"sha256": "d"})[0] == keys(SHORT)[0] != keys(SHORT, DATA | {"training_sha256": "d"})[0]
    assert keys(SHORT, DATA | {"sha256": "d"})[1] != keys(SHORT)[1]
    assert keys(SHORT, DATA | {"selection_sha256": "d"})[0] != keys(SHORT)[0]
    assert len({keys(SHORT, DATA | {"start_sha256": {"0": one}})[0] for one in "ab"} | {keys(SHORT)[0]}) == 3
    drawn = {"sha256": "c"}  # of a task whose examples are drawn, the selection follows --documents
    assert keys(COPY, drawn)[0] != keys(replace(COPY, documents=7), drawn)[0]


def test_the_recipe_is_part_of_a_key(monkeypatch):
    before = keys(SHORT)
    monkeypatch.setitem(run_trial.train.__globals__["ARGUMENTS"], "adam_beta2", 0.999)
    assert not {*before} & {*keys(SHORT)}


def test_ngrams_are_of_the_windows_of_the_first_seed():
    first = ngrams_unit(SHORT, DATA).key
    assert ngrams_unit(replace(SHORT, seeds=(0, 1), encodings=("alibi",)), DATA).key == first
    for change in ({"seeds": (1, 0)}, {"steps": 5}):
        assert ngrams_unit(replace(SHORT, **change), DATA).key != first


# ---- one folder, many questions ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_in_one_folder_nothing_is_trained_twice_and_each_report_is_right(four, tmp_path, monkeypatch):
    """The study, more seeds, other lengths, another encoding, another text, and back again."""
    trained: list[str] = []
    plain = run_trial.train

    def counted(model, config, trial, *rest):
        trained.append(trial.title)
        return plain(model, config, trial, *rest)

    monkeypatch.setattr(run_trial, "train", counted)

    def ask(config, trains: int):
        before = len(trained)
        found, _ = run(config, four)
        assert found.complete and len(trained) - before == trains
        read = read_run(four)
        assert (read.labels, read.lengths, read.config.seeds) == (
            [*config.encodings], [*config.test_lengths], config.seeds,
        )  # fmt: skip
        assert {(row.label, row.seed) for row in read.rows} == {(x, y) for x in config.encodings for y in config.seeds}
        assert {row.length for row in read.rows} == {*config.test_lengths}
        return [replace(row, commit=None) for row in read.rows]

    first = ask(SHORT, 0)
    ask(replace(SHORT, seeds=(0, 1)), 2)
    ask(replace(SHORT, test_lengths=(16, 24, 48)), 0)
    ask(replace(SHORT, encodings=("alibi",), test_lengths=(16, 24, 48)), 1)
    ask(replace(SHORT, encodings=("rope",), methods=("sliding",)), 0)
    with monkeypatch.context() as other:
        other.setattr("longitude.study.data.read_texts", lambda data: type(NUMBERS)("other", NUMBERS.documents[2:]))
        ask(replace(SHORT, data=("other",)), 2)
    assert ask(SHORT, 0) == first
    fresh, _ = run(replace(SHORT, encodings=("rope",)), four, fresh=True)
    assert fresh.complete and trained[-1] == "rope seed 0 lr 0.005" and ask(SHORT, 0) != []


# ---- what is damaged ---------------------------------------------------------------------------------------------------
def put(**keys: Any):
    return lambda asked: asked["configuration"].update(keys)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (put(seeds=[0, "1"]), "seeds"),
        (put(seeds=[1, 1]), "--seeds"),
        (put(steps=True), "steps"),
        (put(precision="float8"), "precision"),
        (put(test_lengths=[64, 16]), "--test-lengths"),
        (put(stepz=4), "steps"),
        (put(encodings=["alibi"]), ""),  # the trials are of others
        (put(hidden=[16, 32]), ""),
        (put(train_lengths=[16, 32]), ""),
        (lambda asked: asked["configuration"].pop("encodings"), ""),
        (lambda asked: asked["plugins"].append({"sha256": "ab"}), ""),
        (lambda asked: asked["trials"][0].pop("seed"), ""),
        *((methodcaller("pop", part), part) for part in ("configuration", "data", "trials", "recipe")),
    ],
)
def test_a_question_that_was_edited_by_hand_is_refused_by_name(edit, named, four):
    """Types, ranges, keys that there are not, and parts that are lacking."""
    edit_question(four, edit)
    with pytest.raises(ValueError, match=f"question.json.*{named}"):
        read_run(four)
