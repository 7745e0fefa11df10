"""A study before it begins: every check that needs no writing, so that what is wrong is refused before anything is trained."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from longitude.errors import unknown
from longitude.labels import folder, parse_label
from longitude.models.decoder import LongitudeModel
from longitude.positions.base import ENCODINGS, encoding
from longitude.positions.composed import Composed
from longitude.registry import options_of
from longitude.runs.device import Device, device_of
from longitude.runs.files import LOCK, require_space
from longitude.study.budget import train_steps
from longitude.study.config import (
    BYTE,
    GENERATED,
    StudyConfig,
    listed,
    option,
    require_distinct,
    require_numbers,
    with_all,
)
from longitude.study.data import StudyData
from longitude.study.rates import choices, chosen, is_candidate
from longitude.study.record import grown, read_study
from longitude.study.start import with_start
from longitude.study.tasks.base import Task, sampler_of, task_of
from longitude.study.train import build_model
from longitude.study.trial import Trial, trials_of


@dataclass(frozen=True)
class StudyPlan:
    """A study that passed every check, with its text read; nothing is written yet.

    Attributes:
        config: The whole study, with what the directory holds of it.
        named: The encodings, seeds, lengths and methods that were asked for.
        steps: Of the labels that have steps of their own.
        saved: study.json as it was read; None where there was none.
    """

    config: StudyConfig
    data: StudyData
    run: Path
    named: StudyConfig
    steps: dict[str, int] = field(default_factory=dict)
    saved: dict[str, Any] | None = None

    @property
    def grows(self) -> bool:
        """Whether something is asked for that the directory does not hold."""
        return self.saved is None or StudyConfig.of(self.saved["configuration"]) != self.config

    @property
    def every_trial(self) -> list[Trial]:
        """Of the whole study."""
        return trials_of(self.run, self.config, self.steps)

    @property
    def trials(self) -> list[Trial]:
        """Those to run, in this order: of the whole study where it grows, else of the labels and seeds that were named."""
        if self.grows:
            return self.every_trial
        return [
            each for each in self.every_trial if each.label in self.named.encodings and each.seed in self.named.seeds
        ]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run."""
        statuses = {trial: trial.status for trial in self.every_trial}
        found = choices(statuses)
        one = len(self.config.learning_rates) == 1
        candidates = one or all(is_candidate(statuses[trial]) for trial in self.trials)
        return candidates and all(
            statuses[trial].status in ("done", "diverged") for trial in chosen(self.trials, found)
        )


def plan(config: StudyConfig, run: Path, fresh: bool = False) -> StudyPlan:
    """Check options, directory, models, device, text and disk. ValueError for the user.

    Args:
        config: What is asked for.
        run: Where. A study there is continued and grows.
        fresh: It is not, and will be removed.
    """
    saved = None if fresh or not run.is_dir() else read_study(run)
    before = None if saved is None else StudyConfig.of(saved["configuration"])
    named = checked(config, before)
    named = replace(named, device=cast(Device, device_of(named.device).type))
    config = named if before is None else checked(grown(named, before, run))
    task, sizes = task_of(config.task), []
    task.vocabulary(config)  # refuses a tokenizer before models are blamed
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
    planned = StudyPlan(config, with_start(config, task.prepare(config), run), run, named, train_steps(config), saved)
    if run.exists() and not run.is_dir():
        raise ValueError(f"--out {run}: there is a file of this name; choose another --out")
    if run.is_dir() and not (run / "study.json").exists() and any(path.name != LOCK for path in run.iterdir()):
        raise ValueError(f"--out {run}: the directory holds other files and no study; choose another --out")
    untrained = sum(not trial.trained for trial in planned.trials)
    require_space(run, 2**24 + untrained * max(sizes) * 4 * 8, "the study")  # a model, three checkpoints, float32
    return planned


