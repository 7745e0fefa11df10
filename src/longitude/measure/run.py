"""Measure into a run directory: every measurement is a unit of its store, so that the same command continues."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from longitude.checkpoints.load import Checkpoint, load
from longitude.errors import UsageError, one_line_of
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, SAME_TARGETS, as_json
from longitude.measure.endpoint import ServerReader
from longitude.measure.plan import MeasurePlan, Part, Subject
from longitude.measure.rows import Row, write_rows
from longitude.measure.text import losses_by_length
from longitude.measure.transport import SUCH, Refused, Unreachable
from longitude.measure.windows import Progress, Reading, Resumable, reading_of
from longitude.runs.files import atomic, read_json, write_json
from longitude.runs.machine import commit_of_code, provenance
from longitude.runs.store import RESULT, BusyError, Store, Unit
from longitude.runs.terminal import Progress as Watcher
from longitude.statistics.documents import paired_difference

VERB = "measure"
"""The command in the question.json of a measurement."""
ROWS, REPORT, ANSWERS = "results.parquet", "report.html", "answers.jsonl"
WINDOWS = "windows.jsonl"
"""File of a unit in progress: the losses of its passes."""
DIFFERENCE = "bits_per_byte_difference"
"""Metric of a row that compares two contexts."""


class Measured(NamedTuple):
    """Content of a unit, for a model of a question.

    Attributes:
        model: Folder or name of the model.
        reason: Reason why there are no rows.
        documents: For perplexity, the sums of each document: nats, bytes.
        answers: For retrieval, the model's label and the fields of an Answer.
    """

    model: str
    part: Part
    rows: list[Row]
    reason: str | None
    documents: dict[str, list[float]] | None
    answers: list[dict[str, Any]]


@dataclass(frozen=True)
class Results:
    """Results of a question in a run directory.

    Attributes:
        path: The directory.
        question: question.json: models, options, text and machine.
        measured: Measured units, in the order of models, tasks and lengths.
        failures: Errors of this run, a line each.
    """

    path: Path
    question: Mapping[str, Any]
    measured: tuple[Measured, ...]
    failures: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        return [about["label"] for about in self.question["models"].values()]

    @property
    def rows(self) -> list[Row]:
        return [row for unit in self.measured for row in unit.rows]

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for unit in self.measured for answer in unit.answers]


def measure(plan: MeasurePlan, out: Path, watcher: Watcher, fresh: bool = False) -> Results:
    """Measure all units that are missing, and return all results.

    Several processes may do so in one directory: each measures units that no other does. A unit that failed is reported in a
    line and tried again next time; so is one of several checkpoints that cannot be loaded.

    Args:
        plan: Result of `longitude.measure.plan.plan`.
        out: The run directory.
        watcher: Shows progress and notes.
        fresh: Measure the units of this question again.

    Raises:
        ValueError: The directory has other files, a unit of it is damaged, or the only checkpoint cannot be loaded.
    """
    store, question = Store(out), _question(plan)
    run, only = Run(plan, store, watcher), plan.subjects[0]
    if len(plan.subjects) == 1 and (fresh or run.missing(only)):
        run.last = run.opened(only)  # before anything is written: one that cannot be loaded leaves no directory
    store.ask(VERB, question)
    if fresh:
        store.remove(unit for subject in plan.subjects for unit in plan.units(subject).values())
    try:
        run.all()
    finally:
        results = _results(store, question)
        write_rows(results.rows, out / ROWS)
        _write_answers(results, out / ANSWERS)
    return replace(results, failures=tuple(run.failures))


class Opened(NamedTuple):
    """A checkpoint in memory, how it reads windows, and the columns of its rows."""

    subject: Subject
    checkpoint: Checkpoint
    reading: Reading
    labels: dict[str, Any]


class Run:
    """Measures a plan into a store."""

    def __init__(self, plan: MeasurePlan, store: Store, watcher: Watcher):
        self.plan, self.config, self.store, self.watcher = plan, plan.config, store, watcher
        self.commit = commit_of_code()
        self.failures: list[str] = []
        self.failed: set[str] = set()
        self.last: Opened | None = None
        self.total = sum(len(plan.units(subject)) for subject in plan.subjects)

    def all(self) -> None:
        """Measure every missing unit; wait for the units of other processes, or take them over."""
        jobs = {
            (i, part): [unit]
            for i, subject in enumerate(self.plan.subjects)
            for part, unit in self.missing(subject).items()
        }
        for _ in self.store.map(jobs, self.measure):
            pass

    @property
    def done(self) -> int:
        return self.total - sum(len(self.missing(subject)) for subject in self.plan.subjects)

    def missing(self, subject: Subject) -> dict[Part, Unit]:
        units = self.plan.units(subject)
        return {
            part: unit for part, unit in units.items() if unit.key not in self.failed and not self.store.holds(unit)
        }

    def fail(self, sentence: str, *units: Unit) -> None:
        self.failures.append(sentence)
        self.watcher.note(sentence)
        self.failed |= {unit.key for unit in units}

    def measure(self, job: tuple[int, Part]) -> None:
        """Measure one unit of a checkpoint, by its number, unless it is there or cannot be measured."""
        subject, part = self.plan.subjects[job[0]], job[1]
        if part not in (missing := self.missing(subject)):
            return
        if self.last is None or self.last.subject is not subject:
            self.last = None  # its memory is free before the next one is loaded
            try:
                self.last = self.opened(subject)
            except ValueError as error:
                self.fail(f"{subject.label} was not measured: {one_line_of(error)}", *missing.values())
                return
        if part.task != PERPLEXITY and not self.last.reading.finite:  # 0% would be no answer
            reason = f"{subject.label}: its logits are not finite, so it is not measured; look at its weights"
            self.fail(reason, *(unit for part, unit in missing.items() if part.task != PERPLEXITY))
            return
        self.attempt(self.last, part, missing[part])

    def attempt(self, opened: Opened, part: Part, unit: Unit) -> None:
        """Measure one unit. If it fails, the next may succeed, and the same command tries it again."""
        label, done = opened.subject.label, self.done
        what = " ".join(str(word) for word in (label, *part) if word)
        try:
            with self.store.making(unit) as folder:
                self.watcher.update(what, done)
                result = self.result(opened, part, folder, lambda i, total: self.watcher.update(what, done + i / total))
                write_json(folder / RESULT, result)
                (folder / WINDOWS).unlink(missing_ok=True)
            self.watcher.note(f"{what}: done; {done + 1} of {self.total}")
        except (OSError, BusyError):  # of the directory, which the next unit needs, too; or the unit is not ours
            raise
        except Unreachable as error:  # the next unit would fail, too
            raise UsageError("--endpoint", SUCH, str(error), "the same command continues") from None
        except Exception as error:  # a server's answer is no error of our code: it has no class
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            self.fail(f"{label}: {part.task} at {part.length} failed, {kind}{one_line_of(error)}", unit)
        self.watcher.update(what, done + 1)

    def opened(self, subject: Subject) -> Opened:
        """The checkpoint, and how it reads windows. ValueError when it cannot be loaded, or is not causal."""
        config, label = self.config, subject.label
        labels = {"model": subject.model, "encoding": subject.positions, "label": label}
        labels |= {"train_length": subject.trained, "commit": self.commit}
        if (server := self.plan.server) is not None:
            reader = ServerReader(server, self.plan.tokenizer, subject.bos)
            served = Checkpoint(reader.model, self.plan.tokenizer, reader.model.config, server.url)
            return Opened(subject, served, Reading(reader, None, finite=True), labels)
        self.watcher.note(f"{label}: needs {subject.needs}")
        checkpoint = load(subject.model, dtype=config.dtype, device=self.plan.device)
        if unused := checkpoint.unused:
            why = "tensors of its files have no place in the model, such as"
            self.watcher.note(f"{label}: {len(unused)} {why} {unused[0]}")
        reading = reading_of(checkpoint.model, config.chunk, subject.bos)
        if reading.reason is not None:
            self.watcher.note(f"{label}: windows are read in one pass, because {reading.reason}")
        return Opened(subject, checkpoint, reading, labels)

    def result(self, opened: Opened, part: Part, folder: Path, progress: Progress) -> dict[str, Any]:
        """Content of a unit: its rows, or the reason why there are none; for perplexity the sums of every document."""
        last = opened.subject.last
        if last is not None and part.length > last:
            return {"rows": [], "reason": f"its table of positions ends at {last}"}
        if part.task == PERPLEXITY:
            return self.perplexity(opened, part, folder, progress)
        return self.answers(opened, part, progress)

    def answers(self, opened: Opened, part: Part, progress: Progress) -> dict[str, Any]:
        """Ask the questions of a task; the reason, if it has none at this length."""
        answers: list[retrieval.Answer] = []
        options: dict[str, Any] = {name: getattr(self.config, name) for name in ("trials", "seed", "chat", "bos")}
        options |= {"prefill": None if opened.reading.reason or self.plan.server else self.config.chunk}
        options |= {"server": self.plan.server, "progress": progress, "on_answer": answers.append, **opened.labels}
        depths = [float(part.way)] if part.way else None
        try:
            rows = [*retrieval.run(opened.checkpoint, part.task, lengths=[part.length], depths=depths, **options)]
        except ValueError as error:
            return {"rows": [], "reason": one_line_of(error)}
        counts = {
            "are empty": sum(not answer.generated.strip() for answer in answers),
            "ended at the limit of their tokens": sum(answer.at_limit for answer in answers),
        }
        for what, count in counts.items():
            if count and self.plan.server is not None:
                which = f"{count} of {len(answers)} answers to {part.task} at {part.length} {what}"
                self.watcher.note(f"{opened.subject.label}: {which}; if the model thinks first, give more --thinking")
        return {"rows": [asdict(row) for row in rows], "answers": [asdict(answer) for answer in answers]}

    def perplexity(self, opened: Opened, part: Part, folder: Path, progress: Progress) -> dict[str, Any]:
        """Measure perplexity; all lengths of a measurement score the same targets of every document."""
        documents, reading = opened.subject.documents, opened.reading
        assert documents is not None
        methods = [part.way]
        if part.way == "non-overlapping" and self.plan.by_position(part.length, opened.subject):
            methods = [method for method in self.config.methods if method not in ("sliding", SAME_TARGETS)]
        first, *others = losses_by_length(
            opened.checkpoint.model,
            documents.ids,
            lengths=[part.length],
            methods=methods,
            stride=self.config.stride if part.way == "sliding" else None,
            targets=self.plan.targets if part.way == SAME_TARGETS else None,
            span=len(documents.ids[0]) - 1,
            token_bytes=documents.sizes,
            batch_tokens=self.config.concurrency * part.length if self.plan.server else self.config.batch,
            progress=progress,
            reader=Resumable(reading.reader, folder / WINDOWS),
        )
        read = {"backend": retrieval.backend_of(opened.checkpoint.config), "prefill": reading.described(part.length)}
        read["bos"] = "none" if opened.subject.bos is None else "first"
        rows = []
        labels = opened.labels | read
        for losses in (first, *others):
            if not losses.tokens.sum():
                continue
            rows.append(losses.row(bootstrap_seed=self.config.seed, **labels))
            if losses.bytes is not None:  # perplexity, per token
                rows.append(replace(losses, bytes=None).row(bootstrap_seed=self.config.seed, **labels))
        whole = first.method != "per-position" and rows[0].value is not None
        sums = {"nats": first.nats.tolist(), "bytes": first.sums[1].tolist()} if whole else None
        return {"rows": [asdict(row) for row in rows], "documents": sums}


# ---- questions and results -------------------------------------------------------------------------------------------
def _question(plan: MeasurePlan) -> dict[str, Any]:
    """Content of question.json: options, models and text, and the units that answer it, in order."""
    text = None if plan.text is None else {"source": plan.text.source, "sha256": plan.text.sha256}
    units = [
        {"model": subject.model, **part._asdict(), "kind": unit.kind, "key": unit.key}
        for subject in plan.subjects
        for part, unit in plan.units(subject).items()
    ]
    asked = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "device": plan.device} | provenance()
    models = {subject.model: subject.as_json() for subject in plan.subjects}
    return asked | {"configuration": as_json(plan.config), "models": models, "text": text, "units": units}


def is_measured(run: Path) -> bool:
    """Whether the last question in a directory is of `longitude measure`."""
    question = Store(run).question()
    return question is not None and question.get("verb") == VERB


def read_results(run: Path) -> Results:
    """Results of the last question in a run directory. ValueError if it has none."""
    if not is_measured(run):
        raise ValueError(f"{run} has no measurements: expected a directory that `longitude measure` wrote")
    return _results(Store(run), Store(run).question())


def _results(store: Store, question: Mapping[str, Any]) -> Results:
    """The finished units of a question, for the models that it names."""
    measured = []
    for unit in question["units"]:
        if (folder := store.find(unit["kind"], unit["key"])) is not None:
            part = Part(unit["task"], unit["length"], unit["way"])
            measured.append(_measured(folder, unit["model"], question["models"][unit["model"]]["label"], part))
    return Results(store.run, question, tuple(_compared(measured, question)))


def least_context(question: Mapping[str, Any]) -> int:
    """The shortest windows of same-targets that were asked for; 0 without the method."""
    return min((unit["length"] for unit in question["units"] if unit["way"] == SAME_TARGETS), default=0)


def _compared(measured: list[Measured], question: Mapping[str, Any]) -> Iterator[Measured]:
    """Add a row of the difference from the shortest context to each longer one, on the same targets, paired over documents.

    A model that was not measured at the shortest has none, since its differences would have another base.
    """
    least, seed = least_context(question), question["configuration"]["seed"]
    sums = {
        (unit.model, unit.part.length): (unit.documents["nats"], unit.documents["bytes"])
        for unit in measured
        if unit.part.way == SAME_TARGETS and unit.documents and unit.rows
    }
    for unit in measured:
        ours, base = sums.get((unit.model, unit.part.length)), sums.get((unit.model, least))
        if unit.part.way == SAME_TARGETS and unit.part.length != least and ours and base:
            value, low, high = paired_difference(ours, base, seed=seed)
            changed = {"metric": DIFFERENCE, "method": f"{SAME_TARGETS}, less those at {least}"}
            row = replace(unit.rows[0], **changed, value=value, low=low, high=high)
            unit = unit._replace(rows=[*unit.rows, row])
        yield unit


def _measured(folder: Path, model: str, label: str, part: Part) -> Measured:
    """A unit's result, with the name and the label that its model has in the question."""
    saved = read_json(folder / RESULT)
    rows = [replace(Row(**row), model=model, label=label) for row in saved["rows"]]
    answers = [{"model": label, **answer} for answer in saved.get("answers", ())]
    return Measured(model, part, rows, saved.get("reason"), saved.get("documents"), answers)


def _write_answers(results: Results, path: Path) -> None:
    """A line of JSON for each answer, whole or not at all; no file if there are none."""
    path.unlink(missing_ok=True)
    if results.answers:
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in results.answers]
        with atomic(path) as unfinished:
            unfinished.write_text("".join(lines), "utf-8")
