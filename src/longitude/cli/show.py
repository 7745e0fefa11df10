"""`longitude show`."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json
from longitude.errors import UsageError

EXAMPLES = """  longitude show rope alibi --length 512
  longitude show models/llama/config.json --card card.svg"""


def show(
    name: Annotated[tuple[str, ...], tyro.conf.Positional],
    all: bool = False,
    picture: str | None = None,
    length: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    out: Path | None = None,
    card: Path | None = None,
    json: bool = False,
) -> int:
    """Draw what an encoding, mixer, checkpoint or config does with position.

    Args:
        name: Model specs (alibi, rope:base=500000, alibi+window:size=64), checkpoints and config.json. Several are
            drawn side by side.
        all: Print every picture and every fact.
        picture: Draw this picture alone, by its name: bias, weights, table, ...; for a slide, with --out.
        length: Number of positions to draw; 1024 by default.
        heads: Number of attention heads to draw; 8 by default.
        head_dim: Width of a head: 64 by default.
        out: Write the pictures to this file: .svg or .png.
        card: Write one picture of a checkpoint to this file, for a post or a page, and print nothing: .svg, .html or .png.
        json: Print the facts and the numbers of every picture as JSON.
    """
    # First, while nothing else is local. A length of 0 counts as asked for.
    others = [option for option, value in locals().items() if not (value is None or value is False)]
    if not name:
        raise ValueError("expected a name: longitude show alibi; `longitude list` lists them")
    if (file := card or out) is not None:
        from longitude.drawings.charts import SUFFIXES, require_place

        require_place(file, SUFFIXES if card is None else (*SUFFIXES, ".html"))
    if card is not None:
        return _card(name, card, [option for option in others if option not in ("name", "card")])
    from longitude.drawings import ALL, chosen_of, nothing_of
    from longitude.drawings.subjects import subjects

    sizes = {"length": length, "heads": heads, "head_dim": head_dim}
    shown = [*subjects(name, {key: size for key, size in sizes.items() if size is not None})]
    every = all or json or out is not None or picture is not None
    drawings = _chosen(shown, every)
    if picture is not None:
        drawings = chosen_of(drawings, picture)
        without = [subject.label for subject in shown if picture not in {ALL, *(d.name for d in subject.drawings)}]
        if without:
            print(f"no picture {picture!r} of {', '.join(without)}", file=sys.stderr)
    if out is not None:
        if not drawings:
            raise ValueError(f"--out {out}: {nothing_of(name)}")
        from longitude.drawings.charts import write
        from longitude.report.wording import count

        write(out, drawings)
        print(f"{count(len(drawings), 'picture')}: {out}", file=sys.stderr)
    if json:
        frames = [
            {"name": d.name, "title": d.title, "caption": d.caption, "rows": d.frame.to_dict("records")}
            for d in drawings
        ]
        print_json({"about": [subject.about for subject in shown], "drawings": frames})
        return DONE
    _print(shown, drawings if out is None else [], every and picture is None)
    if not every and any(subject.brief for subject in shown):
        count = len(_chosen(shown, True)) - len(drawings)
        more = f"{count} more picture{'s' * (count > 1)}, options and backends" if count else "Options and backends"
        print(f"\n{more}: longitude show {shlex.join([*name, '--all'])}")
    return DONE


def _card(names: Sequence[str], out: Path, others: Sequence[str]) -> int:
    from longitude.drawings.card import write
    from longitude.drawings.subjects import is_checkpoint

    if others:
        raise UsageError("--card", "no other option", f"--{others[0].replace('_', '-')}", "leave it out")
    if len(names) > 1 or not is_checkpoint(names[0]):
        raise UsageError("--card", "a checkpoint or its config.json", ", ".join(names), "--out draws other names")
    print(f"card of {write(names[0], out)}: {out}", file=sys.stderr)
    return DONE


def _chosen(shown: Sequence[Any], every: bool) -> list[Any]:
    """All drawings side by side; unless every one is asked for, only the first of each subject that has brief facts."""
    from longitude.drawings.drawing import side_by_side

    first = {subject.label: subject.drawings[:1] for subject in shown if not every and subject.brief is not None}
    return side_by_side({subject.label: first.get(subject.label, subject.drawings) for subject in shown})


def _print(shown: Sequence[Any], drawings: Sequence[Any], every: bool) -> None:
    from rich.text import Text

    from longitude.drawings.terminal import drawn, fact
    from longitude.report.table import show as display

    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    for place, subject in enumerate(shown):
        print("\n" * bool(place) + subject.label)
        facts = subject.words if every or subject.brief is None else subject.brief
        print(*(line for head, text in facts for line in fact(head, text, width)), sep="\n")
    for drawing in drawings:
        display(Text("\n" + drawn(drawing, width)))
