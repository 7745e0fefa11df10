"""A run directory of measurements: every one is written as it comes, and the same command goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longitude.checkpoints.load import Checkpoint, load, one_line_of
from longitude.measure import perplexity, retrieval
from longitude.measure.config import PERPLEXITY, MeasureConfig, as_dict
from longitude.measure.perplexity import Reading, reading_of
from longitude.measure.plan import MeasurePlan, Subject, Unit
from longitude.measure.rows import Row, write_rows
from longitude.runs.files import FRESH, flush, locked, read_json, remove_unfinished, write_json
from longitude.runs.provenance import commit_of_code, machine, versions

SCHEMA = 1
ABOUT, JOURNAL, ROWS, REPORT = "measure.json", "rows.jsonl", "results.parquet", "report.html"
GROWING = ("models", "tasks", "lengths", "depths")
"""Options of which a run directory may be given more, as long as the longest length is the same."""
FREE = ("allow_pickle",)
"""Options that change no number."""


class Watcher:
    """Hears how a measurement goes on; this one ignores it."""

    def begun(self, unit: Unit, left: int) -> None: ...

    def skipped(self, units: int) -> None: ...

    def read(self, done: int, total: int) -> None: ...

    def ended(self, unit: Unit) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass(frozen=True)
class Results:
    """What a run directory holds. absent: why a unit has no row with a value, by its key; documents: the sums of each;
    done: its units; failures: what went wrong this time, a line each.
    """

    path: Path
    about: dict[str, Any]
    rows: list[Row]
    absent: list[tuple[Unit, str]]
    documents: dict[str, dict[str, Any]]
    done: set[Unit]
    failures: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        return [each["label"] for each in self.about["models"].values()]


def measure(
    plan: MeasurePlan, out: Path, fresh: bool = False, watcher: Watcher | None = None
) -> tuple[Results, list[str]]:
    """Measure what is not measured yet. Returns all results, and a line about each unit that failed (tried again next time),
    or about one of several checkpoints that cannot be loaded.

    Raises ValueError when another process writes here, when the directory holds other measurements or is damaged (`fresh`
    removes them), or when the only checkpoint cannot be loaded.
    """
    watcher = watcher or Watcher()
    require_place(out)
    out.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with locked(out):
        remove_unfinished(out)
        if fresh:
            for name in (REPORT, ROWS, JOURNAL, ABOUT):
                (out / name).unlink(missing_ok=True)
        _cut(out / JOURNAL)
        _open(plan, out)
        commit = commit_of_code()
        done = read_results(out).done
        try:
            for subject in plan.subjects:
                units = [unit for unit in plan.units(subject) if unit not in done]
                watcher.skipped(len(plan.units(subject)) - len(units))
                if not units:
                    continue
                try:
                    checkpoint, reading = _opened(plan, subject, watcher)
                except ValueError as error:
                    if len(plan.subjects) == 1:
                        raise
                    failures.append(f"{subject.label} was not measured: {one_line_of(error)}")
                    watcher.note(failures[-1])
                    watcher.skipped(len(units))
                    continue
                failures += _measure(plan, subject, units, checkpoint, reading, out, commit, watcher)
        finally:
            results = read_results(out)
            write_rows(results.rows, out / ROWS)
    return replace(results, failures=tuple(failures)), failures


def _opened(plan: MeasurePlan, subject: Subject, watcher: Watcher) -> tuple[Checkpoint, Reading]:
    """The checkpoint, and how it reads windows. ValueError when it cannot be loaded, or is not causal."""
    watcher.note(f"{subject.label}: needs {subject.needs}")
    checkpoint = load(subject.model, dtype=plan.config.dtype, device=plan.device, allow_pickle=plan.config.allow_pickle)
    if checkpoint.unused:
        watcher.note(
            f"{subject.label}: {len(checkpoint.unused)} tensors of its files have no place in the model, such as "
            f"{checkpoint.unused[0]}"
        )
    reading = reading_of(checkpoint.model, plan.config.piece)
    if reading.reason is not None:
        watcher.note(f"{subject.label}: windows are read in one pass, because {reading.reason}")
    return checkpoint, reading


def _measure(
    plan: MeasurePlan,
    subject: Subject,
    units: list[Unit],
    checkpoint: Checkpoint,
    reading: Reading,
    out: Path,
    commit: str | None,
    watcher: Watcher,
) -> list[str]:
    failures = []
    asked = [unit for unit in units if unit.task == PERPLEXITY or reading.finite]
    if len(asked) < len(units):  # 0 % would be no answer to the questions
        failures.append(f"{subject.label}: its logits are not finite, so nothing is asked of it; look at its weights")
        watcher.note(failures[-1])
        watcher.skipped(len(units) - len(asked))
        units = asked
    for i, unit in enumerate(units):
        watcher.begun(unit, len(units) - i)
        try:
            entry = _entry(plan, subject, unit, checkpoint, reading, commit, watcher)
        except Exception as error:  # the next unit may go well; this one is tried again by the same command
            failures.append(
                f"{subject.label}: {unit.task} at {unit.length} failed, {type(error).__name__}: {one_line_of(error)}"
            )
            watcher.note(failures[-1])
        else:
            _append(out / JOURNAL, {"unit": unit.key, **asdict(unit), **entry})
        watcher.ended(unit)
    return failures


def _entry(
    plan: MeasurePlan,
    subject: Subject,
    unit: Unit,
    checkpoint: Checkpoint,
    reading: Reading,
    commit: str | None,
    watcher: Watcher,
) -> dict[str, Any]:
    """What the journal keeps of a unit: its rows, or why there are none; for perplexity the sums of every document."""
    config = plan.config
    if subject.last is not None and unit.length > subject.last:
        return {"rows": [], "reason": f"its table of positions ends at {subject.last}"}
    labels = {
        "model": subject.model,
        "encoding": subject.positions,
        "label": subject.label,
        "train_length": subject.trained,
        "commit": commit,
    }
    if unit.task == PERPLEXITY:
        assert subject.documents is not None
        methods = (unit.way,)
        if unit.way == "non-overlapping" and plan.by_position(unit.length, subject):
            methods = tuple(method for method in config.methods if method != "sliding")
        losses = perplexity.measure(
            checkpoint, subject.documents, reading, length=unit.length, methods=methods, stride=config.stride,
            batch=config.batch, progress=watcher.read,
        )  # fmt: skip
        labels |= {"backend": _backend(checkpoint), "prefill": reading.words(unit.length)}
        rows = [each.row(bootstrap_seed=config.seed, **labels) for each in losses]
        flat = losses[0]
        sums = {"nats": flat.nats.tolist(), "bytes": flat.sums[1].tolist()} if flat.position_from is None else None
        return {"rows": [asdict(row) for row in rows], "documents": sums if rows[0].value is not None else None}
    depths = [float(unit.way)] if unit.way else None
    size = None if reading.reason else config.piece
    try:
        rows = list(
            retrieval.run(
                checkpoint, unit.task, lengths=[unit.length], depths=depths, trials=config.trials, seed=config.seed,
                prefill=size, progress=watcher.read, **labels,
            )
        )  # fmt: skip
    except ValueError as error:
        return {"rows": [], "reason": one_line_of(error)}
    return {"rows": [asdict(row) for row in rows]}


def _backend(checkpoint: Checkpoint) -> str | None:
    config = checkpoint.config
    return getattr(config, "attention_backend", None) or getattr(config, "_attn_implementation", None)


# ---- the directory ----------------------------------------------------------------------------------------------------


def require_place(out: Path) -> None:
    """ValueError unless measurements can be written there."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: there is a file of this name; choose another --out")
    if out.is_dir() and not (out / ABOUT).exists() and any(path.name != ".lock" for path in out.iterdir()):
        raise ValueError(f"--out {out}: the directory holds other files and no measurements; choose another --out")


