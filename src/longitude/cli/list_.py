"""`longitude list`."""

from collections.abc import Iterator
from textwrap import wrap
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json
from longitude.errors import unknown

PARTS = {
    "encodings": "position encodings",
    "mixers": "mixers (--encodings rope+mamba in a study)",
    "scaling": "RoPE scaling",
    "samplers": "training positions",
}
JOINED = ("scaling", "samplers")
"""Parts of which the overview lists the names alone."""
NAME, KIND = 25, 16
"""Columns of the two first words of a line."""
FACT = 24
"""Columns before the text of a fact."""
WIDEST = 80

EXAMPLES = """  longitude list
  longitude list rope"""


def list_(name: Annotated[str, tyro.conf.Positional] = "", json: bool = False) -> int:
    """List encodings, mixers, RoPE scaling, training positions, plugins and backends.

    Args:
        name: Print options, properties, backends and papers of this one; by default a line for each.
        json: Print JSON.
    """
    from longitude.catalogue import catalogue
    from longitude.positions.scaling.base import spellings
    from longitude.report.table import width

    facts = catalogue()
    if name:
        entries = [
            entry for part in PARTS for entry in facts[part] if name in (entry["name"], *spellings(entry["name"]))
        ]
        if not entries:
            names = [entry["name"] for part in PARTS for entry in facts[part]]
            raise unknown("name", name, names, "`longitude list` lists them.")
        if json:
            print_json(entries[0])
        else:
            columns = min(WIDEST, width())
            print("\n\n".join("\n".join(_entry(entry, columns)) for entry in entries))
        return DONE
    if json:
        print_json(facts)
        return DONE
    print("\n".join(_overview(facts, width())))
    return DONE


def _overview(facts: dict[str, Any], columns: int) -> Iterator[str]:
    """A line of name, kind and what it is for each: where its docstring goes on to a formula, the words before it."""
    for part, title in PARTS.items():
        yield title
        if part in JOINED:
            names = ", ".join(entry["name"] for entry in facts[part])
            yield from wrap(names, min(WIDEST, columns), initial_indent="  ", subsequent_indent="  ")
        else:
            for entry in facts[part]:  # where it acts, or how its cache grows with the number of tokens N
                kind = f"cache {entry['cache']}" if part == "mixers" else ", ".join(entry["acts"]) or "none"
                line = f"  {entry['name']:<{NAME - 2}}{kind:<{KIND}}{entry['is'].partition(': ')[0]}"
                yield line if len(line) <= columns else line[: columns - 1].rstrip() + "…"  # plugins say what they like
        yield ""
    for entry in facts["plugins"]:
        names = ", ".join(f"{kind} {name}" for name, kind in entry["registers"].items())
        lines = [f"plugin {entry['name']} ({entry.get('path') or entry['distribution']}): {names or 'no names'}"]
        lines += [f"{name} cannot be built at toy size: {reason}" for name, reason in entry["problems"].items()]
        yield from (part for line in lines for part in wrap(line, columns, subsequent_indent="  "))
    here = facts["machine"]
    yield f"here: longitude {here['longitude']}, torch {here['torch']}, transformers {here['transformers'] or 'not installed'}"
    yield f"{here['threads']} threads, CUDA {here['gpu'] or 'no'}, MPS {'yes' if here['mps'] else 'no'}"
    yield from wrap(here["loops"], columns)
    yield "options, properties and papers of one: longitude list NAME"


def _entry(entry: dict[str, Any], columns: int) -> Iterator[str]:
    """Everything about one, a fact a line."""
    yield from wrap(f"{entry['name']}: {entry['is']}", columns, subsequent_indent="  ")
    facts = {name: value for name, value in entry.items() if name not in ("name", "is", "backends")}
    facts |= {f"backends, {when}": names for when, names in entry.get("backends", {}).items()}
    indent = {"subsequent_indent": " " * FACT, "break_long_words": False, "break_on_hyphens": False}
    for name, value in facts.items():
        if value not in (None, []):
            yield from wrap(f"{'  ' + name.replace('_', ' '):<{FACT}}{_words(value)}", columns, **indent)


def _words(value: Any) -> str:
    """A fact, without the signs of Python."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={option}" for name, option in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)
