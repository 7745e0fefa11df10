"""`longitude show`."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json

SUFFIXES = (".svg", ".html", ".png")


def show(
    name: Annotated[tuple[str, ...], tyro.conf.Positional],
    length: int = 1024,
    heads: int = 8,
    head_dim: int = 64,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Show what an encoding or a mixer does: formula, source, properties, backends, and pictures drawn by its own code.

    Args:
        name: Labels as in a study: alibi, rope:scaling=yarn,factor=4,original_max_length=256, alibi+fox; several are drawn
            side by side.
        length: Positions that are drawn.
        heads: Of the attention that is drawn.
        head_dim: Width of a head.
        out: Write the pictures to this file: .svg, .html or .png.
        json: Print JSON instead: words and numbers of every picture.
    """
    if not name:
        raise ValueError("expected a name: longitude show alibi; `longitude list` lists them")
    if out is not None and out.suffix not in SUFFIXES:
        raise ValueError(f"--out {out}: expected a name that ends in .svg, .html or .png")
    from longitude.show.build import built
    from longitude.show.drawing import side_by_side
    from longitude.show.encodings import drawings
    from longitude.show.facts import facts, words
    from longitude.show.shape import Shape

    shape = Shape(length=length, heads=heads, head_dim=head_dim)
    each = {label: built(label, shape) for label in dict.fromkeys(name)}
    about = [facts(made, shape) for made in each.values()]
    found = side_by_side(
        {label: drawings(made.encoding, shape) if made.encoding else [] for label, made in each.items()}
    )
    return _show([(one["label"], [*words(one)]) for one in about], about, found, out, json)


def _show(
    parts: Sequence[tuple[str, Iterable[tuple[str, str]]]],
    about: Any,
    drawings: Sequence[Any],
    out: Path | None,
    json: bool,
) -> int:
    """Words and pictures: on the terminal, as JSON, or into a file."""
    if out is not None:
        from longitude.show.charts import write

        write(out, parts, drawings)
        print(f"{len(drawings)} pictures: {out}", file=sys.stderr)
    if json:
        frames = [
            {"name": d.name, "title": d.title, "caption": d.caption, "rows": d.frame.to_dict("records")}
            for d in drawings
        ]
        print_json({"about": about, "drawings": frames})
        return DONE
    from longitude.show.terminal import drawn, fact

    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for place, (title, words) in enumerate(parts):
        print("\n" * bool(place) + title)
        print(*(line for head, text in words for line in fact(head, text, width)), sep="\n")
    if out is None:
        for drawing in drawings:
            print("\n" + drawn(drawing, width, colour))
    return DONE
