"""What a study will take before anything runs: parameters, FLOPs and memory from the meta device, time from a short calibration.

FLOPs are those of `longitude.study.budget`. What else a layer does (norms, tables of positions) is in the time, which real steps
of this machine give; a token that is measured takes a third of one that trains.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import transformers

from longitude.runs.memory import training_memory
from longitude.study.budget import BACKWARD, flops_per_token, on_meta, tokens_read
from longitude.study.plan import StudyPlan
from longitude.study.run_trial import ignore
from longitude.study.tasks.base import task_of
from longitude.study.train import build_model, train
from longitude.study.trial import Trial

STEPS = 6
"""Steps of a calibration; the first ones, which allocate and compile, do not count."""
WARM = 2
PARTS = ("seconds", "training_seconds", "measuring_seconds")
BASE = 2**29
"""Bytes of Python and its libraries."""


@dataclass(frozen=True)
class Cost:
    """Of one trial with a label, about.

    Attributes:
        parameters: Number of parameters of the model.
        steps: Steps of its training.
        flops_per_token: FLOPs of the matrix products in training, forward and backward, per token.
        flops: FLOPs of the whole training.
        memory: Bytes at the height of a training step.
        training_seconds: On this machine, with nothing beside it.
        measuring_seconds: Likewise.
    """

    label: str
    parameters: int
    steps: int
    flops_per_token: float
    flops: float
    memory: int
    training_seconds: float
    measuring_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole trial."""
        return self.training_seconds + self.measuring_seconds


def costs(planned: StudyPlan, on_progress: Callable[[str, float, float], None] = lambda *now: None) -> list[Cost]:
    """The cost of a trial of every label, in the order of the study; nothing is written into its directory.

    Args:
        planned: Result of `plan`.
        on_progress: Called with a label, how many are done, and all of them.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its checkpoints are seconds apart, which it warns of
    found, config, task = [], planned.config, task_of(planned.config.task)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        for i, label in enumerate(config.encodings):
            on_progress(label, i, len(config.encodings))
            model = on_meta(config, label)
            length = task.positions(config.train_length)
            per_token, steps = flops_per_token(config, label), planned.steps.get(label, config.steps)
            step = _step_seconds(planned, label)
            measured = task.measured_tokens(config) / (BACKWARD * config.batch_size * config.train_length)  # in steps
            found.append(
                Cost(
                    label=label,
                    parameters=sum(parameter.numel() for parameter in model.parameters()),
                    steps=steps,
                    flops_per_token=per_token,
                    flops=per_token * tokens_read(config, planned.data, steps),
                    memory=BASE + training_memory(model, model.config, config.batch_size, length, False),
                    training_seconds=step * steps,
                    measuring_seconds=step * measured,
                )
            )
    finally:
        torch.set_num_threads(threads)
    return found


def wall_seconds(costs: Sequence[Cost], seeds: int, workers: int, rates: int = 1) -> float:
    """Of all trials, `workers` side by side, each begun as soon as one before it ends.

    Of several learning rates all are trained before one of each label is measured.
    """
    whole, training, measuring = ([getattr(cost, name) for cost in costs] * seeds for name in PARTS)
    if rates == 1:
        return _side_by_side(whole, workers)
    return _side_by_side(training * rates, workers) + _side_by_side(measuring, workers)


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
        model = build_model(config, label, trial.seed)
        train(model, config, trial, planned.data, Path(folder), lambda *_: times.append(time.perf_counter()), ignore)
    return median(after - before for before, after in pairwise(times[WARM:]))
