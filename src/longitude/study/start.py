"""Start training from the models of another study, with the same seeds, instead of from random weights."""

import hashlib
from dataclasses import replace
from pathlib import Path

from longitude.errors import UsageError
from longitude.study.config import StudyConfig
from longitude.study.data import StudyData
from longitude.study.results import Run, TrialResult, is_study, read_run
from longitude.study.train import build_model, take_weights

WEIGHTS = "model.safetensors"


def with_start(config: StudyConfig, data: StudyData, run: Path) -> StudyData:
    """The data with the model of --start for every seed. ValueError if there is none, or it does not fit a label."""
    if config.start is None:
        return data
    who = f"--start {config.start}"
    of, label = _found(config.start, run)
    if of.path.resolve() == run.resolve():
        raise ValueError(f"{who} is this study; name another")
    theirs = of.study["data"]
    if theirs.get("training_sha256") != data.description.get("training_sha256"):
        text = f"another text ({theirs['source']}), which may have what is measured here"
        raise ValueError(f"{who} was trained on {text}; give the same --data")
    trials = {trial.seed: trial for trial in of.of(label)}
    weights = {seed: _weights(trials.get(seed), f"{who}: {label} of seed {seed}", of.path) for seed in config.seeds}
    if of.config.heads != config.heads:  # which the shapes of the weights do not show
        raise UsageError(who, f"--heads {of.config.heads}, with which it was trained", config.heads)
    for wanted in config.encodings:
        try:
            take_weights(build_model(config, wanted, 0), weights[config.seeds[0]])
        except ValueError as error:
            raise ValueError(f"{who} does not fit --encodings {wanted}: {error}") from None
    sha256 = {str(seed): hashlib.sha256(file).hexdigest() for seed, file in weights.items()}
    return replace(data, start=weights, description=data.description | {"start": label, "start_sha256": sha256})


def _folder(start: str, run: Path) -> Path:
    """The folder that --start names; a name without a slash is next to this study's folder."""
    name = start.partition(":")[0]
    return Path(name) if "/" in name else run.parent / name


def _found(start: str, run: Path) -> tuple[Run, str]:
    """The study that --start names, and its label."""
    name, _, label = start.partition(":")
    folder = _folder(start, run)
    if not is_study(folder):
        near = "" if "/" in name else f" (a name without a slash is looked for next to {run})"
        got = f"none in {folder}{near}"
        raise UsageError(f"--start {start}", "a study", got, "run it first, or name its folder")
    of = read_run(folder)
    if not label and len(of.labels) > 1 or label and label not in of.labels:
        named = " ".join(f"{name}:{label}" for label in of.labels)
        raise UsageError(f"--start {start}", f"one label of the study, such as {named}", label or "none")
    return of, label or of.labels[0]


def _weights(trial: TrialResult | None, which: str, folder: Path) -> bytes:
    """The weights of a trial. ValueError if it is not done."""
    if trial is None:
        remedy = f"add it with `longitude study --out {folder} --seeds`, or leave this seed out"
        raise ValueError(f"{which} was not trained; {remedy}")
    if trial.status != "done" or not (trial.folder / WEIGHTS).exists():
        ended = trial.reason or trial.status
        raise ValueError(f"{which} is not done: {ended}; finish the study in {folder}, or leave this seed out")
    return (trial.folder / WEIGHTS).read_bytes()
