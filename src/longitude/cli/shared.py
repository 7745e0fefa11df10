"""Common code of verbs: exit codes, options that were given, and JSON output."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from io import TextIOWrapper
from json import dumps, loads
from typing import Any

DONE, FAILURES, WRONG_USE, UNTRIED, INTERRUPTED = 0, 1, 2, 3, 130


def keep_threads_from_spinning() -> None:
    """Let threads of OpenMP sleep while they wait, unless the environment says otherwise. Call it before torch loads.

    Threads that spin took 4 to 9 times the processor time in `check` while other programs used the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def print_json(value: Any) -> None:
    """Plain data, or a DataFrame as a list of rows, on standard output: in ASCII, which every terminal and pipe can encode."""
    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1))


def write_any_sign() -> None:
    """Let standard output write "?" for a sign that its encoding lacks, where it would raise after hours of work."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def changed(options: Any, names: Iterable[str]) -> list[str]:
    """Those of the named fields of a verb's options that have other values than by default, as a user writes them."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(type(options), name)]


def print_costs(costs: Sequence[Any], json: bool, *lines: str) -> int:
    """Costs of `longitude.runs.costs` as one table for every --plan, a column for what any of them has."""
    from longitude.report.table import show, table
    from longitude.runs.costs import HERE, ON_H100

    if json:
        print_json([cost.as_json for cost in costs])
        return DONE
    cells: dict[str, Callable[[Any], str | None]] = {
        "model": lambda cost: cost.model,
        "part": lambda cost: cost.part,
        "parameters": lambda cost: cost.parameters and f"{cost.parameters:,}",
        "steps": lambda cost: cost.steps and f"{cost.steps:,}",
        "length": lambda cost: f"{cost.length:,}",
        "tokens": lambda cost: f"{cost.tokens:,}",
        "FLOPs": lambda cost: f"{cost.flops:.2e}",
        "GB": lambda cost: cost.memory and f"{cost.memory.total / 1e9:.1f}",
        "here": lambda cost: "?" * bool(cost.reason) if cost.seconds is None else duration(cost.seconds),
        "one H100": lambda cost: cost.h100_seconds and duration(cost.h100_seconds),
    }
    columns = {head: cell for head, cell in cells.items() if any(map(cell, costs))}
    shown = table(*columns, words=2)
    for cost in costs:
        shown.add_row(*(cell(cost) or "" for cell in columns.values()))
    protocol = " ".join(sentence for head, sentence in (("here", HERE), ("one H100", ON_H100)) if head in columns)
    show(*[shown] * bool(costs), *lines, *[f"\n{protocol}"] * bool(protocol))
    return DONE


def duration(seconds: float) -> str:
    """In the unit that fits."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
