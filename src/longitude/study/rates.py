"""One learning rate for each label, chosen by a fixed rule.

Candidates are the rates at which every label was trained with every seed. A label gets the rate with the lowest loss at the
training length on the selection text, averaged over seeds; ties go to the lowest rate. The selection text is used neither for
training nor for measuring. A rate at which a seed diverged is never chosen. The tested lengths are not considered.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from longitude.report.wording import named
from longitude.study.trial import Status, Trial

Losses = dict[float, dict[int, float | None]]
"""Rate -> seed -> loss on the selection text in nats per target; None where the model diverged."""


class Choice(NamedTuple):
    """The learning rate of a label.

    Attributes:
        rate: None: at every one a seed diverged.
        losses: Loss of every candidate.
    """

    rate: float | None
    losses: Losses

    @property
    def means(self) -> dict[float, float | None]:
        """Rate -> mean over the seeds; None where one diverged."""
        return {rate: mean(each.values()) for rate, each in self.losses.items()}

    @property
    def edge(self) -> str | None:
        """End of the tried rates at which the chosen rate is, "lowest" or "highest"; None if it is at neither."""
        ends = {min(self.losses): "lowest", max(self.losses): "highest"}
        return None if self.rate is None or len(self.losses) < 2 else ends.get(self.rate)

    @property
    def as_json(self) -> dict[str, Any]:
        """The choice for question.json, with text as keys."""
        losses = {str(rate): {str(seed): loss for seed, loss in each.items()} for rate, each in self.losses.items()}
        return {"rate": self.rate, "losses": losses, "means": {str(rate): value for rate, value in self.means.items()}}


def mean(losses: Iterable[float | None]) -> float | None:
    """None where one is missing."""
    each = [*losses]
    return None if None in each else math.fsum(filter(None, each)) / len(each)


def choose(losses: Losses) -> Choice:
    """The rule."""
    chosen = Choice(None, losses)
    means = [(value, rate) for rate, value in chosen.means.items() if value is not None]
    return chosen._replace(rate=min(means)[1]) if means else chosen


def is_candidate(status: Status) -> bool:
    """Whether a trial has ended for the choice: its loss is known, or it diverged."""
    return status.selection is not None or status.status == "diverged"


def recorded(study: Mapping[str, Any]) -> dict[str, Choice]:
    """The choices of a question."""
    found = {}
    for label, saved in study["choices"].items():
        losses = {float(rate): {int(seed): loss for seed, loss in of.items()} for rate, of in saved["losses"].items()}
        found[label] = Choice(saved["rate"], losses)
    return found


def chosen_rates(found: Mapping[str, Choice]) -> list[str]:
    """Line on the chosen rates; empty for a study with one rate."""
    each = [f"{named(label)} {choice.rate:g}" for label, choice in found.items() if choice.rate is not None]
    return [f"learning rates, by the loss on text held out for this choice: {', '.join(each)}"] if each else []


def edges(found: Mapping[str, Choice]) -> list[str]:
    """Lines on labels without a chosen rate, and on labels with a rate at an end of the sweep."""
    groups = {"a seed diverged at every learning rate": [label for label, each in found.items() if each.rate is None]}
    for end in ("lowest", "highest"):
        at_end = [label for label, each in found.items() if each.edge == end]
        groups[f"widen the sweep, the {end} learning rate is the best"] = at_end
    return [f"{words}: {', '.join(map(named, labels))}" for words, labels in groups.items() if labels]


def choices(statuses: Mapping[Trial, Status]) -> dict[str, Choice]:
    """Choice of every label with only candidate trials; empty for a study with one rate."""
    if len({trial.rate for trial in statuses}) < 2:
        return {}
    losses: dict[str, Losses] = {}
    for trial, status in statuses.items():
        if is_candidate(status):
            losses.setdefault(trial.label, {}).setdefault(trial.rate, {})[trial.seed] = status.selection
    missing = {trial.label for trial, status in statuses.items() if not is_candidate(status)}
    return {label: choose(each) for label, each in losses.items() if label not in missing}


def chosen(trials: Sequence[Trial], found: Mapping[str, Choice]) -> list[Trial]:
    """Those at the rate of their label; of a study with one rate all."""
    one = len({trial.rate for trial in trials}) == 1
    return [trial for trial in trials if one or trial.label in found and found[trial.label].rate == trial.rate]


def shown(statuses: Mapping[Trial, Status], found: Mapping[str, Choice]) -> list[Trial]:
    """One trial for each label and seed: the chosen ones, and where none is chosen those of the lowest rate that is why."""
    rates = {trial.label: trial.rate for trial in chosen([*statuses], found)}
    for trial in sorted(statuses, key=lambda trial: (statuses[trial].selection is not None, trial.rate)):
        rates.setdefault(trial.label, trial.rate)
    return [trial for trial in statuses if rates.get(trial.label) == trial.rate]
