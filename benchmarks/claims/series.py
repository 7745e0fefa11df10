"""The studies that claims are judged on: ordinary ones of the presets claims/NAME, run one after the other."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from claims.base import claims_of, list_claims
from claims.evidence import KEPT, Evidence
from claims.protocol import LADDER, MISTAKEN, MISTAKES, SERIES, differs, preset_name, preset_of
from longitude.errors import UsageError
from longitude.study import results
from longitude.study.presets import list_presets, of_preset
from longitude.study.results import Run


def list_studies() -> list[str]:
    """The names of the studies, in the order of the claims that read them; then those that no claim reads."""
    there = [name.removeprefix(f"{SERIES}/") for name in list_presets() if name.startswith((f"{SERIES}/", LADDER))]
    read = dict.fromkeys(study for claim in list_claims() for study in claim.studies)
    unread = [name for name in there if name not in read and not name.startswith(LADDER)]
    return [*(name for name in read if name in there), *unread]


def studies_of(claims: Sequence[str]) -> list[str]:
    """The studies that claims of these names read, each after the one whose models it trains on; of no names, all."""
    there = list_studies()
    read = {study for claim in claims_of(claims) for study in claim.studies} if claims else {*there}
    ordered: dict[str, None] = {}
    for name in (name for name in there if name in read):
        start = (of_preset(preset_name(name)).start or "").partition(":")[0]
        ordered |= dict.fromkeys([start, name] if start in there else [name])
    return list(ordered)


def run(claims: Sequence[str], root: Path, options: Sequence[str]) -> bool:
    """Run the studies that claims read, or go on with them; returns whether every one ended well."""
    names, ended = studies_of(claims), []
    for place, name in enumerate(names, 1):
        print(f"study {name}, {place} of {len(names)}", file=sys.stderr, flush=True)
        line = [sys.executable, "-m", "longitude", "study", "--preset", preset_name(name), "--out", str(root / name)]
        if name in MISTAKEN:
            line += ["--plugin", str(MISTAKES), "--methods", *preset_of(name).methods]
        ended.append(subprocess.run([*line, *options]).returncode == 0)
    return all(ended)


def keep(claims: Sequence[str], root: Path) -> list[Path]:
    """Write the studies that are there, and that claims read, among the committed results, without their models.

    New seeds and labels join those that are committed.
    """
    evidence, kept = Evidence(root), Evidence(KEPT)
    there = [(name, evidence.run(name)) for name in studies_of(claims) if name in evidence.there]
    return [
        results.keep(joined(kept.run(name), run) if name in kept.there else run, KEPT / name) for name, run in there
    ]


PROVENANCE = ("begun", "commit", "machine", "versions")
"""What is kept of a part of a study that was run apart, with its trials, in the study's list "joined"."""


def joined(kept: Run, new: Run) -> Run:
    """A study with the trials of another: its new ones, and those that replace its own of the same label and seed.

    A label need not have the seeds of another. The study stays as it began; "joined" has where its other trials are from.

    Raises:
        ValueError: They are of two protocols, were measured on other documents, or a label has another learning rate.
    """
    ended = [trial for trial in new.trials if trial.status in ("done", "diverged")]
    of_new = {(trial.label, trial.seed) for trial in ended}
    trials = [trial for trial in kept.trials if (trial.label, trial.seed) not in of_new]
    rates = {trial.label: trial.rate for trial in trials}
    for what, theirs, ours in (
        ("the protocol", differs(new.config, kept.study), None),
        *((what, new.study["data"].get(what), kept.study["data"].get(what)) for what in ("sha256", "training_sha256")),
        *((what, getattr(new, what), getattr(kept, what)) for what in ("lengths", "methods")),
        *((f"the rate of {trial.label}", trial.rate, rates.get(trial.label, trial.rate)) for trial in ended),
    ):
        if theirs != ours:
            raise UsageError(
                f"{new.path}: {what}", f"as in {kept.path}: {ours}", theirs, "keep it in a folder of its own"
            )
    seeds = {*kept.config.seeds, *(seed for _, seed in of_new)}
    asked = {"encodings": [*dict.fromkeys([*kept.labels, *new.labels])], "seeds": sorted(seeds)}
    study = {**kept.study, "configuration": {**kept.study["configuration"], **asked}}
    for name in ("models", "choices"):
        study[name] = study.get(name, {}) | new.study[name]
    data, starts = kept.study["data"], "start_sha256"
    study["data"] = data | ({starts: data[starts] | new.study["data"][starts]} if starts in data else {})
    part = {name: new.study[name] for name in PROVENANCE} | {"trials": sorted(of_new)}
    study["joined"] = [*study.get("joined", []), part]
    rows = [row for row in kept.rows if (row.label, row.seed) not in of_new]
    return Run(kept.path, study, (*trials, *ended), [*rows, *new.rows])
