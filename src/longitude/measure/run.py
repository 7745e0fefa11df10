"""A run directory of measurements: each is written as it comes, and the same command continues where it stopped."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from longitude.checkpoints.load import Checkpoint, load, one_line_of
from longitude.measure import retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, as_json, words
from longitude.measure.key_tokens import TASK as LONGPPL, KeyText
from longitude.measure.perplexity import Reading, reading_of
from longitude.measure.plan import MeasurePlan, Subject, Unit
from longitude.measure.rows import Row, write_rows
from longitude.measure.text import losses_by_length
from longitude.measure.windows import Progress, Resumable
from longitude.runs import journal
from longitude.runs.files import FRESH, atomic, locked, read_json, remove_unfinished, write_json
from longitude.runs.progress import Progress as Watcher
from longitude.runs.provenance import commit_of_code, provenance

SCHEMA = 1
ABOUT, JOURNAL, ROWS, REPORT = "measure.json", "rows.jsonl", "results.parquet", "report.html"
ANSWERS = "answers.jsonl"
KEYS, WINDOWS = "key-tokens.json", "windows.jsonl"
GROWING = ("models", "tasks", "lengths", "depths")
"""Options of which a run directory may be given more, as long as the longest length is the same."""
FREE = ("allow_pickle",)
"""Options that change no number."""


@dataclass(frozen=True)
class Results:
    """What a run directory holds.

    Attributes:
        path: The directory.
        about: measure.json.
        rows: In the order of models, tasks and lengths.
        absent: Why a unit has no row with a value.
        documents: By a unit's key, the sums of each document.
        answers: Of retrieval, in the order of the rows: the model's label, and the fields of an Answer.
        done: Its units.
        failures: Errors of this run, a line each.
    """

    path: Path
    about: dict[str, Any]
    rows: list[Row]
    absent: list[tuple[Unit, str]]
    documents: dict[str, dict[str, Any]]
    done: set[Unit]
    answers: tuple[dict[str, Any], ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        return [each["label"] for each in self.about["models"].values()]


def measure(plan: MeasurePlan, out: Path, watcher: Watcher, fresh: bool = False) -> Results:
    """Measure what is not measured yet, and return all results.

    Each unit that failed is reported in a line and tried again next time; so is one of several checkpoints that cannot be loaded.
    Raises ValueError when another process writes here, when the directory holds other measurements or is damaged (`fresh`
    removes them), or when the only checkpoint cannot be loaded.
    """
    require_place(out)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with removed_if_nothing(out, made), locked(out):
        remove_unfinished(out)
        if fresh:
            for name in (REPORT, ROWS, ANSWERS, JOURNAL, WINDOWS, KEYS, ABOUT):
                (out / name).unlink(missing_ok=True)
        journal.cut(out / JOURNAL)
        journal.cut(out / WINDOWS)
        _open(plan, out)
        run = Run(plan, out, watcher)
        try:
            for subject in plan.subjects:
                run.measure(subject)
        finally:
            results = read_results(out)
            write_rows(results.rows, out / ROWS)
            write_answers(results.answers, out / ANSWERS)
    return replace(results, failures=tuple(run.failures))


@contextmanager
def removed_if_nothing(out: Path, made: bool) -> Iterator[None]:
    """Where nothing was measured because a checkpoint cannot be read, a directory that was made for it goes again."""
    try:
        yield
    except ValueError:
        if made and not (out / JOURNAL).exists():
            rmtree(out)
        raise


class Opened(NamedTuple):
    """A checkpoint in memory, how it reads windows, and the columns of its rows."""

    subject: Subject
    checkpoint: Checkpoint
    reading: Reading
    labels: dict[str, Any]


class Run:
    """The measuring into a directory that this process holds."""

    def __init__(self, plan: MeasurePlan, out: Path, watcher: Watcher):
        self.plan, self.config, self.out, self.watcher = plan, plan.config, out, watcher
        self.finished, self.commit = read_results(out).done, commit_of_code()
        self.failures: list[str] = []
        self.done = 0
        evaluator, context = plan.evaluator, plan.config.evaluator_context
        self.keys = None if evaluator is None else KeyText(out / KEYS, evaluator.content, context)

    def fail(self, sentence: str, units: int) -> None:
        self.failures.append(sentence)
        self.watcher.note(sentence)
        self.done += units

    def measure(self, subject: Subject) -> None:
        """What is missing of one checkpoint."""
        every = self.plan.units(subject)
        units = [unit for unit in every if unit not in self.finished]
        self.done += len(every) - len(units)
        if not units:
            return
        try:
            if any(unit.task == PERPLEXITY for unit in units):
                self.find_keys(subject)
            opened = self.opened(subject)
        except ValueError as error:
            if len(self.plan.subjects) == 1:
                raise
            self.fail(f"{subject.label} was not measured: {one_line_of(error)}", len(units))
            return
        if not opened.reading.finite and any(unit.task != PERPLEXITY for unit in units):  # 0 % would be no answer
            left = [unit for unit in units if unit.task == PERPLEXITY]
            reason = f"{subject.label}: its logits are not finite, so it is not measured; look at its weights"
            self.fail(reason, len(units) - len(left))
            units = left
        for unit in units:
            self.attempt(opened, unit)

    def find_keys(self, subject: Subject) -> None:
        """Let the evaluator find the key tokens of a model's documents, unless they are known."""
        evaluator, documents = self.plan.evaluator, subject.documents
        if evaluator is None or self.keys is None or documents is None or not self.keys.lacks(documents):
            return
        what, opened = f"{evaluator.label} finds key tokens", self.opened(evaluator)
        self.keys.find(
            opened.checkpoint,
            opened.reading.reader,
            evaluator.last,
            documents,
            lambda done, total: self.watcher.update(f"{what}, document {done} of {total}", self.done),
        )

    def attempt(self, opened: Opened, unit: Unit) -> None:
        """One measurement into the journal. Where it fails the next may succeed, and the same command tries it again."""
        label = opened.subject.label
        what = " ".join(str(word) for word in (label, unit.task, unit.length, unit.way) if word)
        self.watcher.update(what, self.done)
        try:
            entry = self.entry(opened, unit, lambda done, total: self.watcher.update(what, self.done + done / total))
        except OSError:  # of the directory, which the next unit needs, too
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line_of(error)}"
            self.fail(f"{label}: {unit.task} at {unit.length} failed, {reason}", 1)
        else:
            journal.append(self.out / JOURNAL, {"unit": unit.key, **asdict(unit), **entry})
            (self.out / WINDOWS).unlink(missing_ok=True)
            self.done += 1
        self.watcher.update(what, self.done)

    def opened(self, subject: Subject) -> Opened:
        """The checkpoint, and how it reads windows. ValueError when it cannot be loaded, or is not causal."""
        config, label = self.config, subject.label
        self.watcher.note(f"{label}: needs {subject.needs}")
        checkpoint = load(subject.model, dtype=config.dtype, device=self.plan.device, allow_pickle=config.allow_pickle)
        if unused := checkpoint.unused:
            why = "tensors of its files have no place in the model, such as"
            self.watcher.note(f"{label}: {len(unused)} {why} {unused[0]}")
        reading = reading_of(checkpoint.model, config.chunk, subject.bos)
        if reading.reason is not None:
            self.watcher.note(f"{label}: windows are read in one pass, because {reading.reason}")
        labels = {"model": subject.model, "encoding": subject.positions, "label": label}
        labels |= {"train_length": subject.trained, "commit": self.commit}
        return Opened(subject, checkpoint, reading, labels)

    def entry(self, opened: Opened, unit: Unit, progress: Progress) -> dict[str, Any]:
        """What the journal keeps of a unit: its rows, or why there are none; for perplexity the sums of every document."""
        last = opened.subject.last
        if last is not None and unit.length > last:
            return {"rows": [], "reason": f"its table of positions ends at {last}"}
        if unit.task == PERPLEXITY:
            return self.perplexity(opened, unit, progress)
        depths = [float(unit.way)] if unit.way else None
        asked = {name: getattr(self.config, name) for name in ("trials", "seed", "chat", "bos")}
        answers: list[dict[str, Any]] = []
        keep = {"on_answer": lambda answer: answers.append(asdict(answer))}
        options = {**asked, **keep, "progress": progress, **opened.labels}
        options["prefill"] = None if opened.reading.reason else self.config.chunk
        try:
            rows = retrieval.run(opened.checkpoint, unit.task, lengths=[unit.length], depths=depths, **options)
            return {"rows": [asdict(row) for row in rows], "answers": answers}
        except ValueError as error:
            return {"rows": [], "reason": one_line_of(error)}

    def perplexity(self, opened: Opened, unit: Unit, progress: Progress) -> dict[str, Any]:
        """All lengths of a measurement score the same targets of every document."""
        documents, reading = opened.subject.documents, opened.reading
        assert documents is not None
        methods = [unit.way]
        if unit.way == "non-overlapping" and self.plan.by_position(unit.length, opened.subject):
            methods = [method for method in self.config.methods if method != "sliding"]
        first, *others = losses_by_length(
            opened.checkpoint.model,
            documents.ids,
            lengths=[unit.length],
            methods=methods,
            stride=self.config.stride,
            span=len(documents.ids[0]) - 1,
            token_bytes=documents.sizes,
            batch_tokens=self.config.batch,
            progress=progress,
            reader=Resumable(reading.reader, self.out / WINDOWS, f"{unit.key} {opened.subject.content}"),
            selected=None if self.keys is None or unit.way != "non-overlapping" else self.keys.of(documents),
        )
        read = {"backend": retrieval.backend_of(opened.checkpoint.config), "prefill": reading.described(unit.length)}
        read["bos"] = "none" if opened.subject.bos is None else "first"
        rows = []
        for each in (first, *others):
            labels: dict[str, Any] = opened.labels | read | ({"task": LONGPPL} if each.selected else {})
            rows.append(each.row(bootstrap_seed=self.config.seed, **labels))
            if each.bytes is not None:
                rows.append(
                    replace(each, bytes=None).row(bootstrap_seed=self.config.seed, **labels)
                )  # perplexity, per token
        if self.keys is not None and unit.way == "non-overlapping" and not any(each.selected for each in others):
            none = f"{self.config.evaluator} finds no token here that needs more than {self.config.evaluator_context} tokens"
            rows.append(
                Row(task=LONGPPL, metric="perplexity", length=unit.length, count=0, reason=none, **opened.labels)
            )
        whole = first.position_from is None and rows[0].value is not None
        sums = {"nats": first.nats.tolist(), "bytes": first.sums[1].tolist()} if whole else None
        return {"rows": [asdict(row) for row in rows], "documents": sums}


