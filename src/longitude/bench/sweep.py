"""The table of a BenchConfig: every encoding on every backend at every length, and the peers, beside plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from longitude.bench import memory
from longitude.bench.cases import PLAIN, AttentionShape, Case, Inputs, built, ours, plain, verdict
from longitude.bench.clock import CLOCKS, interleaved
from longitude.bench.config import BenchConfig
from longitude.bench.peers import Peer, installed
from longitude.bench.rows import FAILED, Row, sized, timed

TENSORS = 16
"""Tensors [batch, heads, length, head_dim] that a step holds at once: inputs, output, gradients, what attention keeps."""


class Watcher(Protocol):
    """Who is told how it goes on."""

    def expect(self, steps: int) -> None: ...

    def did(self, words: str) -> None: ...


class Nobody:
    def expect(self, steps: int) -> None: ...

    def did(self, words: str) -> None: ...


@dataclass(frozen=True)
class Entry:
    """A line of the table: an encoding on a backend, or a peer."""

    name: str
    kind: str
    backend: str

    @property
    def fields(self) -> dict[str, str]:
        """What it says of a row."""
        return {"name": self.name, "kind": self.kind, "asked": self.backend}

    @property
    def key(self) -> str:
        return self.name if self.kind != "ours" or self.backend == "auto" else f"{self.name} on {self.backend}"


def entries(config: BenchConfig) -> list[Entry]:
    own = [Entry(label, "ours", backend) for label in config.encodings for backend in config.backends]
    return own + [Entry(name, "peer", "") for name in installed() if not config.no_peers]


def size(config: BenchConfig, length: int) -> AttentionShape:
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    return AttentionShape(config.batch, heads, kv_heads, config.head_dim, length, config.dtype)


def refusals(config: BenchConfig) -> dict[tuple[str, str, str], str]:
    """(label, backend, pass) -> why not, in words. ValueError where a length does not fit into memory; allocates little."""
    refused, free = {}, memory.available()
    work = size(config, config.lengths[-1])
    linear = TENSORS * work.tensor_bytes
    _require_memory(linear, free, f"attention itself needs at length {work.length}")
    inputs = Inputs.of(work, empty=True)
    for label in config.encodings:
        try:
            encoding = built(label, work)
        except ValueError as error:
            raise ValueError(f"--encodings {label}: {error}") from error
        for backend in config.backends:
            for passed in config.passes:
                try:
                    chosen, needed = verdict(encoding, backend, inputs, passed != "forward")
                except ValueError as error:
                    refused[label, backend, passed] = str(error)
                    continue
                _require_memory(linear + needed, free, f"{label} on the backend {chosen} needs at length {work.length}")
    return refused


def _require_memory(needed: float, free: float, words: str) -> None:
    if needed > free:
        raise ValueError(
            f"{words} about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are available; choose shorter "
            "--lengths, a smaller --batch, or another of --backends"
        )


def sweep(config: BenchConfig, watcher: Watcher | None = None) -> list[Row]:
    """Measure everything that a checked configuration asks for."""
    watcher = watcher or Nobody()
    refused = refusals(config)
    lines = entries(config)
    weighs = not config.no_memory and memory.can_measure() and "forward+backward" in config.passes
    per_length = len(config.passes) * (len(lines) + 1) * (config.repeats + 1)
    watcher.expect(len(config.lengths) * per_length + (len(lines) + 1) * weighs)
    with threads(config.threads) as count:
        rows = []
        for length in config.lengths:
            work = size(config, length)
            inputs = Inputs.of(work)
            for passed in config.passes:
                rows += _timed(config, lines, refused, inputs, passed, count, watcher)
        if weighs:
            rows = _weighed(rows, size(config, config.lengths[-1]), count, watcher)
    return rows


def _timed(
    config: BenchConfig,
    lines: list[Entry],
    refused: dict[tuple[str, str, str], str],
    inputs: Inputs,
    passed: str,
    count: int,
    watcher: Watcher,
) -> list[Row]:
    """The rows of one length and pass."""
    work, backward = inputs.work, passed == "forward+backward"
    cases: dict[str, Case] = {PLAIN: plain(inputs)}
    notes: dict[str, str] = {}
    peers = installed()
    for line in lines:
        if line.kind == "peer":
            made = _peer(peers[line.name], inputs, backward)
            if isinstance(made, str):
                notes[line.key] = made
            else:
                cases[line.key] = made
        elif why := refused.get((line.name, line.backend, passed)):
            notes[line.key] = why
        else:
            cases[line.key] = ours(line.name, line.backend, inputs, backward)
    steps = {name: case.step(backward) for name, case in cases.items()}
    clock = CLOCKS[config.clock]
    timings = interleaved(
        steps, PLAIN, config.repeats, clock, lambda name: watcher.did(f"{passed} at {work.length}: {name}")
    )
    protocol = {"threads": count, "clock": config.clock, "turns": config.repeats, "passed": passed, **sized(work)}
    rows = [Row(name=PLAIN, kind="plain", backend=cases[PLAIN].backend, **protocol, **timed(timings[PLAIN], PLAIN))]
    for line in lines:
        if line.key in notes:
            rows.append(Row(**line.fields, backend=line.backend, note=notes[line.key], **protocol))
            for _ in range(config.repeats + 1):
                watcher.did(line.key)
        else:
            backend, timing = cases[line.key].backend, timings[line.key]
            rows.append(Row(**line.fields, backend=backend, **protocol, **timed(timing, PLAIN)))
    return rows


def _peer(peer: Peer, inputs: Inputs, backward: bool) -> Case | str:
    """Its case, tried once; or why it is not timed. Other people's code: whatever it raises is a result."""
    if (needed := peer.bytes(inputs.work)) > memory.available():
        return f"needs about {needed / 2**30:.1f} GiB of memory"
    try:
        case = peer.case(inputs)
        case.step(backward)()
    except Exception as error:
        return f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return case


def _weighed(rows: list[Row], work: AttentionShape, count: int, watcher: Watcher) -> list[Row]:
    """The rows of the longest length with the memory of forward and backward, each from a fresh process."""
    base: float | None = None
    weighed = []
    for row in rows:
        if row.length == work.length and row.passed == "forward+backward" and row.seconds is not None:
            watcher.did(f"memory at {work.length}: {row.name}")
            try:
                mib = memory.growth(work, row.name, row.backend, count)
            except RuntimeError as error:
                row = replace(row, note=f"{FAILED}: {error}")
            else:
                base = mib if row.kind == "plain" else base
                row = replace(row, memory_mib=mib, memory_beyond_mib=None if base is None else mib - base)
        weighed.append(row)
    return weighed


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """So many threads of torch, by default as many as it has taken, and afterwards as many as before."""
    before = torch.get_num_threads()
    count = count or before
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
