"""Many cells: a run directory, what it holds, and one writer that fills it."""

import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from longitude.measure import read_rows, to_frame, write_rows
from longitude.models.decoder import LongitudeModel
from longitude.positions.base import encoding
from longitude.positions.composed import Composed
from longitude.runs.files import (
    FRESH,
    atomic,
    locked,
    out_of_space,
    read_json,
    remove_unfinished,
    require_space,
    write_json,
)
from longitude.runs.provenance import commit_of_code, machine, versions
from longitude.study.cell import Status, Trial, Watcher, build_model, device_of, run_cell, work_of
from longitude.study.checkpoints import drop_unfinished
from longitude.study.config import StudyConfig, as_dict, checked, option, replaced
from longitude.study.tasks import task_of
from longitude.study.work import StudyData

SCHEMA = 1
GROWING = ("encodings", "seeds")
"""Options of which a run directory may be given more: their cells are added."""


@dataclass(frozen=True)
class Outcome:
    """What a run directory holds now: its cells in the order of the study, each with its status."""

    run: Path
    config: StudyConfig
    cells: list[tuple[Trial, Status]]

    @property
    def complete(self) -> bool:
        """Whether every cell is done, none diverged or failed."""
        return all(status.status == "done" for _, status in self.cells)


@dataclass(frozen=True)
class StudyPlan:
    """A study that passed every check, with its text read; nothing is written yet."""

    config: StudyConfig
    data: StudyData
    run: Path

    @property
    def cells(self) -> list[Trial]:
        return [Trial(self.run, label, seed) for seed in self.config.seeds for label in self.config.encodings]


def plan(config: StudyConfig, run: Path) -> StudyPlan:
    """Every check that needs no writing: options, device, models, text, directory, disk. ValueError for the user."""
    config = checked(config)
    config = replaced(config, device=device_of(config).type)
    work, sizes = work_of(config), []
    made: list[tuple[str, list[Any]]] = []
    for label in config.encodings:
        try:
            model = build_model(config, label, 0)
            sizes.append(sum(parameter.numel() for parameter in model.parameters()))
            shape = same_model(model)
            if twice := [other for other, another in made if another == shape]:
                raise ValueError(f"it names the same model as {twice[0]}, option by option; leave one of them out")
            made.append((label, shape))
            with torch.no_grad():  # options that contradict the model's shape show here
                work.try_out(model, config)
        except ValueError as error:
            raise ValueError(f"--encodings {label}: {error}") from error
    planned = StudyPlan(config, work.prepare(config), run)
    if run.exists() and not run.is_dir():
        raise ValueError(f"--out {run}: there is a file of this name; choose another --out")
    if run.is_dir() and not (run / "study.json").exists() and any(path.name != ".lock" for path in run.iterdir()):
        raise ValueError(f"--out {run}: the directory holds other files and no study; choose another --out")
    to_do = sum(not (cell.folder / "config.json").exists() for cell in planned.cells)
    require_space(run, 2**24 + to_do * max(sizes) * 4 * 8, "the study")  # a model, three checkpoints rotating, float32
    return planned


def same_model(model: Any) -> list[Any]:
    """What each layer of each stack is built of, to compare models of one shape however their labels spell them: its mixer with
    every option, and those encodings that the mixer takes.

    The order of encodings says nothing where they add to scores or columns. It is kept among those that change queries or keys,
    and among those that change the input: (q + u) rotated is not q rotated + u.
    """
    stacks = [stack for stack in model.modules() if isinstance(stack, LongitudeModel)]
    return [layer for stack in stacks for layer in _layers(stack)]


def _layers(stack: LongitudeModel) -> list[Any]:
    config, layers = stack.config, []
    for mixer, spec_of_mixer, specs in zip(stack.mixers, config.layer_mixers(), config.layer_specs(), strict=True):
        taken, of_heads, of_input = [], [], []
        for spec in specs:
            with torch.random.fork_rng():
                members = list(Composed([encoding(**spec)]))
            places = [place for place, member in enumerate(members) if mixer.refuses(member) is None]
            if spec["name"] == "none" or not places:
                continue
            kept = Composed([members[place] for place in places])
            taken.append((spec, places))
            of_heads += [spec] if kept.transforms else []
            of_input += [spec] if kept.at_input else []
        taken.sort(key=lambda one: json.dumps(one, sort_keys=True, default=str))
        layers.append((spec_of_mixer["name"], config.mixer_options(spec_of_mixer), taken, of_heads, of_input))
    return layers


