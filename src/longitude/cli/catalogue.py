"""`longitude list`."""

from collections.abc import Iterator
from typing import Any

from longitude.cli.shared import DONE, print_json


def list_(json: bool = False) -> int:
    """List what there is: encodings, mixers, scaling schemes, samplers of positions, and what runs on this machine.

    Args:
        json: Print JSON instead of tables.
    """
    from longitude.catalogue import catalogue

    found = catalogue()
    if json:
        print_json(found)
        return DONE
    from rich.console import Console

    console = Console()
    for part in _tables(found):
        console.print(part, highlight=False)
    return DONE


def _tables(found: dict[str, Any]) -> Iterator[Any]:
    """The catalogue for the terminal."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(
            *columns, title=f"[bold]{title}[/]", title_justify="left", title_style="", box=None, pad_edge=False
        )
        made.columns[0].no_wrap = True
        return made

    entries = found["encodings"]
    everyone = set.intersection(*(set(takers) for entry in entries for takers in entry["backends"].values()))
    shown = table("encodings", "name", "class", "acts as", "properties", "source", "backends")
    for entry in entries:
        training, reading = entry["backends"]["training"], entry["backends"]["reading"]
        takers = [name if name in training else f"({name})" for name in reading if name not in everyone]
        shown.add_row(
            Text(entry["name"], "bold"),
            entry["class"],
            " ".join(entry["acts"]) or "-",
            _properties(entry),
            _papers(entry["source"]),
            " ".join(takers) or "-",
        )
    yield shown
    yield (
        "relative: one number added to all positions changes nothing. causal: keys in the future have no meaning. raw keys: "
        "a cache keeps keys as they came. one for all: layers share one module, as in the paper. "
        f"backends: {' and '.join(sorted(everyone))} take all encodings; those in parentheses only without gradients.\n"
    )
    shown = table("their options", "name", "options; models give dim, num_heads, head_dim, max_length from their shape")
    for entry in entries:
        shown.add_row(Text(entry["name"], "bold"), " ".join(entry["options"]) or "-")
    yield shown
    shown = table("\nmixers", "name", "class", "takes of an encoding", "cache", "options", "source")
    for entry in found["mixers"]:
        own = [option for option in entry["options"] if option not in ("dim", "num_heads", "num_kv_heads", "head_dim")]
        shown.add_row(
            Text(entry["name"], "bold"),
            entry["class"],
            " ".join(entry["takes"]),
            entry["cache"],
            " ".join(own) or "-",
            _papers(entry["source"]),
        )
    yield shown
    yield "cache: how what a mixer keeps grows with the N tokens that passed.\n"
    shown = table("\nscaling of rotations", "name", "options (those with = may be left out)", "source")
    for entry in found["scaling"]:
        shown.add_row(Text(entry["name"], "bold"), _options(entry), _papers(entry["source"]))
    yield shown
    shown = table("\nsamplers of training positions", "name", "options", "what it is")
    for entry in found["samplers"]:
        shown.add_row(Text(entry["name"], "bold"), _options(entry) or "-", entry["is"])
    yield shown
    here = found["machine"]
    yield (
        f"\nhere: longitude {here['longitude']}, torch {here['torch']}, threads {here['threads']}, "
        f"CUDA {here['cuda'] or 'no'}, "
        f"MPS {'yes' if here['mps'] else 'no'}, transformers {here['transformers'] or 'not installed'}"
    )


def _properties(entry: dict[str, Any]) -> str:
    said = {
        "relative": entry["relative"],
        "absolute": not entry["relative"],
        "learned": entry["learned"],
        "causal": entry["causal_only"],
        f"up to {entry['max_length']}": entry["max_length"],
        f"{entry['axes']} axes": entry["axes"] > 1,
        "raw keys": not entry["stable_keys"],
        "one for all": entry["learned"] and entry["shared"],
    }
    return ", ".join(words for words, is_so in said.items() if is_so)


def _papers(source: str | None) -> str:
    """Authors and years, without the links."""
    return "; ".join(paper.partition(", http")[0] for paper in (source or "-").split("; "))


def _options(entry: dict[str, Any]) -> str:
    return " ".join(n if n in entry["required"] else f"{n}={default}" for n, default in entry["options"].items())
