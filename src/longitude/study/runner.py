"""Run a study: make the units of its question that are missing, and read its results from all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from math import log
from pathlib import Path
from time import monotonic
from typing import Any

from longitude import plugins
from longitude.measure import write_rows
from longitude.native import load
from longitude.runs.files import out_of_space, write_json
from longitude.runs.machine import commit_of_code, provenance
from longitude.runs.store import Ends, Store
from longitude.study import rates
from longitude.study.data import BLOCKS
from longitude.study.executors import Executor, in_process
from longitude.study.ngrams import ngrams_of
from longitude.study.rates import candidates, choices, chosen, is_candidate, models_trained
from longitude.study.results import FAILURE, ROWS, VERB, Run, run_of, status_of
from longitude.study.run_trial import Note, TrialRunner, ignore
from longitude.study.tasks.base import task_for
from longitude.study.train import recipe
from longitude.study.trial import Status, Trial
from longitude.study.units import StudyPlan, TrialUnits, plain

ENDED = ("done", "diverged")
Watch = Callable[[Mapping[str, float], float, float], None]
"""Called with the running parts and the share done of each, the amount of work done, and the whole amount."""


def study(
    planned: StudyPlan,
    fresh: bool = False,
    on_progress: Watch = ignore,
    note: Note = ignore,
    executor: Executor = in_process,
    command: str | None = None,
) -> Run:
    """Run the trials that are not finished yet, and gather all rows.

    A trial that raises is recorded as failed with its reason, and tried again by the next call; a diverged one is a result.
    Several processes may run the same study in one folder: each runs the trials that no other process runs.

    Args:
        planned: Result of `plan`.
        fresh: Train the models of this question again.
        on_progress: Called with the running trials and the share done of each, the trials done, in fractions, and their number.
        note: Called with a sentence about the study, and about every trial when it ends.
        executor: Executor of the trials; it changes no result.
        command: The command line that asked for it, for the report.

    Returns:
        Every trial with its status, at the learning rate of its label, and the rows.

    Raises:
        ValueError: The directory has other files, a unit is damaged, or the disk is full; nothing is then half-written.
    """
    store, question = Store(planned.run), question_for(planned, command)
    with _full_disk_is_a_user_error(planned.run):
        store.ask(VERB, question)
        if fresh:
            store.remove(unit for units in planned.trials for unit in (units.training, units.measuring))
        store.results([planned.ngrams], lambda i, folder: ngrams_of(planned.config, planned.data), dict[int, float])
        if (missing := load.without_kernels()) is not None:
            note(missing)
        note(_introduction(planned))
        run = run_of(store, question, Trials(planned, store, executor, on_progress, note).run())
        write_rows(run.rows, planned.run / ROWS)
        return run


def question_for(planned: StudyPlan, command: str | None = None) -> dict[str, Any]:
    """Content of question.json: options and keys of units, in order."""
    config = planned.config
    keys = {units.trial: {"training": units.training.key, "measuring": units.measuring.key} for units in planned.trials}
    return plain(
        {
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            **provenance(),
            "command": command,
            "plugins": plugins.records(config.task, *config.encodings, *config.methods),
            "configuration": asdict(config),
            "data": planned.data.description,
            "models": planned.models,
            "recipe": recipe(config),
            "trials": [asdict(trial) | names for trial, names in keys.items()],
            "ngrams": planned.ngrams.key,
        }
    )


class Trials:
    """Runs all trials of a plan in order, and keeps the status of each."""

    def __init__(self, planned: StudyPlan, store: Store, executor: Executor, on_progress: Watch, note: Note):
        self.planned, self.store, self.executor = planned, store, executor
        self.on_progress, self.note = on_progress, note
        self.commit = commit_of_code()
        self.statuses = {units.trial: status_of(store, units.keys) for units in planned.trials}
        config = planned.config
        sweeps = len(config.learning_rates) > 1
        self.swept = {*candidates([*self.statuses])} if sweeps else set[Trial]()
        self.total = len(config.encodings) * len(config.seeds) + len(self.swept)
        self.done = self.ended = 0
        self.begun = monotonic()
        self.running: dict[Trial, tuple[float, str]] = {}

    def run(self) -> dict[Trial, Status]:
        """With several learning rates, train every candidate and choose; then train and measure the chosen trials."""
        every = self.planned.trials
        self.complete([units for units in every if units.trial in self.swept], is_candidate, train_only=True)
        choice = choices(self.statuses)
        for text in (*rates.chosen_rates(choice), *rates.edges(choice)):
            self.note(text)
        final = {*chosen([units.trial for units in every], choice)}
        for trial in final:
            if self.statuses[trial].status in ENDED:
                self.note(self.sentence(trial))
        last = [units for units in every if units.trial in final]
        self.complete(last, lambda status: status.status in ENDED, train_only=False)
        return self.statuses

    def complete(self, part: Sequence[TrialUnits], ended: Callable[[Status], bool], train_only: bool) -> None:
        """Run the trials that have not ended. Those of another process come last, and are taken over if it dies."""
        jobs = {units: (units.training, units.measuring) for units in part if not ended(self.statuses[units.trial])}
        self.done += len(part) - len(jobs)
        runner = TrialRunner(self.planned.config, self.planned.data, self.store, self.commit, train_only)

        def execute(runner: TrialRunner, trials: Sequence[TrialUnits]) -> Ends[TrialUnits, Status | str]:
            return self.executor(runner, trials, self.report, self.note)

        for units, status in self.store.map(jobs, runner, execute):
            self.end(units, status)

    def report(self, units: TrialUnits, share: float, part: str) -> None:
        self.running[units.trial] = share, f"{units.trial.label} {units.trial.seed}  {part}"
        parts = {line: done for done, line in self.running.values()}
        self.on_progress(parts, self.done + sum(parts.values()), self.total)

    def end(self, units: TrialUnits, status: Status | str) -> None:
        """Record the end of a trial; a string is the reason why nothing is recorded."""
        trial = units.trial
        if isinstance(status, str):
            status = self.record_failure(units, status)
        self.statuses[trial] = status
        self.report(units, 1, status.status)
        del self.running[trial]
        self.done += 1
        minutes = (monotonic() - self.begun) / 60
        self.ended += 1
        left = minutes / self.ended * (self.total - self.done)
        self.note(f"{self.sentence(trial)}; {self.done} of {self.total}, about {left:.0f} min left")

    def sentence(self, trial: Trial) -> str:
        """How a trial ended; its loss is that on the selection text, which no result of the study uses."""
        status, config = self.statuses[trial], self.planned.config
        if status.status not in ("trained", "done"):
            return f"{trial.title}: {status.status}, {status.reason}"
        state = status.status
        if status.selection is not None:
            unit = task_for(config).loss_unit
            state += f", {status.selection / log(2):.2f} bits per {unit} at {config.train_length} on the selection text"
        return "; ".join(filter(None, (f"{trial.title}: {state}", status.untrained, status.reason)))

    def record_failure(self, units: TrialUnits, reason: str) -> Status:
        """Record the failure of a trial with a killed process, in the folder of its current unit."""
        unit = units.measuring if self.store.holds(units.training) else units.training
        status, folder = units.trial.status("failed", 0, reason=reason), self.store.unfinished(unit.kind, unit.key)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FAILURE, asdict(status))
        return status


# ---- in words --------------------------------------------------------------------------------------------------------
def _introduction(planned: StudyPlan) -> str:
    config, data = planned.config, planned.data.description
    task = task_for(config)
    trained = f"{config.steps * config.batch_size * (1 if task.generated else config.train_length):,}"
    if task.generated:
        trained += f" examples ({data['source']})"
        measured = f"{data['test_examples_of_each_length']} of each length"
    else:
        trained += f" {task.unit} of {data['source']}"
        things = f"{data['validation_documents']} {BLOCKS if BLOCKS in data['unit'] else 'documents'}"
        measured = f"{things} with {data['validation_windows']} windows of {config.longest}"
    trained += f" from {config.start}" if config.start else ""
    several = len(config.learning_rates)
    measured = f"measured on {measured}" + (f" at the best of {several} learning rates" if several > 1 else "")
    models = (
        f"{models_trained(config)} models ({config.hidden} x {config.layers}), each trained at {config.train_length}"
    )
    return f"{models} on {trained} and {measured}; {planned.run}"


@contextmanager
def _full_disk_is_a_user_error(run: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or not out_of_space(error, run):
            raise
        remedy = "free some, then the same command continues where it stopped"
        raise ValueError(f"no space left on the disk of {run}; {remedy}") from error
