"""What a study and each of its trials wrote about themselves, study.json and trial.json, and what of them goes together.

A trial's own record holds what decides its numbers. Where it differs from the study's, the trial is refused by name: a folder
that was copied, renamed or half replaced is never reported as what it is not.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longitude.labels import safe
from longitude.measure.rows import read_rows
from longitude.runs.files import parquet_rows, read_json, write_json
from longitude.study.config import StudyConfig, listed, option
from longitude.study.trial import Status, Trial

SCHEMA = 3
"""Of study.json and trial.json."""
STUDY, TRIAL = "study.json", "trial.json"
GROWING = ("encodings", "seeds", "learning_rates", "test_lengths", "methods")
"""Options of which a study may be given more: new trials are trained, learning rates chosen among all, and what is chosen is
measured at every length, by every method."""
MEASURING = ("test_lengths", "methods", "stride")
"""Options that decide what is measured of a trained model."""
ELSEWHERE = "leave --out out, then another question has a folder of its own, or name another --out"


# ---- study.json ------------------------------------------------------------------------------------------------------
def read_study(run: Path) -> dict[str, Any] | None:
    """study.json; None where there is none.

    Raises:
        ValueError: It is no JSON, or not of this release's schema.
    """
    path = run / STUDY
    if run.exists() and not run.is_dir():
        raise ValueError(f"--out {run}: there is a file of this name; choose another --out")
    saved = read_json(path, "restore it from a copy, or name another --out")
    if saved is None:
        return None
    schema = saved.get("schema") if isinstance(saved, dict) else None
    if not isinstance(schema, int):
        raise ValueError(f"{path} has no schema number, so it is not what `longitude study` writes; name another --out")
    if schema != SCHEMA:
        raise ValueError(
            f"{path} has schema {schema}, of another release; this one reads schema {SCHEMA}: use that release of longitude, "
            "or name another --out"
        )
    if missing := [
        key for key in ("configuration", "data", "versions", "machine") if not isinstance(saved.get(key), dict)
    ]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; restore it from a copy, or name another --out")
    try:
        config = StudyConfig.of(saved["configuration"])
        written = {name for name, value in _plain(asdict(config)).items() if value is not None}
        if missing := written - set(saved["configuration"]):
            raise ValueError(f"the configuration lacks {', '.join(sorted(missing))}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; restore it from a copy, or name another --out") from None
    return saved


def grown(config: StudyConfig, saved: StudyConfig, run: Path) -> StudyConfig:
    """The saved study with what may grow of `config` added. ValueError for any other difference."""
    before, now = asdict(saved), asdict(config)
    for name in before:
        if name not in GROWING and before[name] != now[name]:
            old, new = (listed(each) if isinstance(each, tuple) else each for each in (before[name], now[name]))
            raise ValueError(f"{run} holds a study with {option(name)} {old}, not {new}; {ELSEWHERE}")
    both = {name: tuple(dict.fromkeys([*before[name], *now[name]])) for name in GROWING}
    both["test_lengths"] = tuple(sorted(both["test_lengths"]))
    return replace(saved, **both)


def place_of(config: StudyConfig, default: StudyConfig, out: Path) -> Path:
    """Where a study goes that names no folder: `out` for the default question, else a folder of its own.

    The name is made of the options that differ from the default, and a hash; so is it where `out` holds another question.
    """
    now, usual = _question(config), _question(default)
    different = {name: value for name, value in now.items() if value != usual.get(name)}
    if not different:
        saved = read_study(out)
        if saved is None or _question(StudyConfig.of(saved["configuration"])) == now:
            return out
    words = [f"{name}={listed(value) if isinstance(value, list) else value}" for name, value in different.items()]
    digest = hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:6]
    return out.with_name("-".join([out.name, safe("-".join(words))[:80], digest]).replace("--", "-"))


def _question(config: StudyConfig) -> dict[str, Any]:
    """What another study differs in; of what the first run fills in, only what was given."""
    sampled = {} if config.positions == "contiguous" else {"position_range": config.position_range or config.longest}
    free = (*GROWING, "device", "split_length", "position_range")
    return _plain({name: value for name, value in asdict(config).items() if name not in free} | sampled)


def require_same_text(run: Path, was: Mapping[str, Any], now: Mapping[str, Any], measured_alike: bool) -> None:
    """ValueError unless a study trains on the text that it was begun with, and measures alike what is measured alike."""
    for name in ("sha256" if measured_alike else "training_sha256", "selection_sha256"):
        if was.get(name) != now.get(name):
            old, new = (f"{each['source']}, {name} {str(each.get(name))[:12]}" for each in (was, now))
            raise ValueError(f"{run} holds a study of another text ({old}), not {new}; {ELSEWHERE}")
    for seed, sha256 in was.get("start_sha256", {}).items():
        if (other := now["start_sha256"].get(seed)) != sha256:
            raise ValueError(
                f"{run} began from {was['start']} of seed {seed} with weights {sha256[:12]}, which are {str(other)[:12]} now: it "
                f"was trained again; --fresh begins from these, or {ELSEWHERE}"
            )


def require_same_recipe(run: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError unless models that are added are built and trained as those that are there."""
    if different := [name for name in {**was, **now} if was.get(name) != now.get(name)]:
        name = different[0]
        raise ValueError(
            f"{run} holds models trained with {name} {was.get(name)}, this release trains with {now.get(name)}; {ELSEWHERE}"
        )


