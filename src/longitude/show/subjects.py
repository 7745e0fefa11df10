"""Subjects of `longitude show`: labels, studies and checkpoints, with their text and drawings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.attention.mixer import MIXERS
from longitude.errors import UsageError
from longitude.positions.base import ENCODINGS
from longitude.show.build import Shape
from longitude.show.drawing import Drawing


@dataclass(frozen=True)
class Subject:
    """A subject of `longitude show`, with its facts and drawings.

    Attributes:
        label: Name of the subject.
        about: Facts as plain data.
        words: (head, text) of each fact, for readers; a formula or a table has an empty head.
        drawings: Drawings with distinct names.
        brief: The facts that a terminal shows with the first drawing unless all are asked for; None: it shows everything.
    """

    label: str
    about: dict[str, Any]
    words: list[tuple[str, str]]
    drawings: Sequence[Drawing]
    brief: list[tuple[str, str]] | None = None


NEEDED = {
    "clocks": "a rotary encoding or a checkpoint",
    "attention": "a checkpoint, which has trained weights",
    "text": "a study, or a checkpoint with --attention",
    "encoding": "a folder that `longitude study` wrote, of whose models it chooses some",
    "length": "the name of an encoding or a mixer, a study with --text, or a checkpoint with --clocks or --attention",
    "heads": "the name of an encoding or a mixer",
    "head_dim": "the name of an encoding or a mixer",
}
"""Option -> the subjects that it is for."""


@dataclass(frozen=True)
class View:
    """Which other drawings of each subject replace its usual ones.

    Attributes:
        clocks: A dial for each rotary pair.
        attention: The attention of trained models.
        text: A file: a text colored by the losses of a study's models, or that attention reads in a checkpoint.
        note: Called with a sentence about what takes long.
    """

    clocks: bool = False
    attention: bool = False
    text: Path | None = None
    note: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if self.clocks and (self.attention or self.text):
            raise UsageError("--clocks", "no other view", "--attention or --text", "leave one of them out")


def subjects(
    names: Sequence[str], encoding: Sequence[str], sizes: dict[str, int], view: View = View()
) -> Iterator[Subject]:
    """Make the subject or subjects of each name.

    Args:
        names: Labels, folders of studies, checkpoints (folders, names of the hub, config.json).
        encoding: Labels of a study.
        sizes: length, heads and head_dim as far as they are given.
        view: The drawings of each.

    Raises:
        ValueError: For an unknown name, and for options that do not fit it.
    """
    options = {"clocks": view.clocks, "attention": view.attention, "text": view.text, "encoding": encoding, **sizes}
    for name in dict.fromkeys(names):
        path = Path(name).expanduser()
        if path.is_dir() and _holds_study(path):
            _require_allowed(options, ["encoding", "text", *["length"] * bool(view.text)], f"the study {name}")
            yield from _of_study(path, encoding, sizes.get("length"), view)
            continue
        is_path = path.exists() or path.suffix == ".json" or "/" in name
        if is_path and name.partition(":")[0] not in {*ENCODINGS, *MIXERS}:
            _require_checkpoint(path)
            allowed = ["clocks", "attention", *["text"] * view.attention]
            _require_allowed(
                options, [*allowed, *["length"] * (view.clocks or view.attention)], f"the checkpoint {name}"
            )
            yield _of_checkpoint(name, sizes.get("length"), view)
        else:
            _require_allowed(options, ["clocks", "length", "heads", "head_dim"], name)
            yield _of_label(name, Shape(**sizes), view)


def _require_allowed(options: Mapping[str, Any], allowed: Sequence[str], subject: str) -> None:
    """UsageError for an option that was given and that this subject does not read."""
    for option, value in options.items():
        if value not in (None, False, (), []) and option not in allowed:
            raise UsageError(f"--{option.replace('_', '-')}", NEEDED[option], subject, "leave it out")


def _holds_study(path: Path) -> bool:
    from longitude.study.results import is_study

    return is_study(path)


def _require_checkpoint(path: Path) -> None:
    """ValueError for a folder without config.json, and for a file that is not .json."""
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected the folder of a study, or of a checkpoint with config.json; it has neither")
    if path.is_file() and path.suffix != ".json":
        raise ValueError(f"{path}: expected a name, a folder or a config.json, got another file")


def _of_label(label: str, shape: Shape, view: View) -> Subject:
    from longitude.show import encodings, facts, mixers, rotations
    from longitude.show.build import built

    made = built(label, shape)
    shape = made.shape
    about = facts.facts(made, shape)
    words = [*facts.words(about)]
    if view.clocks:
        windows = [getattr(getattr(part.module, "attention", part.module), "size", None) for part in made.mixers]
        parts = [] if windows and all(windows) else made.encodings  # in a window no offset grows with the length
        drawings: list[Drawing] = [dial for part in parts for dial in rotations.clocks(part.module, shape)]
        if not drawings:
            expected = "a rotary encoding without a window, such as rope"
            raise UsageError("--clocks", expected, label, "leave it out")
        return Subject(label, about, words, drawings)
    drawings = [] if made.encoding is None else encodings.drawings(made.encoding, shape)
    drawings += [drawing for part in made.mixers for drawing in mixers.drawings(part.module, shape)]
    return Subject(label, about, words, drawings, [*facts.words(about, brief=True)])


def _of_study(path: Path, encoding: Sequence[str], length: int | None, view: View) -> Iterator[Subject]:
    from longitude.show import learned
    from longitude.show.biases import biases
    from longitude.study.parts import by_train_length

    run, trials = learned.opened(path, encoding)
    if view.text is None:
        for label, trial in trials.items():
            about = learned.facts(run, trial)
            yield Subject(label, about, [*learned.words(about)], [*biases(run, trial)])
        return
    for train_length, part in by_train_length(run).items():
        suffix = "" if part is run else f", at {train_length}"
        for label in trials:
            trial = next((trial for trial in part.of(label) if trial.status == "done"), None)
            if trial is not None:
                about = learned.facts(part, trial)
                drawings = learned.one_text(part, trial, view.text, length, suffix)
                yield Subject(label + suffix, about, [*learned.words(about)], drawings)


def _of_checkpoint(name: str, length: int | None, view: View) -> Subject:
    from longitude.checkpoints.declared import raw_config
    from longitude.show import checkpoint

    config = checkpoint.read(name)
    about = checkpoint.facts(name, config, raw_config(name))
    if view.attention:
        from longitude.show.attention import of_checkpoint

        drawings = of_checkpoint(name, view.text, length, view.note)
    elif view.clocks:
        drawings = [*checkpoint.clocks(config, length)]
    else:
        drawings = checkpoint.drawings(config)
    return Subject(name, about, [*checkpoint.words(about)], drawings)
