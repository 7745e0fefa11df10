"""What tests of studies share: a tiny study and its text, calls that never return, and run directories made without training."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from longitude.measure import Row, read_rows, write_rows
from longitude.measure.text import default_bins
from longitude.runs.files import checksums
from longitude.runs.store import Store, Unit
from longitude.study import analysis, runner
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData, Text, split
from longitude.study.plan import plan
from longitude.study.report import summary_lines, table
from longitude.study.results import LAST, WINDOW, Run, keys_of, question_of, read_run, status_of
from longitude.study.run_trial import TrialRunner
from longitude.study.tasks.base import of_task
from longitude.study.trial import Status, Trial
from longitude.study.units import StudyPlan, TrialUnits, ngrams_unit, units_of

SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "device": "cpu", "seeds": (0,)}
WRITTEN = {"train_length": 256, "test_lengths": (256, 512, 1024, 2048, 4096), "layers": 4, "hidden": 128}
WRITTEN["methods"] = ("non-overlapping",)  # a table of positions for each model is written where it is asked for
"""The shape of text studies that `write_run` pretends to have run."""
FEW = {"train_length": 16, "test_lengths": (16, 32, 48), "steps": 4, "batch_size": 2, "documents": 4}
TINY = StudyConfig(encodings=("nope", "rope"), **FEW, **SHAPE)
SHORT = replace(TINY, test_lengths=(16, 32))
FEW_WORDS = {"train_length": 4, "test_lengths": (2, 4, 6), "steps": 8, "batch_size": 4, "documents": 6}
COPY = of_task("copy-decoder", encodings=("rope", "t5"), **FEW_WORDS, **SHAPE)
NUMBERS = Text("numbers", [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)])


@contextmanager
def reading_numbers() -> Iterator[None]:
    """Studies have a text that is quick to read."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)
        yield


@pytest.fixture
def numbers() -> Iterator[None]:
    with reading_numbers():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The study SHORT, finished; tests only read it."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with reading_numbers():
        assert run(SHORT, path)[0].complete
    return path


@pytest.fixture(scope="session")
def data() -> StudyData:
    return split(NUMBERS, 48, 16, 4)


def trial_of(label: str, seed: int = 0, config: StudyConfig = TINY) -> Trial:
    """A trial of a study with one learning rate, and the steps of the study."""
    return Trial(label, seed, config.learning_rates[0])


def units_in(path: Path, label: str, seed: int = 0) -> dict[str, Path]:
    """The folders of a trial's units, "train" and "measure"; those that are not there are unfinished ones."""
    store, question = Store(path), question_of(path)
    assert question is not None
    [keys] = [keys for keys in keys_of(question) if (keys.trial.label, keys.trial.seed) == (label, seed)]
    pairs = (("train", keys.training), ("measure", keys.measuring))
    return {kind: store.find(kind, key) or store.unfinished(kind, key) for kind, key in pairs}


@dataclass(frozen=True, eq=False)
class OneTrial:
    """One trial in a folder of its own, without a study around it."""

    path: Path
    label: str
    seed: int
    config: StudyConfig
    data: StudyData

    @property
    def units(self) -> TrialUnits:
        return units_of(self.config, trial_of(self.label, self.seed, self.config), self.data.description)

    @property
    def title(self) -> str:
        return self.units.trial.title

    def folder(self, unit: Unit) -> Path:
        store = Store(self.path)
        return store.find(unit.kind, unit.key) or store.unfinished(unit.kind, unit.key)

    @property
    def trained(self) -> Path:
        return self.folder(self.units.training)

    @property
    def measured(self) -> Path:
        return self.folder(self.units.measuring)

    @property
    def status(self) -> Status:
        return status_of(Store(self.path), self.units.keys)

    def run(self, note: Callable[[str], Any] = lambda words: None) -> Status:
        return TrialRunner(self.config, self.data, Store(self.path)).run(self.units, note=note)