# ---- trial.json ------------------------------------------------------------------------------------------------------
def record_of(
    config: StudyConfig, trial: Trial, data: Mapping[str, Any], recipe: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What decides the weights of a trial: trial.json before it is measured."""
    options = {name: value for name, value in asdict(config).items() if name not in (*GROWING, *MEASURING)}
    trained = {"label": trial.label, "seed": trial.seed, "learning_rate": trial.rate, **options}
    trained |= {"train_steps": trial.steps, "text": data.get("training_sha256")}
    if "start_sha256" in data:
        trained["start_sha256"] = data["start_sha256"][str(trial.seed)]
    return _plain({"schema": SCHEMA, "trained": trained, "recipe": recipe, "measured": None})


def measured_by(config: StudyConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the rows of a trained model."""
    return _plain({**{name: getattr(config, name) for name in MEASURING}, "sha256": data["sha256"]})


def require_own(trial: Trial, config: StudyConfig, study: Mapping[str, Any]) -> bool:
    """Compare a trial's own record with the study that it stands in.

    Returns:
        Whether its rows are of what the study measures.

    Raises:
        ValueError: It was trained otherwise, or does not say how, or its status or rows are of another trial.
    """
    folder = trial.folder
    own = read_json(folder / TRIAL, trial.remedy)
    if own is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} has no {TRIAL}, so nothing says how it was trained; {trial.remedy}")
        return True
    if not isinstance(own, dict) or own.get("schema") != SCHEMA:
        raise ValueError(f"{folder / TRIAL} is of another release; {trial.remedy}")
    expected = record_of(config, trial, study["data"], study["recipe"])
    for part in ("trained", "recipe"):
        theirs, ours = own.get(part) or {}, expected[part] or {}
        for name in [*ours, *(theirs.keys() - ours.keys())]:
            if theirs.get(name) != ours.get(name):
                words = option(name) if name in StudyConfig.__dataclass_fields__ else name
                raise ValueError(
                    f"{folder} was trained with {words} {theirs.get(name)}, its study has {ours.get(name)}; {trial.remedy}"
                )
    for file, name, theirs, ours in _claims(trial):
        if theirs != ours:
            raise ValueError(f"{folder / file} has {name} {theirs}, its trial has {ours}; {trial.remedy}")
    return own.get("measured") == measured_by(config, study["data"])


def _claims(trial: Trial) -> Iterator[tuple[str, str, Any, Any]]:
    """Where else a folder says of which trial it is: file, name, what it says, what it should; not what it leaves out."""
    status, rows = trial.status, trial.folder / "results.parquet"
    for name in ("label", "seed", "rate", "steps"):
        if name != "steps" or status.steps:
            yield "status.json", name, getattr(status, name), getattr(trial, name)
    if not parquet_rows(rows):
        return
    table = read_rows(rows)
    expected = {"label": trial.label, "seed": trial.seed, "learning_rate": trial.rate, "train_steps": trial.steps}
    for name in [name for name in expected if name in table]:
        for value in table[name].dropna().unique():
            yield rows.name, name, value, expected[name]


def _plain(value: Any) -> Any:
    """As JSON has it: lists instead of tuples."""
    return json.loads(json.dumps(value))


def demote(trial: Trial, why: str) -> Status:
    """A trial that is done is to be measured again: its model stays."""
    status = replace(trial.status, status="trained", reason=why)
    write_json(trial.folder / "status.json", asdict(status))
    return status
