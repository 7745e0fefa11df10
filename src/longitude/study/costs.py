"""Costs of a study: FLOPs per token, steps of labels matched by compute, and the estimates of --plan for every label.

FLOPs and memory are those of `longitude.checkpoints.costs`. Other work of a layer (norms, tables of positions) is included in
the time, which is measured by real steps on this machine. A measured token takes a third of the time of a training token.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from longitude.checkpoints.costs import TRAINING, Cost, products_per_token
from longitude.runs.device import threads
from longitude.runs.memory import training_memory
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.tasks.base import task_of
from longitude.study.train import build_model, train
from longitude.study.trial import Trial
from longitude.study.units import StudyPlan

REFERENCE = "nope"
"""The label that defines the compute to match: attention without an encoding."""
STEPS, WARM = 6, 2
"""Steps of a calibration; the first ones, which allocate and compile, do not count."""


def on_meta(config: StudyConfig, label: str) -> Any:
    """The model of a label on the meta device, without weights."""
    with torch.device("meta"):
        return build_model(config, label, 0)


def flops_per_token(config: StudyConfig, label: str) -> float:
    """FLOPs of matrix products per training token, forward and backward: three times those of the forward pass."""
    task = task_of(config.task)
    length = task.positions(config.train_length)
    keys = length / 2 if task.stack == "decoder" else length  # per query, on average
    return TRAINING * 2 * products_per_token(on_meta(config, label), keys)


def tokens_read(config: StudyConfig, data: StudyData, steps: int) -> int:
    """Tokens that a model reads in its training."""
    examples = task_of(config.task).examples(replace(config, steps=steps), data, config.seeds[0])
    return examples.read(steps * config.batch_size)


def train_steps(config: StudyConfig, first: StudyConfig) -> dict[str, int]:
    """Label -> steps with the FLOPs of the reference in the study's steps; empty if labels are matched by steps.

    first: the part of the study with its first size and training length, at which the reference is.
    """
    if config.match == "steps":
        return {}
    budget = config.steps * flops_per_token(first, REFERENCE)  # a step of every part has as many tokens
    return {label: max(1, round(budget / flops_per_token(config, label))) for label in config.encodings}


def costs(
    planned: StudyPlan, on_progress: Callable[[str, float, float], None] = lambda *now: None, timed: bool = True
) -> list[Cost]:
    """The training and the measuring of a trial of every label, in the order of the study; nothing is written.

    Args:
        planned: Result of `plan`.
        on_progress: Called with a label, the number of labels that are done, and the number of all labels.
        timed: Whether to run a few steps of each; else seconds are None.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the Trainer warns of checkpoints seconds apart
    found, config, task = list[Cost](), planned.config, task_of(planned.config.task)
    with threads(config.threads):
        for i, label in enumerate(config.encodings):
            on_progress(label, i, len(config.encodings))
            model, length = on_meta(config, label), task.positions(config.train_length)
            per_token, steps = flops_per_token(config, label), planned.steps.get(label, config.steps)
            step = _step_seconds(planned, label) if timed else None
            tokens = tokens_read(config, planned.data, steps)
            measured = task.measured_tokens(config)
            training = Cost(
                model=label,
                part="training",
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                steps=steps,
                length=config.train_length,
                tokens=tokens,
                flops=per_token * tokens,
                memory=training_memory(model, model.config, config.batch_size, length, False),
                seconds=None if step is None else step * steps,
            )
            measuring = Cost(
                model=label,
                part="measuring",
                length=config.test_lengths[-1],
                tokens=round(measured),
                flops=per_token / TRAINING * measured,
                seconds=None
                if step is None
                else step * measured / (TRAINING * config.batch_size * config.train_length),
            )
            found += training, measuring
    return found


def wall_seconds(costs: Sequence[Cost], seeds: int, workers: int, rates: int = 1) -> float:
    """Wall time of all trials in seconds, `workers` at a time, each started as soon as another ends.

    With several learning rates the first seed is trained at each before anything is measured.
    """
    training, measuring = (
        [cost.seconds or 0.0 for cost in costs if cost.part == part] for part in ("training", "measuring")
    )
    whole = list(map(sum, zip(training, measuring, strict=True)))
    if rates == 1:
        return _side_by_side(whole * seeds, workers)
    return _side_by_side(training * rates, workers) + _side_by_side(measuring + whole * (seeds - 1), workers)


def _side_by_side(seconds: Sequence[float], workers: int) -> float:
    free = [0.0] * workers
    for each in seconds:
        free[free.index(min(free))] += each
    return max(free)


def _step_seconds(planned: StudyPlan, label: str) -> float:
    """Seconds of a training step: the median of a few."""
    config = replace(planned.config, steps=STEPS)
    trial, times = Trial(label, config.seeds[0], config.learning_rates[0], STEPS), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        model, timed = build_model(config, label, trial.seed), lambda *_: times.append(time.perf_counter())
        train(model, config, trial, planned.data, Path(folder), timed, note=lambda _: None)
    return median(after - before for before, after in pairwise(times[WARM:]))
