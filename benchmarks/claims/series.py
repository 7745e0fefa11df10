"""The studies that claims are judged on: ordinary ones of the presets claims/NAME, run one after the other."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from claims.base import claims_of, list_claims
from claims.evidence import KEPT, Evidence
from claims.protocol import LADDER, MISTAKEN, MISTAKES, SERIES, preset_name, preset_of
from longitude.study import results
from longitude.study.presets import list_presets, of_preset


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


def command(study: str, root: Path, options: Iterable[str]) -> list[str]:
    """`longitude study` of a preset, in the folder of its name; options: further ones of it."""
    line = [sys.executable, "-m", "longitude", "study", "--preset", preset_name(study), "--out", str(root / study)]
    if study in MISTAKEN:
        line += ["--plugin", str(MISTAKES), "--methods", *preset_of(study).methods]
    return [*line, *options]


def run(claims: Sequence[str], root: Path, options: Sequence[str]) -> bool:
    """Run the studies that claims read, or go on with them; returns whether every one ended well."""
    names, ended = studies_of(claims), []
    for place, name in enumerate(names, 1):
        print(f"study {name}, {place} of {len(names)}", file=sys.stderr, flush=True)
        ended.append(subprocess.run(command(name, root, options)).returncode == 0)
    return all(ended)


def keep(claims: Sequence[str], root: Path) -> list[Path]:
    """Write the studies that are there, and that claims read, among the committed results, without their models."""
    evidence = Evidence(root)
    return [results.keep(evidence.run(name), KEPT / name) for name in studies_of(claims) if name in evidence.there]
