"""Output of measurements: a table for the terminal, and JSON with protocol and machine."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from longitude.bench.cases import PLAIN
from longitude.bench.measurement import FAILED, Row
from longitude.report.table import table
from longitude.report.wording import count
from longitude.runs.files import require_writable
from longitude.runs.machine import available_memory, provenance, total_memory

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


# ---- files -----------------------------------------------------------------------------------------------------------
def document(configuration: dict[str, Any], protocol: str, **results: Any) -> dict[str, Any]:
    """Everything that was measured, as plain data: when, how, with what options, where, and with which code."""
    origin = provenance()
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("MALLOC_", "OMP_"))}
    origin["machine"] |= {
        "os": platform.platform(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "available_gib": round(available_memory() / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "environment": environment,
    }
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": SCHEMA, "made": made, "protocol": protocol, "configuration": configuration, **origin, **results}


def require_place(out: Path) -> None:
    """ValueError unless a JSON can be written there."""
    if out.suffix != ".json" or out.is_dir():
        raise ValueError(f"--out: expected a file that ends in .json, got {out}")
    require_writable(out)


# ---- for the terminal ------------------------------------------------------------------------------------------------
def parts(rows: list[Row]) -> list[Any]:
    """Everything that was measured, for the terminal."""
    first = rows[0]
    size = f"{first.batch} x {first.heads} heads x {first.head_dim}, {first.dtype}"
    clock = f"{count(first.threads, 'thread')}, {first.clock} time, medians of {first.turns}"
    return [f"time over plain causal attention; {size}, {clock}", ratios(rows), *remarks(rows)]


def ratios(rows: list[Row]) -> Table:
    """Ratios to plain attention, one line per encoding and backend, one column per pass and length; then memory."""
    columns = list(dict.fromkeys((row.passed, row.length) for row in rows))
    weighed = any(row.memory_mib is not None for row in rows)
    heads = [f"{short(passed)}\n{length}" for passed, length in columns]
    shown = table("", "backend", *heads, *[f"MiB more\n{max(row.length for row in rows)}"] * weighed, words=2)
    lines: dict[tuple[str, str], dict[tuple[str, int], Row]] = {}
    for row in rows:
        lines.setdefault((row.name, row.asked), {})[row.passed, row.length] = row
    for (name, _), cells in lines.items():
        where = ", ".join(dict.fromkeys(row.backend for row in cells.values()))
        memory = next((_memory(row) for row in cells.values() if row.memory_mib is not None), "")
        shown.add_row(name, where, *(_cell(cells[column]) for column in columns), *[memory] * weighed)
    return shown


def _memory(row: Row) -> str:
    return f"({row.memory_mib:.0f})" if row.kind == PLAIN else f"{row.memory_beyond_mib:.0f}"


def _cell(row: Row) -> str:
    if row.seconds is None:
        return "-"
    return f"{row.seconds * 1e3:.1f} ms" if row.ratio is None else f"{row.ratio:.2f}" + "~" * is_noisy(row)


def short(passed: str) -> str:
    """The name of a pass, for narrow places."""
    return {"forward": "fwd", "forward+backward": "fwd+bwd"}.get(passed, passed)


def is_noisy(row: Row) -> bool:
    return bool(row.ratio and row.ratio_low and row.ratio_high and row.ratio_high - row.ratio_low > NOISY * row.ratio)


def remarks(rows: list[Row]) -> list[str]:
    """Legend of the table's signs, and reasons why something was not measured."""
    lines = []
    if noisy := sum(is_noisy(row) for row in rows):
        why = "a busy machine, or too few --repeats; --threads 1 --cpu-time counts processor seconds instead"
        lines.append(f"~ quartiles more than {NOISY:.0%} apart ({noisy} of {len(rows)}): {why}")
    notes = dict.fromkeys((row.name, row.backend, row.note) for row in rows if row.note)
    return lines + [f"{name} on {backend}: {note}" for name, backend, note in notes]


def has_failed(rows: list[Row]) -> bool:
    """Whether something raised, or nothing could be timed at all."""
    return any(row.note.startswith(FAILED) for row in rows) or all(row.seconds is None for row in rows)
