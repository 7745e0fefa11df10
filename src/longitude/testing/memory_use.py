"""What memory a call allocates, which torch's profiler counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Memory(NamedTuple):
    """Bytes on the CPU: of the largest tensor, and the most that was alive at once beyond what was alive before."""

    largest: int
    peak: int


def memory_of(call: Callable[[], Any]) -> Memory:
    """What call() allocates on the CPU, inside custom operators and backward too."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    sizes = [int(event["args"]["Bytes"]) for event in sorted(events, key=lambda event: event["ts"])]
    assert sizes, "this build of torch does not record memory"
    return Memory(max(sizes), max(accumulate(sizes)))  # what is freed has a negative size


@contextmanager
def _silent() -> Iterator[None]:
    """Torch's profiler writes to file descriptor 2 as it starts and ends."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
