"""The units of a study: a model's training, its measurement, and the n-grams that it must beat."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from longitude import plugins
from longitude.runs.store import Unit
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.tasks.base import task_of
from longitude.study.train import recipe
from longitude.study.trial import Trial, trials_of

TRAINING = (
    "task", "tokenizer", "train_length", "positions", "position_range", "steps", "batch_size",
    "precision", "warmup", "weight_decay", "layers", "hidden", "heads", "device", "threads",
)  # fmt: skip
"""Options that decide the weights of a trial, beside its label, seed and learning rate."""
MEASURING = ("test_lengths", "methods", "stride", "documents")
"""Options that decide the measurement of a trained model."""


class Keys(NamedTuple):
    """A trial, and the keys of its units."""

    trial: Trial
    training: str
    measuring: str


@dataclass(frozen=True)
class TrialUnits:
    """A trial with its two units."""

    trial: Trial
    training: Unit
    measuring: Unit

    @property
    def keys(self) -> Keys:
        """The trial with the keys of its units, for a question."""
        return Keys(self.trial, self.training.key, self.measuring.key)


def units_of(config: StudyConfig, trial: Trial, data: Mapping[str, Any]) -> TrialUnits:
    """The units of a trial.

    Args:
        config: The study's configuration.
        trial: One of its trials.
        data: The description of its data: hashes of the text stand for the options that chose it.
    """
    options = asdict(config)
    trained = {name: options[name] for name in TRAINING} | asdict(trial)
    # Generated tasks have no text: their examples follow from the options, those of the selection from --documents.
    trained |= {"text": data.get("training_sha256"), "selection": data.get("selection_sha256", config.documents)}
    trained |= {"start": data.get("start_sha256", {}).get(str(trial.seed)), "recipe": recipe(config)}
    # A table of positions covers those of training; sampled positions may make it longer.
    trained["trained_positions"] = task_of(config.task).trained_positions(config)
    trained["plugins"] = [record["sha256"] for record in plugins.records(config.task, trial.label)]
    training = Unit("train", trial.name, plain(trained))
    measured = {name: options[name] for name in MEASURING} | {"training": training.key, "text": data["sha256"]}
    measured["plugins"] = [record["sha256"] for record in plugins.records(config.task, *config.methods)]
    return TrialUnits(trial, training, Unit("measure", trial.name, plain(measured)))


def ngrams_unit(config: StudyConfig, data: Mapping[str, Any]) -> Unit:
    """The unit of n-grams counted on the training windows of the first seed."""
    names = ("task", "tokenizer", "train_length", "batch_size", "steps", "test_lengths", "positions")
    counted = {name: getattr(config, name) for name in names} | {"seed": config.seeds[0]}
    counted |= {"training": data.get("training_sha256"), "text": data["sha256"]}
    return Unit("ngrams", config.task, plain(counted))


@dataclass(frozen=True)
class StudyPlan:
    """A study that passed every check, with its text read; nothing is written yet.

    Attributes:
        config: Requested configuration.
        data: Data for training and measuring.
        run: The run directory.
        models: Label -> mixer and encodings of its layers, each different one once, with every option, such as RoPE's base.
    """

    config: StudyConfig
    data: StudyData
    run: Path
    models: dict[str, list[Any]] = field(default_factory=dict)

    @cached_property
    def trials(self) -> list[TrialUnits]:
        """Every trial with its units, in the order of the study."""
        return [units_of(self.config, trial, self.data.description) for trial in trials_of(self.config)]

    @cached_property
    def ngrams(self) -> Unit:
        """The n-grams that every model must beat."""
        return ngrams_unit(self.config, self.data.description)


def plain(value: Any) -> Any:
    """A value as JSON stores it: lists instead of tuples."""
    return json.loads(json.dumps(value))
