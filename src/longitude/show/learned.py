"""A study's trained models: which they are, and a text colored by their losses."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longitude.errors import UsageError, unknown
from longitude.measure.windows import Reader, nats_of
from longitude.report.passage import Panel, Passage
from longitude.report.wording import named, papers
from longitude.show.attention import content_of
from longitude.show.biases import model_of
from longitude.show.drawing import Drawing
from longitude.study.results import Run, TrialResult, read_run
from longitude.study.tokens import reader
from longitude.study.train import measurable


def opened(path: Path, encoding: Sequence[str]) -> tuple[Run, dict[str, TrialResult]]:
    """Open a study, and select the first completed trial of each label.

    Args:
        path: Folder of the study.
        encoding: Labels; none: all.

    Raises:
        ValueError: For a label that the study does not have, or for a missing model.
    """
    run = read_run(path)
    for label in encoding:
        if label not in run.labels:
            raise unknown("label of --encoding", label, run.labels, f"Those of {path}.")
    done = {}
    for label in encoding or run.labels:
        trials = [trial for trial in run.of(label) if trial.status == "done"]
        if not trials:
            why = "; ".join(f"seed {trial.seed}: {trial.status}" for trial in run.of(label))
            remedy = "run the same `longitude study` again, it continues"
            raise ValueError(f"{path} has no trained model of {named(label)} ({why}); {remedy}")
        lost = [name for name in ("config.json", "model.safetensors") if not (trials[0].folder / name).exists()]
        if lost:
            no_model = f"{trials[0].folder} has no model of {named(label)}: {' and '.join(lost)} missing"
            remedy = "copy the units of the study, too, or train it again with `longitude study`"
            raise ValueError(f"{no_model}; {remedy}")
        done[label] = trials[0]
    return run, done


def facts(run: Run, trial: TrialResult) -> dict[str, Any]:
    """Plain data about a trained model."""
    return {
        "label": trial.label,
        "folder": str(trial.folder),
        "seed": trial.seed,
        "steps": run.steps(trial.label),
        "train_length": run.train_length,
        "parameters": trial.parameters,
    }


def words(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers."""
    yield "model", about["folder"]
    yield "trained", f"{about['steps']} steps at length {about['train_length']}, seed {about['seed']}"
    yield "parameters", f"{about['parameters']:,}" if about["parameters"] else "unknown"


def one_text(run: Run, trial: TrialResult, text: Path, length: int | None, suffix: str = "") -> list[Drawing]:
    """A text colored by the losses of a trained model.

    Args:
        run: The study.
        trial: One of its models.
        text: A file.
        length: Bytes or tokens that the model reads; None: the longest tested length, as far as the text and the model go.
        suffix: Added to the name of its label, such as a training length.

    Raises:
        UsageError: The model does not predict the next token, or the text is shorter.
    """
    if run.task.stack != "decoder" or run.task.generated:
        expected = "a study of --task text, whose models predict a text"
        raise UsageError("--text", expected, f"--task {run.config.task}", "leave --text out")
    by = reader(run.config.tokenizer)
    ids = torch.from_numpy(by.read(content_of(text)).ids.astype(np.int64))
    longest = len(ids) - 1
    if longest < max(length or 0, 2):
        expected, shorter = f"{length or 2} {run.task.unit} and one more", " or a shorter --length" * bool(length)
        raise UsageError(f"--text {text}", expected, len(ids), "give a longer text" + shorter)
    model = model_of(run, trial)
    most = measurable(model, run.config)[0]
    if length and length > most:
        expected = f"at most {most:g}, where the positions of {trial.label} end"
        raise UsageError("--length", expected, length, "take less, or name other labels with --encoding")
    size = int(min(length or run.lengths[-1], longest, most))
    bits = nats_of(Reader(model), ids[: size + 1]) / math.log(2)
    panel = Panel(by.pieces(ids[1 : size + 1].tolist()), bits, run.train_length)
    panels = {papers(run.labels)[trial.label] + suffix: panel}
    caption = f"The first {size} {run.task.unit} of {text.name}."
    return [Passage(caption=caption, unit=run.task.unit.removesuffix("s"), panels=panels)]
