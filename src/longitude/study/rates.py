"""One learning rate for each label, chosen by a fixed rule.

Every label is trained at every rate with the first seed; it gets the rate with the lowest loss at the training length on the
selection text, ties go to the lowest rate. The other seeds are trained at that rate alone. The selection text is used neither for
training nor for measuring. A rate at which the model diverged is never chosen. The tested lengths are not considered.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longitude.report.wording import named
from longitude.study.config import StudyConfig
from longitude.study.trial import Status, Trial

Losses = dict[float, float | None]
"""Rate -> loss on the selection text in nats per target; None if the model diverged."""


class Choice(NamedTuple):
    """The learning rate of a label.

    Attributes:
        rate: The chosen rate; None if the model diverged at every rate.
        losses: Loss of every candidate.
    """

    rate: float | None
    losses: Losses

    @property
    def edge(self) -> str | None:
        """End of the tried rates at which the chosen rate is, "lowest" or "highest"; None if it is at neither."""
        ends = {min(self.losses): "lowest", max(self.losses): "highest"}
        return None if self.rate is None or len(self.losses) < 2 else ends.get(self.rate)

    @property
    def as_json(self) -> dict[str, Any]:
        """The choice for question.json, with text as keys."""
        return {"rate": self.rate, "losses": {str(rate): loss for rate, loss in self.losses.items()}}


def choose(losses: Losses) -> Choice:
    """Choose the rate with the lowest loss, the lowest rate if several tie."""
    ended = [(loss, rate) for rate, loss in losses.items() if loss is not None]
    return Choice(min(ended)[1] if ended else None, losses)


def is_candidate(status: Status) -> bool:
    """Whether a trial has ended for the choice: its loss is known, or it diverged."""
    return status.selection is not None or status.status == "diverged"


def recorded(study: Mapping[str, Any]) -> dict[str, Choice]:
    """The choices saved in a question, by label."""
    choices = {}
    for label, saved in study["choices"].items():
        choices[label] = Choice(saved["rate"], {float(rate): loss for rate, loss in saved["losses"].items()})
    return choices


def chosen_rates(choices: Mapping[str, Choice]) -> list[str]:
    """Line on the chosen rates; empty for a study with one rate."""
    rates = [f"{named(label)} {choice.rate:g}" for label, choice in choices.items() if choice.rate is not None]
    return [f"learning rates, by the loss on text held out for this choice: {', '.join(rates)}"] if rates else []


def edges(choices: Mapping[str, Choice]) -> list[str]:
    """Lines on labels without a chosen rate, and on labels with a rate at an end of the sweep."""
    groups = {"diverged at every learning rate": [label for label, choice in choices.items() if choice.rate is None]}
    for end in ("lowest", "highest"):
        at_end = [label for label, choice in choices.items() if choice.edge == end]
        groups[f"widen the sweep, the {end} learning rate is the best"] = at_end
    return [f"{where}: {', '.join(map(named, labels))}" for where, labels in groups.items() if labels]


def models_trained(config: StudyConfig) -> int:
    """How many models a study trains."""
    return len(config.encodings) * (len(config.learning_rates) + len(config.seeds) - 1)


def candidates(trials: Sequence[Trial]) -> list[Trial]:
    """Trials of the first seed, whose rates are compared; trials: all of a study, in its order."""
    return [trial for trial in trials if trial.seed == trials[0].seed]


def choices(statuses: Mapping[Trial, Status]) -> dict[str, Choice]:
    """Choice of every label with only candidate trials; empty for a study with one rate."""
    if len({trial.rate for trial in statuses}) < 2:
        return {}
    losses, swept = dict[str, Losses](), candidates([*statuses])
    for trial in swept:
        if is_candidate(statuses[trial]):
            losses.setdefault(trial.label, {})[trial.rate] = statuses[trial].selection
    missing = {trial.label for trial in swept if not is_candidate(statuses[trial])}
    return {label: choose(of_label) for label, of_label in losses.items() if label not in missing}


def chosen(trials: Sequence[Trial], choices: Mapping[str, Choice]) -> list[Trial]:
    """Trials at the chosen rate of their label; all trials of a study with one rate."""
    single = len({trial.rate for trial in trials}) == 1
    return [trial for trial in trials if single or trial.label in choices and choices[trial.label].rate == trial.rate]


def shown(statuses: Mapping[Trial, Status], choices: Mapping[str, Choice]) -> list[Trial]:
    """One trial for each label and seed: at the chosen rate; if none is chosen, at the lowest rate without a loss."""
    rates = {trial.label: trial.rate for trial in chosen([*statuses], choices)}
    for trial in sorted(candidates([*statuses]), key=lambda trial: (statuses[trial].selection is not None, trial.rate)):
        rates.setdefault(trial.label, trial.rate)
    return [trial for trial in statuses if rates.get(trial.label) == trial.rate]
