"""Timing: compared cases are called in turn, in one process, and ratios are taken turn by turn."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: list[float]) -> "Spread":
        low, median, high = map(float, np.quantile(numbers, (0.25, 0.5, 0.75)))
        return cls(median, low, high)


@dataclass(frozen=True)
class Timing:
    """Timing of a case. seconds: time of a call. ratio: to the baseline in the same turn; None for the baseline itself."""

    seconds: Spread
    ratio: Spread | None


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    baseline: str | Mapping[str, str],
    turns: int,
    clock: Clock = time.perf_counter,
    on_call: Callable[[str], object] = lambda name: None,
) -> dict[str, Timing]:
    """Time cases in turns: each turn calls every case once, so that a slow moment of the machine affects all of them.

    The first turn warms up and is not counted. A ratio divides by the baseline of the same turn.

    Args:
        cases: name -> call.
        baseline: The name of the case that ratios divide by; or case -> the name of its baseline.
        turns: Number of counted turns; medians and quartiles are over them.
        clock: Function that returns seconds.
        on_call: Called with the name of each case after its call.

    Returns:
        name -> its timing.
    """
    against = dict.fromkeys(cases, baseline) if isinstance(baseline, str) else baseline
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, call in cases.items():
            start = clock()
            call()
            spent = clock() - start
            if turn:
                seconds[name].append(spent)
            on_call(name)
    timings = {}
    for name, spent in seconds.items():
        base = against.get(name, name)
        pairs = zip(spent, seconds[base], strict=True)
        ratio = None if base == name else Spread.of([seconds_of_case / plain for seconds_of_case, plain in pairs])
        timings[name] = Timing(Spread.of(spent), ratio)
    return timings
