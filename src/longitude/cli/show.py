"""`longitude show`."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from longitude.cli.shared import DONE, checkpoint_of, print_json
from longitude.errors import UsageError

SUFFIXES = (".svg", ".html", ".png")

EXAMPLES = """  longitude show rope alibi --length 512
  longitude show models/llama/config.json --clocks --out clocks.html"""


def show(
    name: Annotated[tuple[str, ...], tyro.conf.Positional],
    encoding: tuple[str, ...] = (),
    text: Path | None = None,
    clocks: bool = False,
    attention: bool = False,
    log: bool = False,
    length: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Draw what an encoding, mixer, study, checkpoint or config does with position.

    Args:
        name: Labels as in a study: alibi, rope:scaling=yarn,factor=4,original_max_length=256, alibi+window:size=64; the folder of
            a study; a checkpoint or its config.json. Several are drawn side by side.
        encoding: In a study, the labels whose trained models are drawn; all of them by default.
        text: A text file. A study draws it under each model, each letter colored by its loss. A checkpoint reads it for
            --attention.
        clocks: Draw a dial for each rotary pair: angles seen in training, and new ones at a longer length.
        attention: Draw the attention of trained models: by distance, its entropy, and the share of the first token.
        log: Draw distances on a logarithmic axis.
        length: Positions that are drawn: 1024 by default, of a study its training length. With --clocks: the trained length of
            a label whose scheme names none, the asked length of a checkpoint. With --text or --attention: the tokens that are
            read.
        heads: Number of attention heads to draw; 8 by default.
        head_dim: Width of a head: 64 by default.
        out: Write the pictures to this file: .svg, .html or .png.
        json: Print JSON instead: words and numbers of every picture.
    """
    if not name:
        raise ValueError("expected a name: longitude show alibi; `longitude list` lists them")
    if out is not None and out.suffix not in SUFFIXES:
        raise ValueError(f"--out {out}: expected a name that ends in .svg, .html or .png")
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    name = tuple(map(checkpoint_of, name))
    from longitude.show.drawing import Lines, side_by_side
    from longitude.show.subjects import View, subjects

    sizes = {"length": length, "heads": heads, "head_dim": head_dim}
    view = View(clocks, attention, text, lambda words: print(f"longitude: {words}", file=sys.stderr, flush=True))
    given = {size: number for size, number in sizes.items() if number is not None}
    shown = [*subjects(name, encoding, given, view)]
    drawings = side_by_side({one.label: one.drawings for one in shown})
    if log:
        if not any(isinstance(each, Lines) and each.far for each in drawings):
            raise UsageError("--log", "a picture with a distance", f"none of {', '.join(name)}", "leave it out")
        drawings = [replace(each, log_x=True) if isinstance(each, Lines) and each.far else each for each in drawings]
    if out is not None:
        if not drawings:
            raise ValueError(f"--out {out}: nothing is drawn of {', '.join(name)}; leave it out")
        from longitude.show.charts import write

        write(out, [(one.label, one.words) for one in shown], drawings)
        print(f"{len(drawings)} pictures: {out}", file=sys.stderr)
    if json:
        frames = [
            {"name": d.name, "title": d.title, "caption": d.caption, "rows": d.frame.to_dict("records")}
            for d in drawings
        ]
        print_json({"about": [one.about for one in shown], "drawings": frames})
        return DONE
    from longitude.show.terminal import drawn, fact

    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for place, one in enumerate(shown):
        print("\n" * bool(place) + one.label)
        print(*(line for head, text in one.words for line in fact(head, text, width)), sep="\n")
    if out is None:
        for drawing in drawings:
            print("\n" + drawn(drawing, width, color))
    return DONE
