"""What was measured, as a table for the terminal and as JSON with its protocol and the machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from longitude.bench.config import BenchConfig, as_dict
from longitude.bench.memory import available
from longitude.bench.peers import PEERS, version_of
from longitude.bench.rows import FAILED, Row, counted
from longitude.bench.target import score_of, short
from longitude.runs.provenance import commit_of_code, machine, versions

SCHEMA = 1
NOISY = 0.2
"""Quartiles of a ratio further apart than this share of it are marked."""
PROTOCOL = (
    "Each turn calls every case of a size once, in one process; the first turn is not counted. seconds: the median of a "
    "call. ratio: to `against` in the same turn, its median and quartiles over turns. forward: without gradients. "
    "forward+backward: with gradients of q, k, v, of what an encoding has learned and, where it acts on the tokens or reads "
    "columns off them, of the tokens; both are included. Learned numbers are random. memory: by how much forward and "
    "backward lift the peak (VmHWM) of a fresh process above its inputs, after a pass at a short length."
)


def document(config: BenchConfig, rows: list[Row], targets: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    found: dict[str, Any] = {} if targets is None else {"targets": targets}
    return headed(config, PROTOCOL) | found | {"rows": [row.as_dict() for row in rows]}


def headed(config: BenchConfig, protocol: str) -> dict[str, Any]:
    """What every document begins with: when, how, with what options, where, and with which code."""
    peers = sorted({peer.package for peer in PEERS})
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("MALLOC_", "OMP_"))}
    return {
        "schema": SCHEMA,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "protocol": protocol,
        "configuration": as_dict(config),
        "machine": machine()
        | {
            "os": platform.platform(),
            "memory_gib": round(total_memory() / 2**30, 1),
            "available_gib": round(available() / 2**30, 1),
            "load": [round(load, 2) for load in os.getloadavg()],
            "environment": environment,
        },
        "versions": versions() | {package: version_of(package) for package in peers},
        "commit": commit_of_code(),
    }


def total_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def heading(rows: list[Row]) -> str:
    """What the rows have in common."""
    first = next((row for row in rows if row.seconds is not None), rows[0])
    if first.group:
        return f"targets; {counted(first.threads)}, {first.clock} time"
    return (
        f"time over plain causal attention; {first.batch} x {first.heads} heads x {first.head_dim}, {first.dtype}, "
        f"{counted(first.threads)}, {first.clock} time, medians of {first.turns}"
    )


# ---- for the terminal ------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> Table:
    """Ratios to plain attention, one line per encoding and backend, one column per pass and length; then memory."""
    columns = list(dict.fromkeys((row.passed, row.length) for row in rows))
    weighed = any(row.memory_mib is not None for row in rows)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("", no_wrap=True)
    shown.add_column("backend", no_wrap=True)
    for passed, length in columns:
        shown.add_column(f"{short(passed)}\n{length}", justify="right", no_wrap=True)
    if weighed:
        shown.add_column(f"MiB more\n{max(row.length for row in rows)}", justify="right", no_wrap=True)
    lines: dict[tuple[str, str, str], dict[tuple[str, int], Row]] = {}
    for row in rows:
        lines.setdefault((row.kind, row.name, row.asked), {})[row.passed, row.length] = row
    before = "plain"
    for (kind, name, _), found in lines.items():
        if kind != before:
            shown.add_section()
            shown.add_row()
            before = kind
        cells = [_cell(found.get(column)) for column in columns]
        if weighed:
            row = next((row for row in found.values() if row.memory_beyond_mib is not None), None)
            cells.append("" if row is None else _memory(row))
        backends = dict.fromkeys(row.backend for row in found.values())
        where = "" if kind == "peer" else ", ".join(backends)
        shown.add_row(Text(name, "" if kind == "peer" else "bold"), where, *cells)
    return shown


def targets_table(measured: dict[str, Any]) -> Table:
    """One line per target: what was promised, what was measured, where it was worst, and the peers."""
    rows = [Row(**row) for row in measured["rows"]]
    shown = Table(box=None, pad_edge=False)
    shown.add_column("", overflow="fold")
    for name in ("target", "measured", ""):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("worst", overflow="fold")
    shown.add_column("others", justify="right", no_wrap=True)
    for each in measured["targets"]:
        others = [
            score for row in rows if row.group == each["name"] and row.kind == "peer" and (score := score_of(row))
        ]
        span = f"{min(others):.1f} to {max(others):.1f}" if others else ""
        number = "-" if each["measured"] is None else f"{each['measured']:.2f}"
        verdict = {True: "met", False: "missed", None: ""}[each["met"]]
        shown.add_row(each["name"], f"<= {each['limit']:.2f}", number, verdict, each["worst"] or "", span)
    return shown


def sentence(outcome: dict[str, Any]) -> str:
    """What came of a target, in one line."""
    measured = "not measured" if outcome["measured"] is None else f"measured {outcome['measured']:.2f}"
    where = f" ({outcome['worst']})" if outcome["worst"] else ""
    return f"{outcome['name']}: target <= {outcome['limit']:.2f}, {measured}{where}"


def _memory(row: Row) -> str:
    assert row.memory_mib is not None and row.memory_beyond_mib is not None
    return f"({row.memory_mib:.0f})" if row.kind == "plain" else f"{row.memory_beyond_mib:.0f}"


def _cell(row: Row | None) -> str:
    if row is None or row.seconds is None:
        return "" if row is None else "-"
    if row.ratio is None:
        return f"{row.seconds * 1e3:.1f} ms"
    return f"{row.ratio:.2f}" + ("~" if is_noisy(row) else "")


def is_noisy(row: Row) -> bool:
    if row.ratio is None or row.ratio_low is None or row.ratio_high is None:
        return False
    return row.ratio_high - row.ratio_low > NOISY * row.ratio


def remarks(rows: list[Row]) -> list[str]:
    """What the table's signs mean, and why something was not measured."""
    said = []
    if noisy := sum(is_noisy(row) for row in rows):
        said.append(
            f"~ quartiles more than {NOISY:.0%} apart ({noisy} of {len(rows)}): a busy machine, or too few --repeats; "
            "--threads 1 --cpu-time counts processor seconds instead"
        )
    for name, backend, note in dict.fromkeys((row.name, row.backend, row.note) for row in rows if row.note):
        said.append(f"{name} on {backend}: {note}")
    return said


def absent(measured: dict[str, Any]) -> list[str]:
    """Which other libraries would stand beside ours if they were installed."""
    packages = sorted({peer.package for peer in PEERS})
    missing = [package for package in packages if measured["versions"][package] is None]
    if not missing or measured["configuration"]["no_peers"]:
        return []
    return [f"not installed, so not compared: {', '.join(missing)}; pip install 'longitude[bench]' brings all"]


def parts(measured: dict[str, Any]) -> list[Any]:
    """A document for the terminal."""
    rows = [Row(**row) for row in measured["rows"]]
    shown = targets_table(measured) if "targets" in measured else table(rows)
    return [heading(rows), shown, *remarks(rows), *absent(measured)]


def failures(measured: dict[str, Any]) -> bool:
    """Whether something raised, or nothing could be timed at all."""
    rows = [Row(**row) for row in measured["rows"]]
    return any(row.note.startswith(FAILED) for row in rows) or all(row.seconds is None for row in rows)
