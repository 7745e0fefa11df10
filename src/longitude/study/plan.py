"""Checks of a study before anything is written or trained: wrong options raise ValueError here."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import transformers

from longitude.errors import UsageError, unknown
from longitude.labels import parse_label
from longitude.measure.config import check_each_once, listed
from longitude.models import LongitudeConfig
from longitude.positions.base import ENCODINGS
from longitude.registry import options_of
from longitude.runs.costs import TRAINING, Cost, training_memory
from longitude.runs.files import require_space
from longitude.runs.machine import Device, device_of, threads
from longitude.runs.store import Store
from longitude.study.config import (
    BYTE,
    GENERATED,
    RANGED,
    StudyConfig,
    option,
    require_numbers,
    with_all,
)
from longitude.study.results import VERB, question_of
from longitude.study.start import with_start
from longitude.study.tasks.base import Task, sampler_of, task_of
from longitude.study.train import build_model, flops_per_token, on_meta, tokens_read, train
from longitude.study.trial import Trial
from longitude.study.units import StudyPlan

STEPS, WARM = 6, 2
"""Steps of a calibration; the first ones, which allocate and compile, do not count."""


def plan(config: StudyConfig, run: Path, elsewhere: bool = False) -> StudyPlan:
    """Check options, directory, models, device, text and disk. ValueError for the user.

    Args:
        config: Requested configuration.
        run: Run directory. Results in its units are not computed again.
        elsewhere: Whether the study is for another machine, which has its device.
    """
    store = Store(run)
    store.require_place(VERB)
    config = checked(config, asked_before(config, run))
    if not elsewhere:
        config = replace(config, device=cast(Device, device_of(config.device).type))
    if config.precision != "float32" and config.device != "cuda":
        raise UsageError("--precision", "float32 without a GPU", config.precision, "leave it out, or add --device cuda")
    task_of(config.task).vocabulary(config)  # a bad tokenizer raises here, not in a model
    models, largest = _built(config)
    data = with_start(config, task_of(config.task).prepare(config), run)
    planned = StudyPlan(config, data, run, models)
    untrained = sum(not store.holds(units.training) for units in planned.trials)
    require_space(run, 2**24 + untrained * largest * 4 * 8, "the study")  # a model, three checkpoints, float32
    return planned


def _built(config: StudyConfig) -> tuple[dict[str, list[Any]], int]:
    """`StudyPlan.models`, and the parameters of the largest. ValueError for a label that is wrong or has no such model."""
    task, sizes = task_of(config.task), []
    built: dict[str, list[Any]] = {}
    for label in config.encodings:
        try:
            model = build_model(config, label, 0)
            sizes.append(sum(parameter.numel() for parameter in model.parameters()))
            resolved = layers_of(model.config)
            if same := [other for other, theirs in built.items() if theirs == resolved]:
                raise ValueError(f"it names the same model as {same[0]}, option by option; leave one of them out")
            built[label] = resolved
            with torch.no_grad():
                task.try_out(model, config)
        except ValueError as error:
            raise ValueError(f"--encodings {label}: {error}") from error
    models = {
        label: [layer for i, layer in enumerate(layers) if layer not in layers[:i]] for label, layers in built.items()
    }
    return models, max(sizes)


def asked_before(config: StudyConfig, run: Path) -> StudyConfig | None:
    """The last configuration of a folder, if its training is alike: its range of positions is kept; else None.

    Otherwise longer --test-lengths would draw positions from a longer range, and every model would be trained again.
    """
    asked = question_of(run)
    before = None if asked is None else StudyConfig.of(asked["configuration"])
    alike = ("task", "data", "tokenizer", "train_length", "positions")
    return before if before and all(getattr(before, name) == getattr(config, name) for name in alike) else None


# ---- options ---------------------------------------------------------------------------------------------------------
def checked(config: StudyConfig, before: StudyConfig | None = None) -> StudyConfig:  # noqa: C901
    """Check the options, and fill in "all" and the range of positions. ValueError for the user.

    before: the last configuration of the folder, whose range of positions is kept.
    """
    task = task_of(config.task)
    # to list schemes, each is built
    valid = task.methods if {*config.methods} <= {*task.methods} else task.valid_methods()
    spelled = {name.replace("_", "-"): name for name in valid}
    config = replace(config, methods=tuple(spelled.get(name.replace("_", "-"), name) for name in config.methods))
    require_numbers(config)
    for name, right, expected in _rules(config, task):
        if not right:
            value = getattr(config, name)
            got = listed(value) if isinstance(value, tuple) else value
            raise ValueError(f"{option(name)} must {expected}, got {got}")
    for name, lengths in (("train_length", (config.train_length,)), ("test_lengths", config.test_lengths)):
        for length in lengths:
            try:
                task.require_length(length)
            except ValueError as error:
                raise ValueError(f"{option(name)}: {error}") from error
    for method in config.methods:
        if method not in valid:
            raise unknown("method", method, valid, "`longitude study --help` explains them.")
    if config.stride is not None and "sliding" not in config.methods:
        raise ValueError("--stride is of sliding windows; add sliding to --methods, or leave --stride out")
    if config.positions not in RANGED and config.position_range is not None:
        ranged = f"--position-range is of {' and '.join(RANGED)} positions"
        raise ValueError(f"{ranged}, and --positions is {config.positions}; leave it out")
    if config.positions == "mixed" and task.generated:
        raise ValueError(f"--positions mixed is of --task text, and --task is {task.name}; leave it out")
    if task.generated != (GENERATED in config.data) or (task.generated and len(config.data) > 1):
        expected = "generated" if task.generated else "a text"
        raise ValueError(f"--data of --task {task.name} must be {expected}, got {listed(config.data)}; leave it out")
    if config.tokenizer != BYTE and not task.tokenized:
        raise ValueError(f"--tokenizer is of --task text, and --task is {task.name}; leave it out")
    labels = with_all(config.encodings, lambda: _meaningful(task))
    vocabulary = task.vocabulary(config)
    for label in labels:
        _require_digits(label, task, vocabulary)
    check_each_once("--encodings", labels)
    config = replace(config, encodings=labels)
    if config.positions in RANGED and config.position_range is None:
        kept = before.position_range if before and before.positions == config.positions else None
        config = replace(config, position_range=kept or task.positions(config.longest))
    sampler_of(config)  # raises ValueError for unknown names
    return config


def _rules(config: StudyConfig, task: Task) -> Iterator[tuple[str, bool, str]]:
    """Options with a condition: its name, whether the condition holds, and the words for it."""
    shortest = config.test_lengths[0]
    yield "heads", config.hidden % config.heads == 0, f"divide --hidden {config.hidden}"
    yield "seeds", min(config.seeds) >= 0 and max(config.seeds) < 2**32, "be numbers from 0 to 2^32 - 1"
    yield "learning_rates", all(0 < rate < math.inf for rate in config.learning_rates), "be above 0"
    yield "warmup", 0 <= config.warmup < 1, "be a share of the steps from 0 to below 1"
    yield "stride", config.stride is None or 1 <= config.stride <= shortest, f"be 1 to the shortest length {shortest}"
    if config.positions in RANGED and config.position_range is not None:
        needed = task.positions(config.train_length)
        positions = "" if needed == config.train_length else f" with its {needed} positions"
        expected = f"be at least the training length {config.train_length}{positions}"
        yield "position_range", config.position_range >= needed, expected


def _meaningful(task: Task) -> Iterator[str]:
    """Every registered encoding except those of encoders, and those that count digits by ids of other tasks."""
    of_decoders = (name for name, factory in ENCODINGS.items() if not getattr(factory, "reads_neighbors", False))
    return (name for name in of_decoders if _counts(name, task))


def _counts(name: str, task: Task) -> bool:
    """Whether the digits that an encoding counts by default, if it counts any, are those of the task."""
    option = options_of(ENCODINGS[name]).get("digits")
    return option is None or tuple(option.default) == task.digits


def _require_digits(label: str, task: Task, vocabulary: int) -> None:
    """ValueError for a wrong label, and for one that counts digits by ids that are not the task's."""
    for spec in parse_label(label).encodings:
        digits = spec.get("digits")
        if digits is None and not _counts(spec["name"], task):
            raise ValueError(
                f"--encodings {label}: {spec['name']!r} counts digits of numbers written least significant digit first, "
                f"and --task {task.name} has no digits with its ids; use --task addition-reversed, or give ids, for bytes: "
                f"{spec['name']}:digits={','.join(map(str, range(48, 58)))}"
            )
        digits = digits if isinstance(digits, list) else [digits]
        if beyond := [n for n in digits if isinstance(n, int) and n >= vocabulary]:
            expected = f"digits below {vocabulary}, the vocabulary of --task {task.name}"
            raise UsageError(f"--encodings {label}", expected, beyond[0])