def _open(plan: MeasurePlan, out: Path) -> None:
    """Write measure.json, or go on with what it says."""
    path = out / ABOUT
    saved = read_json(path, FRESH)
    options = json.loads(json.dumps(as_dict(plan.config)))
    models = {
        subject.model: {
            "label": subject.label,
            "positions": subject.positions,
            "trained": subject.trained,
            "content": subject.content,
            "unit": subject.documents.unit if subject.documents else None,
            "documents": len(subject.documents.ids) if subject.documents else None,
            "adds_bos": subject.adds_bos,
        }
        for subject in plan.subjects
    }
    text = None if plan.text is None else {"source": plan.text.source, "sha256": _digest(plan)}
    here = {"versions": versions(), "commit": commit_of_code(), "machine": machine(), "device": plan.device}
    about = {"schema": SCHEMA, "begun": datetime.now(UTC).isoformat(timespec="seconds"), **here}
    if saved is not None:
        with _whole(path):
            options, models = _continued(out, saved, options, models, text)
            about = {key: saved[key] for key in about}
            text = text or saved["text"]
    write_json(path, about | {"configuration": options, "models": models, "text": text})


def _continued(
    out: Path, saved: Any, options: dict[str, Any], models: dict[str, Any], text: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and models of a run that grew. ValueError naming the first that differs."""
    remedy = "--fresh starts over, another --out keeps both"
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"{out} holds a measure.json that this release cannot read; {remedy}")
    old = json.loads(json.dumps(as_dict(MeasureConfig()))) | saved["configuration"]
    before, now = old | {"models": list(saved["models"])}, options | {"models": list(models)}
    for name in now:
        grows = name in GROWING and not set(before[name]) - set(now[name])
        if name == "lengths":
            grows = grows and before[name][-1] == now[name][-1]
        if name not in FREE and before[name] != now[name] and not grows:
            raise ValueError(
                f"{out} holds measurements with {name} {_said(before[name])}, not {_said(now[name])}; {remedy}"
            )
    if text is not None and saved["text"] is not None and saved["text"] != text:
        raise ValueError(f"{out} holds measurements of another text, {saved['text']['source']}; {remedy}")
    measured = {unit.model for unit in read_results(out).done}
    for model, about in saved["models"].items():
        if model in measured and about["content"] != models[model]["content"]:
            raise ValueError(f"{out} holds measurements of {model} as it was before its files changed; {remedy}")
    return options, models


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _digest(plan: MeasurePlan) -> str:
    assert plan.text is not None
    digest = hashlib.sha256()
    for name, content in plan.text.documents:
        digest.update(len(content).to_bytes(8) + name.encode("utf-8", "surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def _append(path: Path, entry: dict[str, Any]) -> None:
    """One line, on the disk when this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _cut(path: Path) -> None:
    """Off the journal, what a killed process left of a line. Only for the one writer."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        flush(path)


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
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    with _whole(path, ValueError):
        entries = sorted(
            (json.loads(line) for line in lines),
            key=lambda entry: (models.index(entry["model"]), tasks.index(entry["task"]), entry["length"]),
        )
        units = [Unit(entry["model"], entry["task"], entry["length"], entry["way"]) for entry in entries]
        rows = [Row(**row) for entry in entries for row in entry["rows"]]
        said = [(unit, entry.get("reason"), entry.get("documents")) for unit, entry in zip(units, entries, strict=True)]
        absent = [(unit, reason) for unit, reason, _ in said if reason]
        documents = {unit.key: sums for unit, _, sums in said if sums}
    return Results(run, about, rows, absent, documents, set(units))