# ---- the directory ----------------------------------------------------------------------------------------------------
def require_place(out: Path) -> None:
    """ValueError unless measurements can be written there."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: there is a file of this name; choose another --out")
    if out.is_dir() and not (out / ABOUT).exists() and any(path.name != ".lock" for path in out.iterdir()):
        raise ValueError(f"--out {out}: the directory holds other files and no measurements; choose another --out")


def place_of(plan: MeasurePlan, out: Path, fresh: bool = False) -> Path:
    """Where measurements go that name no folder: `out`, or one with a hash in its name where that holds others."""
    now = _asked(plan)
    try:
        require_place(out)
        saved = None if fresh else read_json(out / ABOUT)
        if saved is not None:
            _require_same(out, saved, now)
    except ValueError:
        asked = {name: value for name, value in now["configuration"].items() if name not in (*FREE, "tasks", "depths")}
        contents = {model: about["content"] for model, about in now["models"].items()}
        question = json.dumps([asked, contents, now["text"]], sort_keys=True)
        digest = hashlib.sha256(question.encode()).hexdigest()[:6]
        return out.with_name(f"{out.name}-{digest}")
    return out


def _asked(plan: MeasurePlan) -> dict[str, Any]:
    """What measure.json says of a plan."""
    models = {subject.model: subject.as_json() for subject in plan.subjects}
    text = None if plan.text is None else {"source": plan.text.source, "sha256": plan.text.sha256}
    return {"configuration": as_json(plan.config), "models": models, "text": text}


def _open(plan: MeasurePlan, out: Path) -> None:
    """Write measure.json, or continue with what is in it."""
    path = out / ABOUT
    here = {"schema": SCHEMA, "begun": datetime.now(UTC).isoformat(timespec="seconds"), "device": plan.device}
    here |= provenance()
    now = _asked(plan)
    text = now["text"]
    saved = read_json(path, FRESH)
    if saved is not None:
        with _whole(path):
            _require_same(out, saved, now)
            here = {key: saved[key] for key in here}
            now["text"] = text or saved["text"]
    write_json(path, here | now)


def _require_same(out: Path, saved: Any, now: dict[str, Any]) -> None:
    """ValueError naming the first option, text or model that differs from those of the run, unless it only grew."""
    remedy = "leave --out out, then it has a folder of its own, or name another --out"
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"{out} holds a measure.json that this release cannot read; {remedy}")
    before = as_json(MeasureConfig()) | saved["configuration"] | {"models": list(saved["models"])}
    for name, value in (now["configuration"] | {"models": list(now["models"])}).items():
        grows = name in GROWING and not set(before[name]) - set(value)
        if name == "lengths":
            grows = grows and before[name][-1] == value[-1]
        if name not in FREE and before[name] != value and not grows:
            raise ValueError(
                f"{out} holds measurements with {name} {words(before[name])}, not {words(value)}; {remedy}"
            )
    if now["text"] is not None and saved["text"] is not None and saved["text"] != now["text"]:
        raise ValueError(f"{out} holds measurements of another text, {saved['text']['source']}; {remedy}")
    measured = {unit.model for unit in read_results(out).done}
    for model, about in saved["models"].items():
        if model in measured and about["content"] != now["models"][model]["content"]:
            raise ValueError(f"{out} holds measurements of {model} as it was before its files changed; {remedy}")


def write_answers(answers: Sequence[dict[str, Any]], path: Path) -> None:
    """A line of JSON for each answer, whole or not at all; no file where there are none."""
    if answers:
        with atomic(path) as unfinished:
            unfinished.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers), "utf-8")


@contextmanager
def _whole(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Whatever is not there, or not as we write it, becomes one ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, *more) as error:
        reason = f"{type(error).__name__}: {one_line_of(error)}"
        raise ValueError(f"{path} is damaged ({reason}); --fresh starts over") from error


def read_results(run: Path) -> Results:
    """What a run directory holds, in the order of its models, tasks and lengths. ValueError when it holds none."""
    about = read_json(run / ABOUT, FRESH)
    if about is None:
        raise ValueError(
            f"{run} holds no measurements: expected a directory with {ABOUT}, as `longitude measure` writes"
        )
    with _whole(run / ABOUT):
        tasks, models = about["configuration"]["tasks"], list(about["models"])
    path = run / JOURNAL
    with _whole(path, ValueError):
        entries = sorted(
            (json.loads(line) for line in journal.lines(path)),
            key=lambda entry: (models.index(entry["model"]), tasks.index(entry["task"]), entry["length"]),
        )
        rows = [Row(**row) for entry in entries for row in entry["rows"]]
        pairs = [(Unit(*(entry[name] for name in ("model", "task", "length", "way"))), entry) for entry in entries]
        absent = [(unit, entry["reason"]) for unit, entry in pairs if entry.get("reason")]
        documents = {unit.key: entry["documents"] for unit, entry in pairs if entry.get("documents")}
        labels = {model: each["label"] for model, each in about["models"].items()}
        answers = [{"model": labels[unit.model], **each} for unit, entry in pairs for each in entry.get("answers", ())]
    return Results(run, about, rows, absent, documents, {unit for unit, _ in pairs}, tuple(answers))