def study(
    planned: StudyPlan,
    fresh: bool = False,
    watcher: Watcher | None = None,
    finished: Callable[[str], None] | None = None,
) -> Outcome:
    """Run the cells that are not finished yet, one after the other, and gather all rows.

    A cell that raises is recorded as failed with its reason, and tried again by the next call; a diverged one is a
    result. finished: called with one line about every cell. Raises ValueError when another process writes here, when
    the directory holds another study (`fresh` replaces it) or when the disk is full; nothing is then half-written.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run, watcher = planned.run, watcher or Watcher()
    with _full_disk_is_a_user_error(run):
        run.mkdir(parents=True, exist_ok=True)
        with locked(run):
            remove_unfinished(run)
            if fresh:
                _remove_study(run)
            planned = _opened(planned, watcher)
            watcher.note(_introduction(planned))
            commit = commit_of_code()
            outcome = []
            for cell in planned.cells:
                status = cell.status
                if status is None or status.status not in ("done", "diverged"):
                    status = _attempt(planned, cell, commit, watcher)
                outcome.append((cell, status))
                _gather(planned)
                if finished is not None:
                    finished(_sentence(cell, status))
            return Outcome(run, planned.config, outcome)


def _attempt(planned: StudyPlan, cell: Trial, commit: str | None, watcher: Watcher) -> Status:
    trace = cell.folder / "error.txt"
    trace.unlink(missing_ok=True)
    try:
        return run_cell(planned.config, cell, planned.data, commit, watcher)
    except Exception as error:
        if out_of_space(error, cell.run):
            drop_unfinished(cell.folder / "trainer")
            raise
        with atomic(trace) as beside:
            beside.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        status = Status("failed", cell.label, cell.seed, cell.encoding, 0, planned.config.steps, reason=reason)
        write_json(cell.folder / "status.json", asdict(status))
        return status


def _gather(planned: StudyPlan) -> None:
    """All cells' rows into one table."""
    paths = [cell.folder / "results.parquet" for cell in planned.cells]
    frames = [read_rows(path) for path in paths if path.exists()]
    write_rows(pd.concat(frames, ignore_index=True) if frames else to_frame([]), planned.run / "results.parquet")


def _introduction(planned: StudyPlan) -> str:
    config, data = planned.config, planned.data.description
    models = f"{len(planned.cells)} models, each trained on"
    if task_of(config.task).generated:
        trained = f"{config.steps * config.batch_size:,} examples ({data['source']})"
        measured = f"{data['test_examples_of_each_length']} of each length"
    else:
        trained = f"{config.training_tokens:,} bytes of {data['source']}"
        measured = f"{data['validation_documents']} documents"
    return f"{models} {trained} and measured on {measured}; {planned.run}"


def _sentence(cell: Trial, status: Status) -> str:
    name = f"{cell.label} seed {cell.seed}"
    if status.status == "done":
        return "; ".join(filter(None, (f"{name}: done", status.untrained, status.reason)))
    if status.status == "failed":
        return f"{name}: failed, {status.reason}; see {cell.folder / 'error.txt'}"
    return f"{name}: {status.status}, {status.reason}"


# ---- study.json -------------------------------------------------------------------------------------------------------


def _opened(planned: StudyPlan, watcher: Watcher) -> StudyPlan:
    """Write study.json, or continue what it says; more encodings and seeds than saved are added to it."""
    path = planned.run / "study.json"
    saved = read_json(path, FRESH)
    here = {"versions": versions(), "commit": commit_of_code(), "machine": machine()}
    if saved is None:
        begun = {"schema": SCHEMA, "begun": _now(), **here, "continued": []}
    else:
        config = _continued(planned, saved)
        if config != planned.config:
            planned = StudyPlan(config, planned.data, planned.run)
        begun = {key: saved[key] for key in ("schema", "begun", *here, "continued")}
        last = begun["continued"][-1] if begun["continued"] else begun
        if changes := [name for name in here if here[name] != last[name]]:
            watcher.note(f"{planned.run} was begun with another {' and '.join(changes)}; study.json keeps both")
            begun["continued"] = [*begun["continued"], {"at": _now(), **here}]
    whole = {**begun, "configuration": _plain(planned.config), "data": planned.data.description}
    if whole != saved:
        write_json(path, whole)
    return planned


def _continued(planned: StudyPlan, saved: dict[str, Any]) -> StudyConfig:
    """The saved study, grown by new encodings and seeds. ValueError naming the first option that differs."""
    remedy = "--fresh starts over, another --out keeps both"
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise ValueError(f"{planned.run} holds a study.json that this release cannot read; {remedy}")
    config = _plain(planned.config)
    old = _plain(StudyConfig()) | saved["configuration"]  # an option that came later was at its default before
    for name in config:
        if name in GROWING and not set(old[name]) - set(config[name]):
            continue
        if old[name] != config[name]:
            before, now = (_value(each) for each in (old[name], config[name]))
            raise ValueError(f"{planned.run} holds a study with {option(name)} {before}, not {now}; {remedy}")
    before, now = saved["data"]["sha256"], planned.data.description["sha256"]
    if before != now:
        raise ValueError(
            f"{planned.run} holds a study of another text ({saved['data']['source']}, sha256 {before[:12]}), not "
            f"{planned.data.description['source']}, sha256 {now[:12]}; {remedy}"
        )
    order = {name: (*old[name], *(new for new in config[name] if new not in old[name])) for name in GROWING}
    return replaced(planned.config, **order)


def _plain(config: StudyConfig) -> dict[str, Any]:
    """The configuration as JSON gives it back."""
    return json.loads(json.dumps(as_dict(config)))


def _value(value: Any) -> str:
    return " ".join(str(each) for each in value) if isinstance(value, list) else str(value)


def _remove_study(run: Path) -> None:
    """Everything a study writes, study.json last; other files stay."""
    shutil.rmtree(run / "cells", ignore_errors=True)
    for pattern in ("figures/*.svg", "figures/*.png", "report.html", "results.parquet", "study.json"):
        for path in run.glob(pattern):
            path.unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _full_disk_is_a_user_error(run: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or not out_of_space(error, run):
            raise
        raise ValueError(
            f"no space left on the disk of {run}; free some, then the same command continues where it stopped"
        ) from error
