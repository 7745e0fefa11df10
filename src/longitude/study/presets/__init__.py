"""Presets: options of a study as data, one TOML file each; `--preset NAME` is a file here, `--preset my.toml` one's own."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """The study of a preset: its task's defaults, with what the file says.

    Args:
        name: One of `list_presets`, or the path of a TOML file whose keys are fields of `StudyConfig`.

    Returns:
        The configuration, not checked yet.

    Raises:
        ValueError: There is no such preset, the file is no TOML, or a key or its value is not one of a study.
    """
    kinds, options = get_type_hints(StudyConfig), _read(name)
    options.pop(ABOUT, "")
    for key in options:
        if key not in kinds:
            raise unknown(f"key of --preset {name}:", key, [*kinds, ABOUT], "`longitude study --help` explains them.")
    values = {key: _typed(value, kinds[key], f"--preset {name}: {key}") for key, value in options.items()}
    return of_task(values.pop("task", StudyConfig.task), **values)


def about(name: str) -> str:
    """The sentence for readers of a preset; empty where it has none. ValueError as `of_preset`."""
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


def _typed(value: Any, kind: Any, what: str) -> Any:
    """A value of TOML as a field has it. ValueError where it is of another type."""

    def require(right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"{what} must be {expected}, got {value!r}")

    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        require(isinstance(value, list), "a list")
        return tuple(_typed(each, arguments[0], what) for each in value)
    if origin in (Union, UnionType):
        [kind] = [each for each in arguments if each is not NoneType]
        return _typed(value, kind, what)
    if origin is Literal:
        require(value in arguments, f"one of {', '.join(map(str, arguments))}")
        return value
    accepted: dict[Any, tuple[Callable[[], bool], str]] = {
        bool: (lambda: isinstance(value, bool), "true or false"),
        int: (lambda: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
        float: (lambda: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
        str: (lambda: isinstance(value, str), "text in quotes"),
    }
    right, expected = accepted[kind]
    require(right(), expected)
    return kind(value)
