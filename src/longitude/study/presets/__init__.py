"""Presets: options of a study, one TOML file each; `--preset NAME` is a file here, `--preset my.toml` is your own file."""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longitude.errors import unknown
from longitude.study.config import StudyConfig
from longitude.study.tasks.base import of_task

FOLDER = Path(__file__).parent
ABOUT = "about"
"""The key of a sentence for readers."""


def list_presets() -> list[str]:
    """The names of the presets of this package."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))


def of_preset(name: str) -> StudyConfig:
    """The study of a preset: its task's defaults, and the options in the file.

    Args:
        name: One of `list_presets`, or the path of a TOML file whose keys are fields of `StudyConfig`.

    Returns:
        The configuration, not checked yet.

    Raises:
        ValueError: There is no such preset, the file is not TOML, or a key or its value is not one of a study.
    """
    options = _read(name)
    options.pop(ABOUT, "")
    try:
        return StudyConfig.of({**asdict(of_task(options.get("task", StudyConfig.task))), **options})
    except ValueError as error:
        raise ValueError(f"--preset {name}: {error}") from None


def about(name: str) -> str:
    """The sentence for readers of a preset; empty if it has none. ValueError as `of_preset`."""
    return _read(name).get(ABOUT, "")


def _read(name: str) -> dict[str, Any]:
    """The file of a preset."""
    path = Path(name).expanduser() if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.is_relative_to(FOLDER) and not path.exists():
        raise unknown("preset", name, list_presets(), "a file of your own ends in .toml.")
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--preset {name}: it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--preset {name}: it is not TOML: {error}") from error
    if not isinstance(options.get(ABOUT, ""), str):
        raise ValueError(f"--preset {name}: {ABOUT} must be a sentence")
    return options
