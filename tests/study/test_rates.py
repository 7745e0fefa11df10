"""A learning rate for each label: the rule, and that the tested lengths and the order of events have no part in the choice."""

import math
from dataclasses import replace

import pytest
import torch

from longitude.measure import read_rows
from longitude.measure.rows import from_frame
from longitude.runs.store import Store
from longitude.study import run_trial
from longitude.study.plan import plan
from longitude.study.rates import Choice, choices, choose, chosen, chosen_rates, edges, shown
from longitude.study.results import read_run, status_of
from longitude.study.tasks.base import task_for
from longitude.study.train import build_model, selection_loss
from longitude.study.trial import Status, Trial, trials_of
from tests.study.conftest import COPY, TINY, conclusion, printed, run

pytestmark = pytest.mark.usefixtures("numbers")
TINY = replace(TINY, test_lengths=(16, 32), methods=("non-overlapping",))
SWEEP = replace(TINY, learning_rates=(5e-3, 1e-2))
ROPE = replace(SWEEP, encodings=("rope",))


# ---- the rule ----------------------------------------------------------------------------------------------------------
def test_the_lowest_loss_is_chosen_and_of_equal_ones_the_lower_rate():
    losses = {0.002: 2.5, 0.004: 2.25, 0.008: 2.4}
    assert choose(losses) == Choice(0.004, losses)
    for order in ((0.008, 0.002), (0.002, 0.008)):
        assert choose(dict.fromkeys(order, 2.0)).rate == 0.002
    # nor one at which it diverged
    assert choose({0.002: 3.0, 0.004: None}).rate == 0.002
    assert choose({0.004: None}).rate is None


def test_an_end_of_the_sweep_is_named():
    found = {
        label: choose({rate: 2.0 + (rate != best) for rate in (0.002, 0.004, 0.008)})
        for label, best in (("a", 0.002), ("b", 0.004), ("c", 0.008), ("d", 0.008))
    } | {"e": Choice(None, {0.002: None})}
    assert [found[label].edge for label in "abcde"] == ["lowest", None, "highest", "highest", None]
    assert chosen_rates(found)[0].endswith(": a 0.002, b 0.004, c 0.008, d 0.008")
    assert [line.partition(": ")[2] for line in edges(found)] == ["e", "a", "c, d"]


def statuses(losses: dict[tuple[str, int, float], float | str | None], **options) -> dict[Trial, Status]:
    """(label, seed, rate) -> loss on the selection text; None where it diverged, else a status."""
    config = replace(SWEEP, seeds=(0, 1), **options)
    found = {}
    for trial in trials_of(config):
        loss = losses.get((trial.label, trial.seed, trial.rate), 2.0)
        state = "trained" if isinstance(loss, float) else loss or "diverged"
        selection = loss if isinstance(loss, float) else None
        found[trial] = Status(state, trial.label, trial.seed, trial.rate, selection=selection)
    return found


def test_nothing_is_chosen_before_every_candidate_has_ended():
    found = statuses({("rope", 0, 0.01): 1.0, ("nope", 1, 0.01): 1.0, ("rope", 1, 0.005): "not run"})
    assert {label: choice.rate for label, choice in choices(found).items()} == {"nope": 0.005, "rope": 0.01}
    for state in ("failed", "running", "not run"):
        found = statuses({("rope", 0, 0.01): state})
        assert [*choices(found)] == ["nope"]
        assert {(trial.label, trial.rate) for trial in chosen([*found], choices(found))} == {("nope", 0.005)}
        assert {(t.label, t.rate) for t in shown(found, choices(found))} == {("nope", 0.005), ("rope", 0.01)}


# ---- the selection text ------------------------------------------------------------------------------------------------
def test_the_loss_of_a_uniform_model_is_the_log_of_its_vocabulary(data):
    for config in (TINY, replace(COPY, data=("generated",))):
        task = task_for(config)
        model = build_model(config, "rope", 0)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        loss = selection_loss(model, task.selection(config, data))
        assert loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-5)


def test_selection_examples_are_of_the_training_length_and_nobody_elses():
    task = task_for(COPY)
    examples = task.selection(COPY, None)
    assert len(examples) == COPY.documents
    assert {tuple(examples[i]["input_ids"].shape) for i in range(len(examples))} == {(2 * COPY.train_length + 1,)}
    tested = torch.from_numpy(task.tests(COPY.train_length, COPY.documents).tokens)
    assert not any((tested == examples[i]["input_ids"]).all(1).any() for i in range(len(examples)))


