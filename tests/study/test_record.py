"""What a directory holds is what it says: records of trials, growth, and studies of other releases."""

import json
import re
import shutil
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from longitude.measure import from_frame, read_rows, write_rows
from longitude.study import run_trial, runner
from longitude.study.record import GROWING, SCHEMA, grown, place_of, read_study
from longitude.study.results import read_run
from tests.study.conftest import NUMBERS, TINY, run, trial_at

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two studies that are finished, of 4 and of 6 steps."""
    path = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        for steps in (4, 6):
            assert run(replace(TINY, steps=steps), path / str(steps))[0].complete
    return path


@pytest.fixture
def four(finished, tmp_path):
    return shutil.copytree(finished / "4", tmp_path / "4")


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(path, message):
    """By report and by continuing."""
    for call in (lambda: read_run(path), lambda: run(TINY, path)):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_whole_recipe_is_in_study_json_and_each_trial_has_its_own(four):
    study = json.loads((four / "study.json").read_text())
    assert study["schema"] == SCHEMA
    assert {"optim", "adam_beta1", "adam_beta2", "max_grad_norm", "lr_scheduler_type", "parameter_groups"} < set(
        study["recipe"]
    )
    assert {"norm", "hidden_act", "tie_word_embeddings", "initializer_range"} < set(study["recipe"])
    own = json.loads((trial_at(four, "rope", 0).folder / "trial.json").read_text())
    assert own["recipe"] == study["recipe"] and own["trained"]["steps"] == 4 and own["machine"]["threads"]
    assert own["trained"]["text"] == study["data"]["training_sha256"]
    decided = set(own["trained"]) | set(own["measured"])  # every option decides weights or rows, or names trials
    assert decided >= set(TINY.__dataclass_fields__) - {"encodings", "seeds", "learning_rates"}


def test_a_trial_of_another_configuration_is_refused_by_name(finished, four):
    folder = trial_at(four, "rope", 0).folder
    shutil.rmtree(folder)
    shutil.copytree(trial_at(finished / "6", "rope", 0).folder, folder)
    refused(four, f"{folder.name} was trained with --steps 6, its study has 4; move .* trains this one again")
    shutil.rmtree(folder)
    shutil.copytree(trial_at(four, "none", 0).folder, folder)
    refused(four, f"{folder.name} was trained with label none, its study has rope")
    (folder / "trial.json").unlink()
    refused(four, f"{folder.name} has no trial.json, so nothing says how it was trained")
    shutil.rmtree(folder)
    assert run(TINY, four)[0].complete  # what the message says


@pytest.mark.parametrize(
    ("copied", "message"),
    [
        (
            "documents.parquet results.parquet losses.jsonl model.safetensors status.json",
            "status.json has steps 6, its trial has 4",
        ),
        ("documents.parquet results.parquet losses.jsonl", "results.parquet has train_steps 6, its trial has 4"),
    ],
)
def test_a_half_copied_trial_is_refused_by_name(copied, message, finished, four):
    """Its own record stays."""
    for name in copied.split():
        shutil.copy(trial_at(finished / "6", "rope", 0).folder / name, trial_at(four, "rope", 0).folder)
    refused(four, f"{message}; move .* trains this one again")


@pytest.mark.parametrize(
    ("column", "message"), [("label", "label none"), ("seed", "seed 7"), ("learning_rate", r"learning_rate 0\.5")]
)
def test_rows_of_another_trial_are_refused_by_name(column, message, four):
    rows = trial_at(four, "rope", 0).folder / "results.parquet"
    other = {"label": "none", "seed": 7, "learning_rate": 0.5}[column]
    write_rows([replace(row, **{column: other}) for row in from_frame(read_rows(rows))], rows)
    refused(four, f"results.parquet has {message}, its trial has")


@pytest.mark.parametrize("values", [{"label": "none"}, {"seed": 7}, {"rate": 0.5}, {"steps": 6}])
def test_a_status_of_another_trial_is_refused_by_name(values, four):
    changed(trial_at(four, "rope", 0).folder / "status.json", **values)
    [(name, value)] = values.items()
    refused(four, f"status.json has {name} {value}, its trial has")


def test_losses_of_more_steps_than_the_training_are_refused(finished, four):
    shutil.copy(trial_at(finished / "6", "rope", 0).folder / "losses.jsonl", trial_at(four, "rope", 0).folder)
    with pytest.raises(ValueError, match=r"losses\.jsonl ends at step 6 of 4; move"):
        read_run(four)


def test_an_emptied_table_is_measured_again(four, monkeypatch):
    monkeypatch.setattr(run_trial, "train", None)
    before, rows = read_rows(four / "results.parquet"), trial_at(four, "rope", 0).folder / "results.parquet"
    write_rows([], rows)
    with pytest.raises(ValueError, match="is cut short or empty although its trial is done; run the same"):
        read_run(four)
    assert run(TINY, four)[0].complete and len(read_rows(rows))
    assert len(read_run(four).rows) == len(before)


def test_gathered_rows_of_another_study_are_refused_and_gathered_again(finished, four):
    gathered = four / "results.parquet"
    before = read_rows(gathered)
    for other in (finished / "6" / gathered.name, trial_at(four, "none", 0).folder / gathered.name):
        shutil.copy(other, gathered)
        with pytest.raises(
            ValueError, match=r"does not hold the rows of .*; run the same `longitude study` again, it gathers"
        ):
            read_run(four)
        assert run(TINY, four)[0].complete
        pd.testing.assert_frame_equal(read_rows(gathered), before)
        read_run(four)


def test_what_was_measured_otherwise_is_measured_again_from_its_checkpoint(four, monkeypatch):
    trial = trial_at(four, "rope", 0)
    weights, documents = trial.folder / "model.safetensors", trial.folder / "documents.parquet"
    before = weights.stat().st_mtime_ns
    monkeypatch.setattr(run_trial, "train", None)
    documents.unlink()
    assert run(TINY, four)[0].complete and documents.exists() and weights.stat().st_mtime_ns == before
    own = json.loads((trial.folder / "trial.json").read_text())
    changed(trial.folder / "trial.json", measured=own["measured"] | {"sha256": "0"})
    with pytest.raises(ValueError, match="was measured at other lengths or documents than its study; run the same"):
        read_run(four)
    assert (
        run(TINY, four)[0].complete
        and json.loads((trial.folder / "trial.json").read_text())["measured"] == own["measured"]
    )


# ---- growing -----------------------------------------------------------------------------------------------------------


def test_lengths_and_methods_are_measured_without_training(four, monkeypatch):
    before = read_rows(four / "results.parquet")
    monkeypatch.setattr(run_trial, "train", None)
    outcome, notes = run(replace(TINY, test_lengths=(24, 48), methods=("sliding",)), four)
    assert "measured again on other documents" in notes[0] and not any("to be trained" in note for note in notes)
    assert outcome.complete and outcome.config.test_lengths == (16, 24, 32, 48)
    rows = read_rows(four / "results.parquet")
    whole = rows[rows["position_from"].isna() & (rows["label"] == "rope")]
    assert whole.groupby("method")["length"].agg(list).to_dict() == {
        method: [16, 24, 32, 48] for method in ("non-overlapping", "sliding")
    }
    assert json.loads((four / "study.json").read_text())["configuration"]["split_length"] == 32
    outcome, _ = run(replace(TINY, test_lengths=(16, 24)), four)  # a part of it: nothing to do
    assert outcome.config.test_lengths == (16, 24, 32, 48) and len(before) < len(rows)
    pd.testing.assert_frame_equal(read_rows(four / "results.parquet"), rows)


def test_longer_lengths_keep_the_training_text(finished, four):
    own = [json.loads((trial_at(path, "rope", 0).folder / "trial.json").read_text()) for path in (finished / "4", four)]
    assert own[0]["trained"] == own[1]["trained"]
    with pytest.raises(ValueError, match="--test-lengths: no held-out document is longer than 5000"):
        run(replace(TINY, test_lengths=(16, 5000)), four)


def test_seeds_and_encodings_are_added(four, monkeypatch):
    def tried(config, trial, **rest):
        return replace(trial.status, status="failed")

    monkeypatch.setattr(runner, "run_trial", tried)
    outcome, notes = run(replace(TINY, seeds=(1,)), four)
    assert any(note.startswith("2 of them are to be trained: every encoding with every seed") for note in notes)
    assert [(trial.label, trial.seed) for trial, _ in outcome.trials] == [
        ("none", 0),
        ("rope", 0),
        ("none", 1),
        ("rope", 1),
    ]
    outcome, _ = run(replace(TINY, encodings=("alibi",)), four)
    assert outcome.config.encodings == ("none", "rope", "alibi") and outcome.config.seeds == (0, 1)
    outcome, _ = run(replace(TINY, encodings=("rope",)), four)
    assert [(trial.label, trial.seed, status.status) for trial, status in outcome.trials] == [("rope", 0, "done")]


def test_every_other_option_is_refused_by_name(tmp_path):
    for name in set(TINY.__dataclass_fields__) - set(GROWING):
        before = getattr(TINY, name)
        other: Any = (
            f"{before}x" if isinstance(before, str) else ("x",) if isinstance(before, tuple) else (before or 0) + 1
        )
        with pytest.raises(ValueError, match=f"holds a study with --{name.replace('_', '-')} "):
            grown(replace(TINY, **{name: other}), TINY, tmp_path)


def test_every_question_has_a_folder(four, tmp_path):
    other, folder = replace(TINY, steps=9, weight_decay=0.2), tmp_path / "4"
    assert (
        place_of(TINY, TINY, folder) == place_of(replace(TINY, seeds=(3,), test_lengths=(64,)), TINY, folder) == folder
    )
    named = place_of(other, TINY, folder)
    assert re.fullmatch(r"4-steps=9-weight_decay=0\.2-[0-9a-f]{6}", named.name)
    assert place_of(other, TINY, folder) == named


def test_a_part_of_a_study_is_read(four):
    whole = read_run(four)
    part = whole.part(replace(TINY, encodings=("rope",), test_lengths=(16,)))
    assert part.labels == ["rope"] and part.lengths == [16] and {row.label for row in part.rows} == {"rope"}
    assert len(part.trials) == 1 and len(whole.trials) == 2


# ---- other releases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}, of another release; this one reads schema {SCHEMA}"),
        ({"schema": SCHEMA - 1}, f"schema {SCHEMA - 1}, of another release"),
        ({"schema": None}, "has no schema number"),
    ],
)
def test_what_another_release_wrote_is_refused(values, message, four):
    changed(four / "study.json", **values)
    refused(four, message)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": "abc"}, "seeds"),
        ({"seeds": [0, "1"]}, "seeds"),
        ({"seeds": []}, "--seeds"),
        ({"seeds": [1, 1]}, "--seeds"),
        ({"encodings": None}, "encodings"),
        ({"encodings": "rope"}, "encodings"),
        ({"steps": 1e30}, "steps"),
        ({"steps": True}, "steps"),
        ({"steps": float("nan")}, "steps"),
        ({"layers": -5}, "--layers"),
        ({"match": "flops"}, "match"),
        ({"learning_rates": [None]}, "learning_rates"),
        ({"test_lengths": [64, 16]}, "--test-lengths"),
        ({"stepz": 4}, "steps"),
    ],
    ids=str,
)
def test_what_was_edited_by_hand_is_refused_by_name(change, named, four):
    """Types, ranges, and keys that there are not; a missing option is not its default."""
    path = four / "study.json"
    study = json.loads(path.read_text())
    values = study["configuration"] | change
    removed = [name for name in change if change[name] is None]
    study["configuration"] = {name: value for name, value in values.items() if name not in removed}
    path.write_text(json.dumps(study))
    with pytest.raises(ValueError, match=f"study.json.*{named}"):
        read_study(four)


def test_a_changed_recipe_is_named(four):
    study = json.loads((four / "study.json").read_text())
    changed(four / "study.json", recipe=study["recipe"] | {"adam_beta2": 0.999})
    refused(four, "was trained with adam_beta2 0.95, its study has 0.999")
    for trial in (trial_at(four, label, 0) for label in ("none", "rope")):
        changed(trial.folder / "trial.json", recipe=study["recipe"] | {"adam_beta2": 0.999})
    with pytest.raises(ValueError, match=r"models trained with adam_beta2 0\.999, this release trains with 0\.95"):
        run(replace(TINY, seeds=(1,)), four)
