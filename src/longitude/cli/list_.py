"""`longitude list`."""

from collections.abc import Iterator
from typing import Any

from longitude.cli.shared import DONE, print_json


def list_(json: bool = False) -> int:
    """List what there is: encodings, mixers, scaling schemes, samplers of positions, plugins, and what runs on this machine.

    Args:
        json: Print JSON instead of tables.
    """
    from longitude.catalogue import catalogue

    facts = catalogue()
    if json:
        print_json(facts)
        return DONE
    from rich.console import Console

    Console().print(*_tables(facts), sep="\n", highlight=False)
    return DONE


def _tables(facts: dict[str, Any]) -> Iterator[Any]:
    """The catalogue for the terminal."""
    from rich.text import Text

    from longitude.report.table import table as empty

    def table(title: str, *columns: str, rows: Iterator[tuple[str, ...]]) -> Any:
        shown = empty(*columns, words=len(columns), title=title)
        for column in shown.columns[1:]:
            column.no_wrap, column.overflow = False, "fold"
        for name, *cells in rows:
            shown.add_row(Text(name, "bold"), *(cell or "-" for cell in cells))
        return shown

    entries = facts["encodings"]
    by_all = set.intersection(*(set(takers) for entry in entries for takers in entry["backends"].values()))
    yield table(
        "encodings", "name", "class", "acts as", "properties", "source", "backends",
        rows=(
            (each["name"], each["class"], " ".join(each["acts"]), _properties(each), _papers(each), _backends(each, by_all))
            for each in entries
        ),
    )  # fmt: skip
    yield (
        "relative: one number added to all positions changes nothing. causal: keys in the future have no meaning. raw keys: "
        "a cache keeps keys without their rotation. one for all: layers share one module, as in the paper. "
        f"backends: {' and '.join(sorted(by_all))} take all encodings; those in parentheses only without gradients.\n"
    )
    options = "options; models give dim, num_heads, head_dim, max_length from their shape"
    rows = ((each["name"], " ".join(each["options"])) for each in entries)
    yield table("their options", "name", options, rows=rows)
    rows = (
        (each["name"], each["class"], " ".join(each["takes"]), each["cache"], " ".join(_own(each)), _papers(each))
        for each in facts["mixers"]
    )
    yield table("\nmixers", "name", "class", "takes of an encoding", "cache", "options", "source", rows=rows)
    yield "cache: how its size grows with the N tokens before.\n"
    rows = ((each["name"], _options(each), _papers(each)) for each in facts["scaling"])
    yield table("\nscaling of rotations", "name", "options (those with = are optional)", "source", rows=rows)
    rows = ((each["name"], _options(each), each["is"]) for each in facts["samplers"])
    yield table("\nsamplers of training positions", "name", "options", "what it is", rows=rows)
    for each in facts["plugins"]:
        names = ", ".join(f"{kind} {name}" for name, kind in each["registers"].items())
        yield f"\nplugin {each['name']} ({each.get('path') or each['distribution']}): {names or 'no names'}"
        yield from (f"  {name} cannot be built at toy size: {reason}" for name, reason in each["problems"].items())
    here = facts["machine"]
    yield (
        f"\nhere: longitude {here['longitude']}, torch {here['torch']}, threads {here['threads']}, CUDA {here['gpu'] or 'no'}, "
        f"MPS {'yes' if here['mps'] else 'no'}, transformers {here['transformers'] or 'not installed'}"
    )
    yield here["loops"]


def _backends(entry: dict[str, Any], by_all: set[str]) -> str:
    """Those that not every encoding has; in parentheses where only without gradients."""
    training, reading = entry["backends"]["training"], entry["backends"]["reading"]
    return " ".join(name if name in training else f"({name})" for name in reading if name not in by_all)


def _papers(entry: dict[str, Any]) -> str:
    """Authors and years; the links are in the JSON."""
    papers = (entry["source"] or "").split("; ")
    return "; ".join(paper.partition(", http")[0].partition(", arXiv")[0] for paper in papers)


def _properties(entry: dict[str, Any]) -> str:
    words = {
        "relative": entry["relative"],
        "absolute": not entry["relative"],
        "learned": entry["learned"],
        "causal": entry["causal_only"],
        f"up to {entry['max_length']}": entry["max_length"],
        f"{entry['axes']} axes": entry["axes"] > 1,
        "raw keys": not entry["stable_keys"],
        "one for all": entry["learned"] and entry["shared"],
    }
    return ", ".join(word for word, is_so in words.items() if is_so)


def _own(mixer: dict[str, Any]) -> list[str]:
    """Options that are not the model's shape."""
    return [option for option in mixer["options"] if option not in ("dim", "num_heads", "num_kv_heads", "head_dim")]


def _options(entry: dict[str, Any]) -> str:
    return " ".join(n if n in entry["required"] else f"{n}={default}" for n, default in entry["options"].items())
