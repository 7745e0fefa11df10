"""`longitude check`."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, FAILURES, print_json, stderr_console

PLACE = re.compile(r"(?P<place>[^:]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.*))?")
MARKS = {"pass": "green", "fail": "bold red", "not applicable": "dim"}


def check(
    model_or_part: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_PART")],
    length: int | None = None,
    reference: str | None = None,
    laws: tuple[str, ...] = (),
    dtype: str | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Try the laws of positions on a checkpoint, an encoding or a mixer: decoding, padding, packing, far positions, config.

    Exit code 0 where no law fails, 1 where one does, 2 for wrong use.

    Args:
        model_or_part: A folder or hub name of a causal model, the name of an encoding ("alibi", "rope:base=500000")
            or of a mixer ("mamba", "window:size=8"), or module:Class, path/file.py:Class, module:Class:num_heads=4,slope=3
            for one of your own.
        length: Tokens that laws of a model look at; by default 16 beyond its trained length, 512 at most.
        reference: A model that must give the same logits; shows weights in the wrong rotary layout.
        laws: The laws to try, by name ("left padding"); all by default.
        dtype: Of the model: float32, bfloat16, float16; by default as it is saved.
        device: Where the model computes: cpu, cuda, mps.
        allow_pickle: Take weights that are saved as a pickle, if you trust where they come from.
        seed: Of the random tokens.
        json: Print JSON instead of the table.
    """
    target = part_of(model_or_part)
    console = stderr_console()
    with Progress(console, model_or_part) as progress:
        if target is not None:
            given = {"--length": length, "--reference": reference, "--dtype": dtype}
            for option in [name for name, value in given.items() if value is not None]:
                raise ValueError(f"{option} is for models, and {model_or_part} is an encoding or a mixer; leave it out")
            from longitude.check.encodings import check_part, kind_of

            part, options = target
            verdicts = check_part(part, options, laws=laws or None, watch=progress.law)
            protocol: dict[str, Any] = {"kind": kind_of(part, options)}
        else:
            from longitude.check import subject_of, try_laws
            from longitude.checkpoints.load import load

            def loaded(name: str):
                return load(name, dtype=dtype, device=device, allow_pickle=allow_pickle, tokenizer=False)

            with or_part(model_or_part):
                checkpoint = loaded(model_or_part)
            other = None if reference is None else loaded(reference)
            subject = subject_of(checkpoint, length=length, reference=other, seed=seed)
            subject.tell = progress.share
            verdicts = try_laws(subject, laws or None, progress.law)
            protocol = {
                "kind": "model",
                "tokens": subject.reach,
                "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
                "equality laws in": str(subject.kind).removeprefix("torch."),
                "reference": reference,
                "seed": seed,
            }
    failed = sum(verdict.outcome == "fail" for verdict in verdicts)
    if json:
        said = [verdict.as_dict() for verdict in verdicts]
        print_json({"checked": model_or_part, **protocol, "failed": failed, "laws": said})
    else:
        show(model_or_part, protocol, verdicts)
    return FAILURES if failed else DONE


def part_of(said: str) -> tuple[Any, dict[str, Any]] | None:
    """What to build and with which options, if `said` is an encoding or a mixer; None: a model. A folder is a model, whatever its
    name.
    """
    if Path(said).is_dir():
        return None
    from longitude.study.labels import parse_label, parse_options

    if re.split(r"[:+]", said)[0] in parts():
        label = parse_label(said)
        named = [*label.encodings, *label.mixers]
        if len(named) > 1:
            raise ValueError(f"{said}: expected one encoding or mixer, got {len(named)}; check each, then compose them")
        options = named[0]
        return options.pop("name"), options
    if (found := PLACE.fullmatch(said)) is None:
        return None
    from longitude.check.encodings import of_place

    options = parse_options(found["options"] or "", f"{found['place']}:{found['name']}:option=value", said)
    return of_place(found["place"], found["name"]), options


def parts() -> dict[str, str]:
    """Name -> "encoding" or "mixer"."""
    from longitude.attention.mixer import list_mixers
    from longitude.positions.base import list_encodings

    return dict.fromkeys(list_mixers(), "mixer") | dict.fromkeys(list_encodings(), "encoding")


@contextmanager
def or_part(said: str) -> Iterator[None]:
    """Where there is no such model, the encoding or mixer that it may have been meant for."""
    try:
        yield
    except ValueError as error:
        near = get_close_matches(re.split(r"[:+]", said)[0], known := parts(), n=1, cutoff=0.75)
        if not near or Path(said).exists():
            raise
        raise ValueError(f"{error}; did you mean the {known[near[0]]} {near[0]!r}?") from error


# ---- what is seen -----------------------------------------------------------------------------------------------------
class Progress:
    """A bar over laws; plain silence where nobody watches."""

    def __init__(self, console: Any, what: str):
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.1f} of {task.total} laws"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(f"loading {what}", total=None)
        self.done = 0

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def law(self, name: str, done: int, total: int) -> None:
        self.done = done
        self.bar.update(self.task, description=name, completed=done, total=total)

    def share(self, part: float) -> None:
        self.bar.update(self.task, completed=self.done + part)


def show(what: str, protocol: dict[str, Any], verdicts: Sequence[Any]) -> None:
    """The table, the diagnosis of each failure, and one line of summary."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table("law", "verdict", "measured", "threshold", "what was compared, or why it does not apply", box=None)
    for column in (0, 1, 2, 3):
        table.columns[column].no_wrap = True
    for verdict in verdicts:
        says = verdict.reason if verdict.outcome == "not applicable" else verdict.compares
        says += f" ({verdict.reason})" if verdict.outcome != "not applicable" and verdict.reason else ""
        table.add_row(
            verdict.law,
            Text(verdict.outcome, MARKS[verdict.outcome]),
            number(verdict.measured),
            number(verdict.threshold),
            Text(says),
        )
    console.print(table)
    for verdict in verdicts:
        if verdict.outcome == "fail":
            console.print(Text.assemble((f"\n{verdict.law}: ", "bold red"), verdict.hint), soft_wrap=True)
    count = {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in MARKS}
    words = ", ".join(f"{count[outcome]} {outcome}" for outcome in MARKS)
    how = ", ".join(f"{key} {value}" for key, value in protocol.items() if key != "kind" and value is not None)
    console.print(f"\n{what}: {words}" + (f"  ({how})" if how else ""), highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if value == int(value) and abs(value) < 1e6 else f"{value:.1e}"