def run(config: StudyConfig, path: Path, **options) -> tuple[Run, list[str]]:
    """What a study ended with, and its notes."""
    notes: list[str] = []
    return runner.study(plan(config, path), note=notes.append, **options), notes


def dying(plain: Callable, when: int | str, die: Callable[[], None]) -> Callable:
    """A function whose `when`-th call, or the first with a path of that name, never returns."""
    calls = []

    def dies(*arguments, **named):
        calls.append(1)
        if len(calls) == when or when in [getattr(each, "name", None) for each in arguments]:
            die()
        return plain(*arguments, **named)

    return dies


def assert_same_runs(one: Path, other: Path) -> None:
    rows = [read_rows(path / "results.parquet").drop(columns=["commit", "train_seconds"]) for path in (one, other)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    for trials in zip(read_run(one).trials, read_run(other).trials, strict=True):
        assert len({trial.folder.name for trial in trials}) == len({trial.selection for trial in trials}) == 1
        for name in ("losses.jsonl", "model.safetensors"):
            assert len({(trial.folder / name).read_bytes() for trial in trials}) == 1
        pd.testing.assert_frame_equal(*(trial.documents for trial in trials), check_exact=True)


# ---- findings ----------------------------------------------------------------------------------------------------------
def analysed(run: Path | analysis.Analysis) -> analysis.Analysis:
    """A second of processor time for three seeds: a test asks once."""
    return run if isinstance(run, analysis.Analysis) else analysis.analyse(run)


def summary(run: Path | analysis.Analysis) -> pd.DataFrame:
    return pd.DataFrame(analysed(run).main, dtype=object)


def conclusion(run: Path | analysis.Analysis) -> analysis.Conclusion:
    return analysis.conclude(analysed(run))


def line(frame: pd.DataFrame, label: str, length: int) -> dict[str, Any]:
    [found] = frame[(frame["label"] == label) & (frame["length"] == length)].to_dict("records")
    return found


def printed(run: Path | analysis.Analysis, width: int = 80) -> str:
    console, of = Console(width=width, record=True, force_terminal=False, file=None), analysed(run)
    with console.capture() as capture:
        console.print(table(of, width))
    return capture.get() + summary_lines(of, width)


def values(spec: dict[str, Any], mark: str, part: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The data of the first layer of a chart with this mark, of the whole specification or of a panel."""
    part = part or spec
    layer = next(layer for layer in part["layer"] if layer["mark"]["type"] == mark)
    return spec["datasets"][next(each["data"] for each in (layer, part, spec) if "data" in each)["name"]]


# ---- run directories ---------------------------------------------------------------------------------------------------
BITS = {  # bits per byte at 256, 512, 1024, 2048, 4096; None: not measured at that length
    "nope": (2.82, 2.88, 3.06, 3.42, 3.95),
    "sinusoidal": (2.91, 3.20, 3.55, 3.80, 3.95),
    "rope": (2.60, 2.65, 2.90, 3.30, 3.70),
    "alibi": (2.55, 2.53, 2.52, 2.52, 2.52),
    "t5": (2.56, 2.55, 2.57, 2.60, 2.64),
    "learned": (2.66, None, None, None, None),
    "fire": (2.60, 2.60, 2.61, 2.62, 2.64),
}


CONTROL = "alibi+window:size=64"
"""A blind control at the training length of `WRITTEN`."""
BLIND = {CONTROL: (2.7,) * 5}
"""Its bits: above those of labels that learned enough."""

SHARES = {  # of exact answers at 8, 16, 20, 32; None: not measured at that length
    "rope": (1.0, 0.99, 0.02, 0.0),
    "alibi": (1.0, 1.0, 0.98, 0.97),
    "t5": (1.0, 0.96, 0.9, 0.4),
    "learned": (1.0, 1.0, None, None),
}


def write_answers(path: Path, shares: dict[str, tuple[Any, ...]] = SHARES, **options: Any) -> Path:
    """A run of --task copy-decoder; a share may be one for each seed."""
    options = {"task": "copy-decoder", "documents": 200, "test_lengths": (8, 16, 20, 32)} | options
    return write_run(path, shares, **options)


def write_run(
    path: Path,
    values: dict[str, tuple[Any, ...]] = BITS,
    states: dict[tuple[str, int], dict] | None = None,
    spread: float = 0.12,
    noise: float = 0.02,
    last: float | None = 1.0,
    ngrams: dict[str, float] | None = None,
    source: str = "standard library of Python 3.11.2",
    **options: Any,
) -> Path:
    """A run directory as a study leaves it, with numbers that look like a study's.

    values: label -> bits per byte, or shares of exact answers, at each length (or a tuple there, one for each seed). states:
    (label, seed) -> what differs in status.json. last: the loss in the last quarter of a training window over its mean; None: it
    was not measured.
    spread: of documents, common to all labels and lengths; noise: of every document at every length.
    """
    task = options.pop("task", "text")
    ngrams = {"2": 9.0} if ngrams is None and task == "text" else ngrams  # that every label beats
    usual = {"encodings": tuple(values), "documents": 24, "seeds": (0,), "steps": 20}
    config = of_task(task, **usual | (WRITTEN if task == "text" else {}) | options)
    data = {
        "source": source, "sha256": "ab" * 32, "training_sha256": "cd" * 32, "bytes": 12_345_678, "documents": 590,
        "left_out": "tests",
        ("validation_documents" if config.task == "text" else "test_examples_of_each_length"): config.documents,
    }  # fmt: skip
    random = np.random.default_rng(0)
    common = random.normal(0, spread, config.documents)
    store, rows = Store(path), list[Row]()
    planned = StudyPlan(config, StudyData([], [], data), path)
    trials = [units.trial for units in planned.trials]
    for trial in trials:
        label, seed, units = trial.label, trial.seed, units_of(config, trial, data)
        status = {
            "status": "done", "label": label, "seed": seed, "rate": trial.rate, "encoding": label, "step": config.steps,
            "parameters": 1_085_000, "training_seconds": 43.2, "measuring_seconds": 12.9,
        } | (states or {}).get((label, seed), {})  # fmt: skip
        _write_training(store, units, status, config, random)
        if status["status"] != "done":
            continue
        i = config.seeds.index(seed)
        here = [value[i] if isinstance(value, tuple) else value for value in values[label]]
        at = dict(zip(config.test_lengths, here, strict=True))
        empty = {"method": [], "length": [], "document": []}
        sums = [*(_exact(config, at) if config.task == "copy-decoder" else _sums(config, at, common, noise, random))]
        sums = [*sums, *_quarter(config, sums, last)] if config.task == "text" and last else sums
        frame = pd.concat([pd.DataFrame({"label": label, "seed": seed, **part}) for part in (empty, *sums)])
        with store.making(units.measuring) as folder:
            (folder / "status.json").write_text(json.dumps(status))
            frame.to_parquet(folder / "documents.parquet", index=False)
            rows += (of_trial := [*_rows(config, label, seed, at)])
            write_rows(of_trial, folder / "results.parquet")
            if (window := _window(config, at)) is not None:
                window.to_parquet(folder / WINDOW, index=False)
    write_rows(rows, path / "results.parquet")
    with store.making(ngrams_unit(config, data)) as folder:
        (folder / "result.json").write_text(json.dumps(ngrams or {}))
    store.ask(
        "study",
        runner.question_for(planned) | {
            "begun": "2026-01-31T12:00:00+00:00", "commit": "0123456789abcdef0123456789abcdef01234567",
            "versions": {"python": "3.11.2", "longitude": "0.1.0", "torch": "2.13.0+cpu", "accelerate": None},
            "machine": {"system": "Linux x86_64", "cpu": "A processor", "cores": 2, "threads": 2, "gpu": None},
        }
    )  # fmt: skip
    return path


def sealed_again(folder: Path) -> None:
    """Give a finished unit the checksums of the files that it has now."""
    about = json.loads((folder / "unit.json").read_text())
    (folder / "unit.json").write_text(json.dumps(about | {"files": checksums(folder)}))


def edit_question(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a run was asked, in place."""
    question = json.loads((path / "question.json").read_text())
    edit(question)
    (path / "question.json").write_text(json.dumps(question))


def _write_training(store: Store, units: TrialUnits, status: dict[str, Any], config: StudyConfig, random: Any) -> None:
    """The unit of a training that ended, or what an unfinished one holds."""
    ended = status["status"]
    if ended == "not run":
        return
    log = "".join(_losses(config, status["step"], random))
    if ended in ("failed", "running"):
        folder = store.unfinished("train", units.training.key)
        folder.mkdir(parents=True)
        (folder / "losses.jsonl").write_text(log)
        if ended == "failed":
            (folder / "failure.json").write_text(json.dumps(status | {"trace": ""}))
        return
    with store.making(units.training) as folder:
        (folder / "losses.jsonl").write_text(log)
        (folder / "status.json").write_text(json.dumps(status | {"status": "trained" if ended == "done" else ended}))


def _quarter(config, sums, last):
    """The last quarter of windows of the training length, by the losses there."""
    for part in sums:
        if part["length"] == config.train_length and part["method"] == config.methods[0]:
            sizes = {name: part[name] / 4 for name in ("tokens", "bytes")}
            yield part | {"method": LAST, "nats": part["nats"] * last / 4, **sizes}


def _window(config, at):
    """The losses of one text, as long as the longest length that was measured; they rise behind the training length."""
    length = max((length for length, bits in at.items() if bits is not None), default=0)
    if config.task != "text" or "per-position" not in config.methods or not length:
        return None
    bits = np.where(np.arange(length) < config.train_length, at[min(at)] or 2.5, at[length])
    text = list(("def spam(eggs):\n    return eggs\n" * length)[:length])
    return pd.DataFrame({"text": text, "nats": bits * math.log(2)})


def _losses(config, steps, random):
    for step in range(1, steps + 1):
        loss = 1.8 + 3.4 * math.exp(-step / 28) + random.normal(0, 0.04)
        tokens = step * config.batch_size * config.train_length
        yield json.dumps({"step": step, "loss": loss, "learning_rate": 1e-3, "tokens": tokens}) + "\n"


def _sums(config, at, common, noise, random):
    own = random.normal(0, noise / 2)
    for method in config.methods:
        for length, bits in at.items():
            if bits is not None and method != "per-position":
                sizes = config.longest * (1 + np.arange(len(common)) % 3)
                each = bits + common + own + random.normal(0, noise, len(common)) - 0.05 * (method == "sliding")
                place = {"method": method, "length": length, "document": range(len(common))}
                yield place | {"nats": each * math.log(2) * sizes, "tokens": sizes, "bytes": sizes}


def _exact(config, at):
    for length, share in at.items():
        if share is not None:
            exact = (np.arange(config.documents) < round(share * config.documents)).astype(int)
            place = {"method": "forward", "length": length, "document": range(config.documents)}
            yield place | {"exact": exact, "right": length, "symbols": length}


def _rows(config, label, seed, at):
    """By position: what the figure of positions is drawn from."""
    longest, first = config.test_lengths[-1], at[config.test_lengths[0]]
    if at[longest] is None or "per-position" not in config.methods:
        return
    for start, stop in pairwise(default_bins(longest)):
        past = max(0.0, math.log2((start + stop) / 2 / config.train_length + 1) - 0.6) if start else 0.0
        bits = first + 3.5 / (start + 1) ** 0.6 + (at[longest] - first) * past / 2
        yield Row(
            task=config.task, encoding=label, label=label, seed=seed, train_length=config.train_length, length=longest,
            metric="bits_per_byte", method="per-position", window=longest, value=bits, position_from=start,
            position_to=stop, low=bits - 0.06, high=bits + 0.06, learning_rate=config.learning_rates[0],
            train_steps=config.steps, train_seconds=43.2, flops_per_token=2_345_678.0,
        )  # fmt: skip
