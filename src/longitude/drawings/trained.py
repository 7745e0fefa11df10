"""A study's trained models: which they are, and what their encodings add to the scores, before and after training."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from longitude.checkpoints.load import load
from longitude.drawings.drawing import Line, Lines, floor_of, middle, offsets_of
from longitude.drawings.encodings import bias_lines
from longitude.errors import unknown
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed
from longitude.report.wording import named
from longitude.study.results import Run, TrialResult, read_run
from longitude.study.train import build_model


def opened(path: Path, labels: Sequence[str]) -> tuple[Run, dict[str, TrialResult]]:
    """Open a study, and select the first completed trial of each label.

    Args:
        path: Folder of the study.
        labels: Some of its labels; none: all.

    Raises:
        ValueError: For a label that the study does not have, or has no completed trial of.
    """
    run = read_run(path)
    done = {}
    for label in labels or run.labels:
        if label not in run.labels:
            raise unknown("label of --encoding", label, run.labels, f"Those of {path}.")
        trials = [trial for trial in run.of(label) if trial.status == "done"]
        if not trials:
            why = "; ".join(f"seed {trial.seed}: {trial.status}" for trial in run.of(label))
            remedy = "run the same `longitude study` again, it continues"
            raise ValueError(f"{path} has no trained model of {named(label)} ({why}); {remedy}")
        done[label] = trials[0]
    return run, done


def facts(run: Run, trial: TrialResult) -> dict[str, Any]:
    """Plain data about a trained model."""
    return {
        "label": trial.label,
        "folder": str(trial.folder),
        "seed": trial.seed,
        "steps": run.config.steps,
        "train_length": run.train_length,
        "parameters": trial.parameters,
    }


def words(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers."""
    yield "model", about["folder"]
    yield "trained", f"{about['steps']} steps at length {about['train_length']}, seed {about['seed']}"
    yield "parameters", f"{about['parameters']:,}" if about["parameters"] else "unknown"


def biases(run: Run, trial: TrialResult) -> Iterator[Lines]:
    """Drawings of the biases of the first and the last layer that has its own, before and after training."""
    number = count(1)
    before = _encodings(build_model(run.config, trial.label, trial.seed))
    after = _encodings(load(trial.folder, tokenizer=False).model)
    for kind, layers in before.items():
        for place in sorted({0, len(layers) - 1}):
            first, trained = layers[place], after[kind][place]
            lines = _lines(trained, run)
            learns = any(True for _ in trained.parameters())
            if learns and not run.config.start:  # with --start, another study trained the initial weights
                lines |= {f"{head}, before": line for head, line in _lines(first, run).items()}
            if not lines:
                continue
            layer = f"layer {place + 1} of {len(layers)}" if len(layers) > 1 else ""
            which = ", ".join(filter(None, (kind * (len(before) > 1), layer)))
            yield Lines.by_offset(
                name=f"bias-{next(number)}",
                title="What each head adds to the score of a key, by offset" + (f": {which}" if which else ""),
                caption=f"Before softmax, after training at length {run.train_length}, and before it where it is learned.",
                y="bias",
                lines=lines,
                marks={"training length": run.train_length},
                focus=middle({name: 0 for name in lines if not name.endswith("before")}),
                floor=floor_of([values for _, values in lines.values()]),
            )


def _encodings(model: Any) -> dict[str, list[Encoding]]:
    """Class -> modules in the order of layers; one that all layers share is there once."""
    modules = defaultdict(list)
    for module in model.modules():
        if isinstance(module, Encoding) and not isinstance(module, Composed):
            modules[type(module).__name__].append(module)
    return modules


@torch.no_grad()
def _lines(module: Encoding, run: Run) -> dict[str, Line]:
    """Biases for the last query of the longest window; none if they depend on tokens or do not exist."""
    longest = max(run.task.positions(length) for length in (run.lengths[-1], run.train_length))
    try:
        return bias_lines(module, longest - 1, offsets_of(longest))
    except ValueError:
        return {}