# ---- studies -----------------------------------------------------------------------------------------------------------
def states_of(planned) -> dict[Trial, Status]:
    """How far each trial is, by its units."""
    store = Store(planned.run)
    return {units.trial: status_of(store, units.keys) for units in planned.trials}


def test_a_sweep_trains_every_candidate_and_measures_the_chosen(tmp_path):
    planned = plan(replace(ROPE, seeds=(0, 1)), tmp_path)
    assert len(planned.trials) == 4
    outcome, notes = run(replace(ROPE, seeds=(0, 1)), tmp_path)
    assert outcome.complete and len(outcome.trials) == 2
    found = read_run(tmp_path).choices
    for trial, status in states_of(planned).items():
        choice = found[trial.label]
        assert status.status == ("done" if choice.rate == trial.rate else "not run" if trial.seed else "trained")
        assert trial.seed or choice.losses[trial.rate] == status.selection
    for choice in found.values():
        assert choice.losses[choice.rate] == min(choice.losses.values())
    rows = from_frame(read_rows(tmp_path / "results.parquet"))
    assert {(row.label, row.seed) for row in rows} == {("rope", 0), ("rope", 1)}
    assert {row.learning_rate for row in rows} == {found["rope"].rate}
    assert "widen the sweep" in conclusion(tmp_path).caution
    assert [note for note in notes if note.startswith("learning rates, by the loss")]


@pytest.fixture
def losses(monkeypatch):
    """Rate -> loss on the selection text, instead of what the model has; a rate that is not in it keeps the model's."""
    found: dict[float, float] = {}
    plain, train = run_trial.selection_loss, run_trial.TrialRunner.train

    def trained(self, trial, *rest, **named):
        with monkeypatch.context() as patched:
            patched.setattr(run_trial, "selection_loss", lambda *of: found.get(trial.rate) or plain(*of))
            return train(self, trial, *rest, **named)

    monkeypatch.setattr(run_trial.TrialRunner, "train", trained)
    return found


def rates_of(path) -> list[float | None]:
    """Of the rows, in their order."""
    return list(dict.fromkeys(row.learning_rate for row in from_frame(read_rows(path / "results.parquet"))))


@pytest.mark.slow
def test_another_rate_makes_the_choice_anew_and_rows_of_the_old_one_leave(tmp_path, losses):
    losses |= {0.005: 2.0, 0.01: 2.5, 0.002: 1.0}
    assert run(ROPE, tmp_path)[0].complete
    assert rates_of(tmp_path) == [0.005]
    three = replace(ROPE, learning_rates=(0.005, 0.01, 0.002))
    outcome, notes = run(three, tmp_path)
    assert outcome.complete and {trial.rate for trial in outcome.trials} == {0.002} == {*rates_of(tmp_path)}
    assert any("widen the sweep" in note and "lowest" in note for note in notes)
    assert {row.learning_rate for row in read_run(tmp_path).rows} == {0.002}
    longer = replace(three, test_lengths=(16, 48))
    assert run(longer, tmp_path)[0].complete  # what is not chosen is not measured again
    ended = {trial.rate: status.status for trial, status in states_of(plan(longer, tmp_path)).items()}
    assert ended == {0.005: "trained", 0.01: "trained", 0.002: "done"}
    assert run(ROPE, tmp_path)[0].complete and rates_of(tmp_path) == [0.005]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_never_chosen(tmp_path, losses):
    losses |= {0.005: math.nan, 0.01: 9.0}
    outcome, _ = run(ROPE, tmp_path)
    assert outcome.complete and rates_of(tmp_path) == [0.01]
    losses |= {0.01: math.inf}
    outcome, notes = run(ROPE, tmp_path / "none")
    assert not outcome.complete and [trial.status for trial in outcome.trials] == ["diverged"]
    assert any("diverged at every learning rate: rope" in note for note in notes)
    assert "diverged" in printed(tmp_path / "none")


@pytest.mark.slow
def test_tested_lengths_have_no_part_in_the_choice(tmp_path, losses, monkeypatch):
    losses |= {0.005: 1.0, 0.01: 2.0, 0.02: 3.0}
    monkeypatch.setattr(run_trial.TrialRunner, "write", lambda *_: (False, None))
    for changes in ({}, {"test_lengths": (16, 32, 48)}, {"learning_rates": (5e-3, 1e-2, 0.02)}):
        outcome, _ = run(replace(ROPE, **changes), tmp_path)
        assert {(trial.rate, trial.status) for trial in outcome.trials} == {(0.005, "diverged")}
