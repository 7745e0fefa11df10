"""By which options the studies of claims are run, and whether results are of these."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longitude import plugins
from longitude.measure.config import listed
from longitude.study.config import StudyConfig, option
from longitude.study.plan import checked
from longitude.study.presets import of_preset
from longitude.study.train import recipe

SERIES = "claims"
"""The folder of the presets of the studies."""
LADDER = "ladder-"
"""Studies whose names begin so are rungs of the ladder of sizes, presets of their own."""
MISTAKES = Path(__file__).parents[1] / "mistakes.py"
MISTAKEN = {"extension": ("linear-floor", "ntk-book")}
"""Methods of that plugin, by the study that is measured with them, too."""
ELSEWHERE = ("device", "threads")
"""Where a study ran, which is no part of its protocol."""
MAY_BE_MORE = ("encodings", "seeds", "test_lengths", "methods")
"""Of which a study may have more than its preset."""


def preset_name(study: str) -> str:
    """The preset of a study: one of the series, or a rung of the ladder of sizes."""
    return study if study.startswith(LADDER) else f"{SERIES}/{study}"


def preset_of(name: str) -> StudyConfig:
    """What a study of the series asks today, checked; with the methods of plugins that claims read."""
    config = of_preset(preset_name(name))
    if name in MISTAKEN:
        plugins.load(MISTAKES)
        config = replace(config, methods=(*config.methods, *MISTAKEN[name]))
    return checked(config)


def differs(config: StudyConfig, study: Mapping[str, Any]) -> str | None:
    """By what a study was not run as it would be today: "--steps 20, not 2000"; None where it was.

    Args:
        config: What it would be, checked.
        study: Its study.json.
    """
    was, now = asdict(StudyConfig.of(study["configuration"])), asdict(config)
    for name, value in now.items():
        if name not in (*ELSEWHERE, *MAY_BE_MORE) and was[name] != value:
            return f"{option(name)} {in_words(was[name])}, not {in_words(value)}"
    before, today = study["recipe"], json.loads(json.dumps(recipe(config)))
    for name in {**before, **today}:
        if before.get(name) != today.get(name):
            return f"{name} {in_words(before.get(name))}, not {in_words(today.get(name))}"
    return None


def in_words(value: Any) -> str:
    """The value of an option; None: it was not given."""
    return "as in the presets" if value is None else listed(value) if isinstance(value, tuple | list) else str(value)