# ---- options ---------------------------------------------------------------------------------------------------------
def checked(config: StudyConfig, before: StudyConfig | None = None) -> StudyConfig:  # noqa: C901
    """The configuration with "all", the split and the range of positions filled in, after the checks of its options. ValueError.

    before: of the study that it continues, whose lengths fill them in.
    """
    task = task_of(config.task)
    require_numbers(config)
    for name, right, expected in _rules(config, task):
        if not right:
            given = getattr(config, name)
            raise ValueError(
                f"{option(name)} must {expected}, got {listed(given) if isinstance(given, tuple) else given}"
            )
    for name, lengths in (("train_length", (config.train_length,)), ("test_lengths", config.test_lengths)):
        for length in lengths:
            try:
                task.require_length(length)
            except ValueError as error:
                raise ValueError(f"{option(name)}: {error}") from error
    for method in config.methods:
        if method not in task.valid_methods():
            raise unknown("method", method, task.valid_methods(), "`longitude study --help` explains them.")
    if config.stride is not None and "sliding" not in config.methods:
        raise ValueError("--stride is of sliding windows; add sliding to --methods, or leave --stride out")
    if config.positions == "contiguous" and config.position_range is not None:
        raise ValueError("--position-range is of sampled positions, and --positions is contiguous; leave it out")
    if task.generated != (GENERATED in config.data) or (task.generated and len(config.data) > 1):
        expected = "generated" if task.generated else "a text"
        raise ValueError(f"--data of --task {task.name} must be {expected}, got {listed(config.data)}; leave it out")
    if config.tokenizer != BYTE and not task.tokenized:
        raise ValueError(f"--tokenizer is of --task text, and --task is {task.name}; leave it out")
    labels = with_all(config.encodings, lambda: _meaningful(task))
    for label in labels:
        _require_digits(label, task, task.vocabulary(config)["vocab_size"])
    require_distinct("encodings, as names of folders,", ["-".join(folder(label)).lower() for label in labels])
    longest = (before or config).longest
    config = replace(
        config, encodings=labels, split_length=config.split_length or (before and before.split_length) or longest
    )
    if config.positions != "contiguous" and config.position_range is None:
        kept = before.position_range if before and before.positions == config.positions else None
        config = replace(config, position_range=kept or task.positions(longest))
    sampler_of(config)  # refuses unknown names
    return config


def _rules(config: StudyConfig, task: Task) -> Iterator[tuple[str, bool, str]]:
    """Each option with a bound, whether it is within, and what it must do."""
    shortest = config.test_lengths[0]
    yield "heads", config.hidden % config.heads == 0, f"divide --hidden {config.hidden}"
    yield "seeds", min(config.seeds) >= 0 and max(config.seeds) < 2**32, "be numbers from 0 to 2^32 - 1"
    yield "learning_rates", all(0 < rate < math.inf for rate in config.learning_rates), "be above 0"
    yield "warmup", 0 <= config.warmup < 1, "be a share of the steps from 0 to below 1"
    yield "weight_decay", 0 <= config.weight_decay < math.inf, "be 0 or more"
    yield "stride", config.stride is None or 1 <= config.stride <= shortest, f"be 1 to the shortest length {shortest}"
    if config.positions != "contiguous" and config.position_range is not None:
        needed = task.positions(config.train_length)
        positions = "" if needed == config.train_length else f" with its {needed} positions"
        expected = f"be at least the training length {config.train_length}{positions}"
        yield "position_range", config.position_range >= needed, expected


def _meaningful(task: Task) -> Iterator[str]:
    """Every registered encoding: for encoders without those that are causal only, and none that counts digits of other ids."""
    for name, kind in ENCODINGS.items():
        if (task.stack == "decoder" or not getattr(kind, "causal_only", False)) and _counts(name, task):
            yield name


def _counts(name: str, task: Task) -> bool:
    """Whether the digits that an encoding counts by default, if it counts any, are those of the task."""
    option = options_of(ENCODINGS[name]).get("digits")
    return option is None or tuple(option.default) == task.digits


def _require_digits(label: str, task: Task, vocabulary: int) -> None:
    """ValueError for a label that is none, or counts digits that are none in the task."""
    for spec in parse_label(label).encodings:
        digits = spec.get("digits")
        if digits is None and not _counts(spec["name"], task):
            raise ValueError(
                f"--encodings {label}: {spec['name']!r} counts digits of numbers that begin with the least one, and --task "
                f"{task.name} writes none of its ids; use --task addition-reversed, or write the ids, as those of bytes: "
                f"{spec['name']}:digits={','.join(map(str, range(48, 58)))}"
            )
        beyond = [
            n for n in (digits if isinstance(digits, list) else [digits]) if isinstance(n, int) and n >= vocabulary
        ]
        if beyond:
            raise ValueError(
                f"--encodings {label}: expected digits below {vocabulary}, the vocabulary of --task {task.name}, got {beyond[0]}"
            )


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
