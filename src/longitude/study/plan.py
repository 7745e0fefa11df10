"""A study before it begins: every check that needs no writing, so that what is wrong is refused before anything is trained."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longitude.errors import unknown
from longitude.models.decoder import LongitudeModel
from longitude.positions.base import ENCODINGS, encoding
from longitude.positions.composed import Composed
from longitude.runs.device import device_of
from longitude.runs.files import LOCK, require_space
from longitude.study.config import GENERATED, StudyConfig, option
from longitude.study.data import StudyData
from longitude.study.labels import parse_label, safe
from longitude.study.tasks.base import Task, sampler_of, task_of
from longitude.study.train import build_model
from longitude.study.trial import Trial

LEAST = {"train_length": 2, "steps": 1, "batch_size": 1, "layers": 1, "hidden": 1, "heads": 1, "documents": 1}


@dataclass(frozen=True)
class StudyPlan:
    """A study that passed every check, with its text read; nothing is written yet."""

    config: StudyConfig
    data: StudyData
    run: Path

    @property
    def trials(self) -> list[Trial]:
        """In the order in which they run."""
        return [Trial(self.run, label, seed) for seed in self.config.seeds for label in self.config.encodings]


def plan(config: StudyConfig, run: Path) -> StudyPlan:
    """Check options, models, device, text, directory and disk, in this order. ValueError for the user."""
    config = checked(config)
    task, sizes = task_of(config.task), []
    built: dict[str, list[Any]] = {}
    for label in config.encodings:
        try:
            model = build_model(config, label, 0)
            sizes.append(sum(parameter.numel() for parameter in model.parameters()))
            layers = layers_of(model)
            if same := [other for other, theirs in built.items() if theirs == layers]:
                raise ValueError(f"it names the same model as {same[0]}, option by option; leave one of them out")
            built[label] = layers
            with torch.no_grad():
                task.try_out(model, config)
        except ValueError as error:
            raise ValueError(f"--encodings {label}: {error}") from error
    device: Any = device_of(config.device).type
    planned = StudyPlan(replace(config, device=device), task.prepare(config), run)
    if run.exists() and not run.is_dir():
        raise ValueError(f"--out {run}: there is a file of this name; choose another --out")
    if run.is_dir() and not (run / "study.json").exists() and any(path.name != LOCK for path in run.iterdir()):
        raise ValueError(f"--out {run}: the directory holds other files and no study; choose another --out")
    untrained = sum(not trial.trained for trial in planned.trials)
    require_space(run, 2**24 + untrained * max(sizes) * 4 * 8, "the study")  # a model, three checkpoints, float32
    return planned


# ---- options ---------------------------------------------------------------------------------------------------------
def checked(config: StudyConfig) -> StudyConfig:
    """The configuration with "all" and the range of positions filled in, after the checks of its options. ValueError."""
    task = task_of(config.task)
    for name, right, expected in _rules(config, task):
        if not right:
            raise ValueError(f"{option(name)} must {expected}, got {_listed(getattr(config, name))}")
    for method in config.methods:
        if method not in task.methods:
            raise unknown("method", method, task.methods, "`longitude study --help` explains them.")
    if config.stride is not None and "sliding" not in config.methods:
        raise ValueError("--stride is of sliding windows; add sliding to --methods, or leave --stride out")
    if config.positions == "contiguous" and config.position_range is not None:
        raise ValueError("--position-range is of sampled positions, and --positions is contiguous; leave it out")
    if task.generated != (config.data == GENERATED):
        expected = "generated" if task.generated else "a text"
        raise ValueError(f"--data of --task {task.name} must be {expected}, got {config.data}; leave it out")
    config = replace(config, encodings=_encodings(config.encodings, task))
    if config.positions != "contiguous" and config.position_range is None:
        config = replace(config, position_range=task.positions(config.longest))
    sampler_of(config)  # refuses unknown names
    for name in ("seeds", "methods", "encodings"):
        _once(option(name), getattr(config, name))
    _once("--encodings, as names of folders,", [safe(label).lower() for label in config.encodings])
    return config


def _rules(config: StudyConfig, task: Task) -> Iterator[tuple[str, bool, str]]:
    """Each option with a bound, whether it is within, and what it must do."""
    for name, least in LEAST.items():
        yield name, getattr(config, name) >= least, f"be at least {least}"
    yield "heads", config.hidden % config.heads == 0, f"divide --hidden {config.hidden}"
    lengths, seeds = config.test_lengths, config.seeds
    yield "test_lengths", bool(lengths) and min(lengths) >= 1, f"be positive numbers of {task.unit}"
    yield "test_lengths", all(a < b for a, b in pairwise(lengths)), "ascend without repeats"
    yield "seeds", bool(seeds) and min(seeds) >= 0 and max(seeds) < 2**32, "be numbers from 0 to 2^32 - 1"
    yield "learning_rate", 0 < config.learning_rate < math.inf, "be above 0"
    yield "warmup", 0 <= config.warmup < 1, "be a share of the steps from 0 to below 1"
    yield "weight_decay", 0 <= config.weight_decay < math.inf, "be 0 or more"
    yield "methods", bool(config.methods), f"name at least one of {_listed(task.methods)}"
    yield (
        "stride",
        config.stride is None or 1 <= config.stride <= lengths[0],
        f"be 1 to the shortest length {lengths[0]}",
    )
    if config.positions != "contiguous" and config.position_range is not None:
        needed = task.positions(config.train_length)
        positions = "" if needed == config.train_length else f" with its {needed} positions"
        expected = f"be at least the training length {config.train_length}{positions}"
        yield "position_range", config.position_range >= needed, expected


def _encodings(labels: tuple[str, ...], task: Task) -> tuple[str, ...]:
    """The labels; "all" is every registered encoding, for encoders every one that is not causal only."""
    if not labels:
        raise ValueError("--encodings must name at least one encoding; `longitude list` shows them")
    if "all" not in labels:
        for label in labels:
            parse_label(label)
        return labels
    if len(labels) > 1:
        raise ValueError(f"--encodings is either all or a list of names, got {_listed(labels)}")
    return tuple(
        name for name, kind in ENCODINGS.items() if task.stack == "decoder" or not getattr(kind, "causal_only", False)
    )


def _once(what: str, values: Sequence[Any]) -> None:
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{what} must each be named once, got {value} twice")


def _listed(values: Any) -> str:
    return (" ".join(map(str, values)) if isinstance(values, tuple) else str(values)) or "none"


# ---- models ----------------------------------------------------------------------------------------------------------
def layers_of(model: Any) -> list[Any]:
    """What each layer is built of, to compare models of one shape however their labels spell them.

    That is its mixer with every option, and those encodings that the mixer takes. The order of encodings does not matter where
    they add to scores or columns. It is kept among those that change queries or keys, and among those that change the input:
    (q + u) rotated is not q rotated + u.
    """
    stacks = (stack for stack in model.modules() if isinstance(stack, LongitudeModel))
    return [layer for stack in stacks for layer in _layers_of_stack(stack)]


def _layers_of_stack(stack: LongitudeModel) -> list[Any]:
    config, layers = stack.config, []
    for mixer, spec_of_mixer, specs in zip(stack.mixers, config.layer_mixers(), config.layer_specs(), strict=True):
        taken, of_heads, of_input = [], [], []
        for spec in specs:
            with torch.random.fork_rng():
                members = list(Composed([encoding(**spec)]))
            places = [place for place, member in enumerate(members) if mixer.refuses(member) is None]
            if spec["name"] == "none" or not places:
                continue
            composed = Composed([members[place] for place in places])
            taken.append((spec, places))
            of_heads += [spec] if composed.transforms else []
            of_input += [spec] if composed.at_input else []
        taken.sort(key=lambda one: json.dumps(one, sort_keys=True, default=str))
        layers.append((spec_of_mixer["name"], config.mixer_options(spec_of_mixer), taken, of_heads, of_input))
    return layers
