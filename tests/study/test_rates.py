"""A learning rate for each label: the rule, and that the tested lengths and the order of events have no part in the choice."""

import json
import math
from dataclasses import replace

import pytest
import torch

from longitude.measure import from_frame, read_rows
from longitude.study import run_trial
from longitude.study.plan import plan
from longitude.study.rates import Choice, choices, choose, chosen, recorded, shown, words
from longitude.study.tasks.base import task_for
from longitude.study.train import build_model, selection_loss
from longitude.study.trial import Status, Trial, trials_of
from tests.study.conftest import REVERSE, TINY, assert_same_runs, conclusion, printed, run

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32), methods=("non-overlapping",))
SWEEP = replace(TINY, learning_rates=(5e-3, 1e-2))


# ---- the rule ----------------------------------------------------------------------------------------------------------


def test_the_lowest_mean_over_the_seeds_is_chosen():
    losses = {0.002: {0: 3.0, 1: 2.0}, 0.004: {0: 2.25, 1: 2.25}, 0.008: {0: 1.0, 1: 4.0}}
    assert choose(losses) == Choice(0.004, losses)
    assert choose(losses).means == {0.002: 2.5, 0.004: 2.25, 0.008: 2.5}


def test_of_equal_means_the_lower_rate_is_chosen_in_whatever_order():
    for rates in ((0.008, 0.002), (0.002, 0.008)):
        assert choose({rate: {0: 2.0, 1: 2.5} for rate in rates}).rate == 0.002


def test_a_rate_with_a_diverged_seed_is_never_chosen():
    losses = {0.002: {0: 3.0, 1: 3.0}, 0.004: {0: 1.0, 1: None}}
    assert choose(losses).rate == 0.002
    assert choose({0.004: losses[0.004]}).rate is None


def test_an_end_of_the_sweep_is_named():
    rates = (0.002, 0.004, 0.008)
    found = {
        label: choose({rate: {0: 2.0 + (rate != best)} for rate in rates})
        for label, best in (("a", 0.002), ("b", 0.004), ("c", 0.008), ("d", 0.008))
    } | {"e": Choice(None, {0.002: {0: None}})}
    assert [found[label].edge for label in "abcde"] == ["lowest", None, "highest", "highest", None]
    assert words(found) == [
        "learning rates, by the loss on text held out for this choice: a 0.002, b 0.004, c 0.008, d 0.008",
        "at every learning rate a seed of e diverged",
        "the learning rate of a is the lowest tried: widen the sweep",
        "the learning rate of c and d is the highest tried: widen the sweep",
    ]


def statuses(tmp_path, losses: dict[tuple[str, int, float], float | str | None], **options) -> dict[Trial, Status]:
    """(label, seed, rate) -> loss on the selection text; None where it diverged, else a status."""
    config = replace(SWEEP, seeds=(0, 1), **options)
    found = {}
    for trial in trials_of(tmp_path, config, {}):
        loss = losses.get((trial.label, trial.seed, trial.rate), 2.0)
        state = "trained" if isinstance(loss, float) else loss or "diverged"
        selection = loss if isinstance(loss, float) else None
        found[trial] = Status(state, trial.label, trial.seed, trial.rate, selection=selection)
    return found


def test_nothing_is_chosen_before_every_candidate_has_ended(tmp_path):
    found = statuses(tmp_path, {("rope", 1, 0.01): 1.0})
    assert {label: choice.rate for label, choice in choices(found).items()} == {"none": 0.005, "rope": 0.01}
    for state in ("failed", "running", "not run"):
        found = statuses(tmp_path, {("rope", 0, 0.01): state})
        assert [*choices(found)] == ["none"]
        assert {(trial.label, trial.rate) for trial in chosen([*found], choices(found))} == {("none", 0.005)}
        assert {(t.label, t.rate) for t in shown(found, choices(found))} == {("none", 0.005), ("rope", 0.01)}


def test_a_study_with_one_rate_chooses_nothing(tmp_path):
    found = statuses(tmp_path, {}, learning_rates=(0.005,))
    assert choices(found) == {} and chosen([*found], {}) == shown(found, {}) == [*found]


def test_a_choice_survives_json():
    found = {"rope": choose({0.002: {0: 3.0, 1: 2.0}, 1e-5: {0: None, 1: 1.0}})}
    study = {"choices": {label: choice.as_json for label, choice in found.items()}}
    assert recorded(json.loads(json.dumps(study))) == found


# ---- the selection text ------------------------------------------------------------------------------------------------


def test_the_loss_of_a_uniform_model_is_the_log_of_its_vocabulary(data):
    for config in (TINY, replace(REVERSE, data=("generated",))):
        task = task_for(config)
        model = build_model(config, "rope", 0)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        loss = selection_loss(model, task.selection(config, data))
        assert loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-5)


def test_selection_examples_are_of_the_training_length_and_nobody_elses():
    task = task_for(REVERSE)
    examples = task.selection(REVERSE, None)
    assert len(examples) == REVERSE.documents
    assert {tuple(examples[i]["input_ids"].shape) for i in range(len(examples))} == {(REVERSE.train_length + 1,)}
    tested, _ = task.tests(REVERSE.train_length, REVERSE.documents)
    assert not any((tested == examples[i]["input_ids"]).all(1).any() for i in range(len(examples)))


# ---- studies -----------------------------------------------------------------------------------------------------------


def test_a_sweep_trains_every_candidate_and_measures_the_chosen(tmp_path):
    planned = plan(replace(SWEEP, seeds=(0, 1)), tmp_path)
    assert len(planned.trials) == 8 and not planned.finished
    outcome, notes = run(replace(SWEEP, seeds=(0, 1)), tmp_path)
    assert outcome.complete and len(outcome.trials) == 4
    study = json.loads((tmp_path / "study.json").read_text())
    found = recorded(study)
    for trial in planned.trials:
        status = trial.status
        assert found[trial.label].losses[trial.rate][trial.seed] == status.selection
        measured = found[trial.label].rate == trial.rate
        assert status.status == ("done" if measured else "trained") and trial.measured == measured
    for choice in found.values():
        means = choice.means
        assert means[choice.rate] == min(means.values()) and study["choices"]
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {(row.label, row.seed, row.learning_rate) for row in rows} == {
        (label, seed, found[label].rate) for label in ("none", "rope") for seed in (0, 1)
    }
    assert plan(replace(SWEEP, seeds=(0, 1)), tmp_path).finished
    assert "tried: widen the sweep" in conclusion(tmp_path) and "widen the" in printed(tmp_path)
    assert [note for note in notes if note.startswith("learning rates, by the loss")]


def test_a_study_with_one_rate_grows_into_a_sweep_and_no_model_is_trained_twice(tmp_path, monkeypatch):
    assert run(TINY, tmp_path / "grown")[0].complete
    first = {trial.name for trial in plan(TINY, tmp_path / "grown").every_trial}
    plain, trained = run_trial.train, []

    def spied(model, config, trial, *rest):
        trained.append(trial.name)
        return plain(model, config, trial, *rest)

    monkeypatch.setattr(run_trial, "train", spied)
    assert run(replace(TINY, learning_rates=(1e-2,)), tmp_path / "grown")[0].complete
    assert len(trained) == 2 and not first & {*trained}
    assert run(SWEEP, tmp_path / "whole")[0].complete
    assert_same_runs(tmp_path / "grown", tmp_path / "whole")