def layers_of(config: LongitudeConfig) -> list[Any]:
    """The mixer of each layer with every option, and its encodings: equal for labels that describe the same model."""
    layers = zip(config.layer_mixers(), config.layer_specs(), strict=True)
    return [(mixer["name"], config.mixer_options(mixer), specs) for mixer, specs in layers]


# ---- what it takes ---------------------------------------------------------------------------------------------------
def costs(
    planned: StudyPlan, on_progress: Callable[[str, float, float], None] = lambda *now: None, timed: bool = True
) -> list[Cost]:
    """The training and the measuring of a trial of every label, in the order of the study; nothing is written.

    Time is measured by real steps, so it includes all work of a layer. A measured token takes a third of a training token.

    Args:
        planned: Result of `plan`.
        on_progress: Called with a label, the number of labels that are done, and the number of all labels.
        timed: Whether to run a few steps of each; else seconds are None.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the Trainer warns of checkpoints seconds apart
    config, task, estimates = planned.config, task_of(planned.config.task), list[Cost]()
    steps, tokens, measured = config.steps, tokens_read(config, planned.data), task.measured_tokens(config)
    with threads(config.threads):
        for i, label in enumerate(config.encodings):
            on_progress(label, i, len(config.encodings))
            model = on_meta(config, label)
            per_token = flops_per_token(config, model)
            step = _step_seconds(planned, label) if timed else None
            training = Cost(
                model=label,
                part="training",
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                steps=steps,
                length=config.train_length,
                tokens=tokens,
                flops=per_token * tokens,
                memory=training_memory(
                    model, model.config, config.batch_size, task.positions(config.train_length), False
                ),
                seconds=None if step is None else step * steps,
            )
            share = measured / (TRAINING * steps * config.batch_size * config.train_length)
            measuring = Cost(
                model=label,
                part="measuring",
                length=config.test_lengths[-1],
                tokens=round(measured),
                flops=per_token / TRAINING * measured,
                seconds=None if training.seconds is None else training.seconds * share,
            )
            estimates += training, measuring
    return estimates


def wall_seconds(costs: Sequence[Cost], seeds: int, workers: int, rates: int = 1) -> float:
    """Wall time of all trials in seconds, `workers` at a time: the least, as if no worker waited before the last trial ends.

    With several learning rates the first seed is trained at each before anything is measured.
    """
    training, measuring = (
        [cost.seconds or 0.0 for cost in costs if cost.part == part] for part in ("training", "measuring")
    )
    whole = [sum(trial) for trial in zip(training, measuring, strict=True)]
    rounds = [whole * seeds] if rates == 1 else [training * rates, measuring + whole * (seeds - 1)]
    return sum(max(sum(seconds) / workers, *seconds) for seconds in rounds)


def _step_seconds(planned: StudyPlan, label: str) -> float:
    """Seconds of a training step: the median of a few."""
    config = replace(planned.config, steps=STEPS)
    trial, times = Trial(label, config.seeds[0], config.learning_rates[0]), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        model, timed = build_model(config, label, trial.seed), lambda *_: times.append(time.perf_counter())
        train(model, config, trial, planned.data, Path(folder), timed, note=lambda _: None)
    return median(after - before for before, after in pairwise(times[WARM:]))
