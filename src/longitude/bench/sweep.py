"""The table of a BenchConfig: every encoding on every backend at every length, compared with plain attention."""

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from longitude.bench import measurement
from longitude.bench.cases import PLAIN, AttentionShape, Inputs, built, ours, plain, verdict
from longitude.bench.config import BenchConfig
from longitude.bench.measurement import CLOCKS, FAILED, Row, interleaved
from longitude.runs.machine import available_memory, can_measure_peak, require_memory, threads
from longitude.runs.terminal import Progress

TENSORS = 16
"""Tensors [batch, heads, length, head_dim] that a step allocates at once: inputs, output, gradients, what attention keeps."""
BOTH = "forward+backward"
SMALLER = "choose shorter --lengths, a smaller --batch, or another of --backends"


def shape_of(config: BenchConfig, length: int) -> AttentionShape:
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    return AttentionShape(config.batch, heads, kv_heads, config.head_dim, length, config.dtype)


def require_room(config: BenchConfig) -> None:
    """ValueError if the longest length does not fit into memory; allocates little."""
    shape = shape_of(config, config.lengths[-1])
    linear, free = TENSORS * shape.tensor_bytes, available_memory()
    require_memory(linear, free, f"attention itself needs at length {shape.length}", SMALLER)
    inputs = Inputs.of(shape, empty=True)
    for label in config.encodings:
        try:
            encoding = built(label, shape)
        except ValueError as error:
            raise ValueError(f"--encodings {label}: {error}") from error
        for backend, passed in product(config.backends, config.passes):
            try:
                chosen, needed = verdict(encoding, backend, inputs, passed == BOTH)
            except ValueError:
                continue  # a row will say why
            where = f"{label} on the backend {chosen} needs at length {shape.length}"
            require_memory(linear + needed, free, where, SMALLER)


def timed_rows(config: BenchConfig, inputs: Inputs, passed: str, progress: Progress) -> list[Row]:
    """The rows of one length and pass: plain attention first."""
    both, cases = passed == BOTH, {(PLAIN, ""): plain(inputs)}
    refusals: dict[tuple[str, str], str] = {}
    for line in product(config.encodings, config.backends):
        try:
            cases[line] = ours(*line, inputs, both)
        except ValueError as error:
            refusals[line] = str(error)
    progress.advance(by=len(refusals) * (config.repeats + 1))
    on_call = lambda name: progress.advance(f"{passed} at {inputs.shape.length}: {name}")  # noqa: E731
    steps = {" ".join(line).strip(): case.step(both) for line, case in cases.items()}
    timings = interleaved(steps, PLAIN, config.repeats, CLOCKS[config.clock], on_call)
    protocol: dict[str, Any] = {"threads": torch.get_num_threads(), "clock": config.clock, "turns": config.repeats}
    protocol |= {"passed": passed, **asdict(inputs.shape)}
    rows = []
    for name, asked in ((PLAIN, ""), *product(config.encodings, config.backends)):
        case = cases.get((name, asked))
        numbers = timings.get(f"{name} {asked}".strip()) or {"note": refusals[name, asked]}
        backend, kind = asked if case is None else case.backend, "plain" if name == PLAIN else "ours"
        rows.append(Row(name=name, kind=kind, asked=asked, backend=backend, **protocol, **numbers))
    return rows


def weighed(row: Row, base: float | None, shape: AttentionShape) -> Row:
    """The row with the memory of forward and backward, from a fresh process; base: that of plain attention."""
    try:
        mib = measurement.growth(shape, row.name, row.backend, row.threads)
    except RuntimeError as error:
        return replace(row, note=f"{FAILED}: {error}")
    base = mib if row.kind == "plain" else base
    return replace(row, memory_mib=mib, memory_beyond_mib=None if base is None else mib - base)


def sweep(config: BenchConfig, progress: Progress) -> list[Row]:
    """Measure everything that a checked configuration names."""
    require_room(config)
    rows, cases = list[Row](), len(config.encodings) * len(config.backends) + 1
    weighs = not config.no_memory and can_measure_peak() and BOTH in config.passes
    per_length = len(config.passes) * cases * (config.repeats + 1)
    progress.update("starting", 0, len(config.lengths) * per_length + cases * weighs)
    with threads(config.threads):
        for length in config.lengths:
            inputs = Inputs.of(shape_of(config, length))
            for passed in config.passes:
                rows += timed_rows(config, inputs, passed, progress)
    base, shape = None, shape_of(config, config.lengths[-1])
    for i, row in enumerate(rows):
        if weighs and row.length == shape.length and row.passed == BOTH and row.seconds is not None:
            progress.advance(f"memory at {shape.length}: {row.name}")
            rows[i] = weighed(row, base, shape)
            base = rows[i].memory_mib if row.kind == "plain" else base
    return rows
