"""The studies that claims are judged on, one after the other.

Each is an ordinary study, of the preset claims/NAME, in a folder of its own. Options that are given apply to all of them;
series.json keeps them, so that a verdict is drawn with the options that its studies were run with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

from claims.base import claims_of, list_claims
from claims.evidence import KEPT
from claims.protocol import (
    ELSEWHERE,
    FILE,
    LADDER,
    OPTIONS,
    SCHEMA,
    SERIES,
    differs,
    given_options,
    in_words,
    preset_name,
    preset_of,
)
from longitude.runs.device import Device, device_of
from longitude.runs.files import write_json
from longitude.runs.store import Store
from longitude.study.analysis import analyse
from longitude.study.config import StudyConfig, listed, option
from longitude.study.executors import Executor
from longitude.study.plan import costs, plan
from longitude.study.presets import list_presets, of_preset
from longitude.study.report import write_report
from longitude.study.results import is_kept, read_run
from longitude.study.run_trial import Note
from longitude.study.runner import Watch, study
from longitude.study.start import is_there


@dataclass(frozen=True)
class Member:
    """A study of the series: its name, what its preset asks with the options that were given, and its folder."""

    name: str
    config: StudyConfig
    run: Path


def list_studies() -> list[str]:
    """The names of the studies, in the order of the claims that read them; then those that no claim reads."""
    there = [name.removeprefix(f"{SERIES}/") for name in list_presets() if name.startswith((f"{SERIES}/", LADDER))]
    read = dict.fromkeys(study for claim in list_claims() for study in claim.studies)
    return [
        *(name for name in read if name in there),
        *(name for name in there if name not in read and not name.startswith(LADDER)),
    ]


def members(root: Path, claims: Sequence[str], options: Mapping[str, Any], fresh: bool = False) -> list[Member]:
    """The studies that claims read, or all of them; what may stop one is refused before the first begins.

    Args:
        root: The folder of the series.
        claims: Their names; none: all.
        options: Fields of StudyConfig that were given.
        fresh: What is in the folders will be removed.

    Raises:
        ValueError: An unknown claim, or one that reads no study; an option that each study has of its own; a folder whose series
            was begun with other options.
    """
    for name in options:
        if name not in OPTIONS:
            raise ValueError(
                f"{option(name)} is each study's own; leave it out, or run one study alone: longitude study --preset "
                f"{SERIES}/NAME, of {', '.join(list_studies())}"
            )
    names = list_studies()
    if claims:
        read = {study for claim in claims_of(claims) for study in claim.studies}
        names = [name for name in names if name in read]
        if not names:
            raise ValueError(f"--only {listed(claims)}: no study is read; docs/claims.md says what it would take")
    if not fresh:
        _require_same_options(root, options)
    return [_member(root, name, options) for name in _after_their_starts(names)]


def _after_their_starts(names: Sequence[str]) -> list[str]:
    """The same studies, each after the one whose models it trains on, which is added where it is missing."""
    there, found = list_studies(), dict[str, None]()

    def add(name: str) -> None:
        start = (of_preset(preset_name(name)).start or "").partition(":")[0]
        if start in there and start not in found:
            add(start)
        found[name] = None

    for name in names:
        add(name)
    return list(found)


def _member(root: Path, name: str, options: Mapping[str, Any]) -> Member:
    config = preset_of(name, options)
    return Member(name, replace(config, device=cast(Device, device_of(config.device).type)), root / name)


def begin(root: Path, options: Mapping[str, Any], fresh: bool = False) -> None:
    """Write the options of a series, with the seeds of before unless that is removed."""
    before = {} if fresh else given_options(root)
    options = dict(options)
    if "seeds" in before and "seeds" in options:
        options["seeds"] = tuple(dict.fromkeys([*before["seeds"], *options["seeds"]]))
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / FILE, {"schema": SCHEMA, "options": options})


def _require_same_options(root: Path, options: Mapping[str, Any]) -> None:
    if not (root / FILE).exists():
        return
    before = given_options(root)
    for name in {**before, **options}:
        if name not in (*ELSEWHERE, "seeds") and before.get(name) != options.get(name):
            was, now = (in_words(each.get(name)) for each in (before, options))
            raise ValueError(
                f"{root} was begun with {option(name)} {was}, not {now}; give the same options, or name another folder"
            )


# ---- how long --------------------------------------------------------------------------------------------------------
class Time(NamedTuple):
    """What a study of the series will take.

    Attributes:
        study: Its name.
        models: That are still to be trained.
        seconds: Of all of them, one by one.
        source: What says so.
    """

    study: str
    models: int
    seconds: float
    source: str


def time_of(member: Member, fresh: bool, on_progress: Callable[[str, float, float], None]) -> Time:
    """As committed results of the study took, else from a few steps of each model on this machine."""
    config = member.config
    if config.start and not is_there(config.start, member.run):  # it is trained before this one
        config = replace(config, start=None)
    planned, store = plan(config, member.run), Store(member.run)
    every = {(units.trial.seed, units.trial.label) for units in planned.trials}
    done = {(units.trial.seed, units.trial.label) for units in planned.trials if store.holds(units.measuring)}
    waiting = [label for _, label in (every if fresh else every - done)]
    if not waiting:
        return Time(member.name, 0, 0.0, "done")
    seconds, source = _committed(member), "as committed"
    if seconds is None:
        found = costs(planned, on_progress)
        seconds, source = dict.fromkeys(config.encodings, 0.0), "from a few steps here"
        for cost in found:
            seconds[cost.model] += cost.seconds or 0.0
    return Time(member.name, len(waiting), sum(seconds[label] for label in waiting), source)


def _committed(member: Member) -> dict[str, float] | None:
    """Seconds of a model of each label, of a committed run with the same options but steps; None where there is none."""
    folder = KEPT / member.name
    if not is_kept(folder):
        return None
    run = read_run(folder)
    if differs(replace(member.config, steps=run.config.steps), run.study):
        return None
    found, share = {}, member.config.steps / run.config.steps
    for label in member.config.encodings:
        times = [(trial.training_seconds, trial.measuring_seconds) for trial in run.of(label)]
        whole = [share * train + measure for train, measure in times if train is not None and measure is not None]
        if not whole:
            return None
        found[label] = mean(whole)
    return found


# ---- running ---------------------------------------------------------------------------------------------------------
def run_series(
    found: Sequence[Member],
    executor_of: Callable[[StudyConfig, int], Executor],
    fresh: bool,
    on_progress: Watch,
    note: Note,
) -> bool:
    """Run the studies one after the other, and write the report of each; what fails in one does not stop the next.

    Args:
        found: Of `members`.
        executor_of: Where this many trials of a study run.
        fresh: Remove what their folders hold.
        on_progress: As of `longitude.study.runner.study`.
        note: Likewise.

    Returns:
        Whether every model of all of them is done.
    """
    complete = True
    for place, member in enumerate(found, 1):
        note(f"study {member.name}, {place} of {len(found)}")
        try:
            planned = plan(member.config, member.run)
            found_in = study(planned, fresh, on_progress, note, executor_of(planned.config, len(planned.trials)))
            note(f"report: {write_report(analyse(found_in))}")
            complete &= found_in.complete
        except ValueError as error:
            note(f"study {member.name} did not end: {error}")
            complete = False
    return complete
