"""Subjects of `longitude show`: labels, studies and checkpoints, with their text and drawings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.attention.mixer import MIXERS
from longitude.positions.base import ENCODINGS
from longitude.show.drawing import Drawing
from longitude.show.shape import Shape


@dataclass(frozen=True)
class Subject:
    """A subject of `longitude show`, with its facts and drawings.

    Attributes:
        label: Name of the subject.
        about: Facts as plain data.
        words: (head, text) of each fact, for readers; a formula or a table has an empty head.
        drawings: Drawings with distinct names.
    """

    label: str
    about: dict[str, Any]
    words: list[tuple[str, str]]
    drawings: list[Drawing]


def subjects(names: Sequence[str], encoding: Sequence[str], sizes: dict[str, int]) -> Iterator[Subject]:
    """All that is named.

    Args:
        names: Labels, folders of studies, checkpoints (folders, names of the hub, config.json).
        encoding: Labels of a study.
        sizes: length, heads and head_dim as far as they are given.

    Raises:
        ValueError: For what is unknown or does not go together.
    """
    for name in dict.fromkeys(names):
        path = Path(name).expanduser()
        if path.is_dir() and _holds_study(path):
            _require_no(sizes, ("heads", "head_dim"), name, "has models of its own")
            yield from _of_study(path, encoding, sizes.get("length"))
            continue
        if encoding:
            raise ValueError(
                f"--encoding chooses models of a study; expected a folder that `longitude study` wrote, got {name}"
            )
        if name.partition(":")[0] not in {*ENCODINGS, *MIXERS} and (
            path.exists() or path.suffix == ".json" or "/" in name
        ):
            _require_checkpoint(path)
            _require_no(sizes, ("length", "heads", "head_dim"), name, "has a length and heads of its own")
            yield _of_checkpoint(name)
        else:
            yield _of_label(name, Shape(**sizes))


def _holds_study(path: Path) -> bool:
    from longitude.study.results import is_study

    return is_study(path)


def _require_checkpoint(path: Path) -> None:
    """ValueError where there is something else."""
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: expected the folder of a study, or of a checkpoint with config.json; it holds neither"
        )
    if path.is_file() and path.suffix != ".json":
        raise ValueError(f"{path}: expected a name, a folder or a config.json, got another file")


def _require_no(sizes: dict[str, int], refused: Sequence[str], name: str, why: str) -> None:
    if given := [size for size in refused if size in sizes]:
        raise ValueError(
            f"--{given[0].replace('_', '-')} is for names of encodings and mixers, and {name} {why}; leave it out"
        )


def _of_label(label: str, shape: Shape) -> Subject:
    from longitude.show import encodings, facts, mixers
    from longitude.show.build import built

    made = built(label, shape)
    about = facts.facts(made, shape)
    drawings = [] if made.encoding is None else encodings.drawings(made.encoding, shape)
    drawings += [drawing for part in made.mixers for drawing in mixers.drawings(part.module, shape)]
    return Subject(label, about, [*facts.words(about)], drawings)


def _of_study(path: Path, encoding: Sequence[str], length: int | None) -> Iterator[Subject]:
    from longitude.show import learned

    run, trials = learned.opened(path, encoding)
    data = run.task.prepare(run.config)
    for label, trial in trials.items():
        about = learned.facts(run, trial)
        drawings = learned.drawings(run, trial, data, length or run.train_length)
        yield Subject(label, about, [*learned.words(about)], drawings)


def _of_checkpoint(name: str) -> Subject:
    from longitude.checkpoints.config import raw_config
    from longitude.show import checkpoint

    config = checkpoint.read(name)
    about = checkpoint.facts(name, config, raw_config(name))
    return Subject(name, about, [*checkpoint.words(about)], checkpoint.drawings(config))
