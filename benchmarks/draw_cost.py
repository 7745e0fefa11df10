"""docs/cost.svg: what each task costs here and in the best other library, on the machine of the newest `make bench`."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from fill_numbers import PROCESSORS, WORDS, newest
from longitude.report.wording import count
from pictures import Picture, drawing, titled, words_at

WIDTH, EDGES, ROW = 400, 12, 58
TICKS = (0.5, 1, 2, 5, 10)
BASELINES = {
    "plain": "PyTorch attention without an encoding",
    "clone": "a copy of q and k",
    "transformers Llama": "the Llama of transformers",
}
"""Row that ratios are to -> what it is."""
STYLE = """
.themed text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.themed .rule { stroke: var(--grid); } .themed .one { stroke: var(--grey); stroke-dasharray: 4 4; }
.themed .between { stroke: var(--edge); stroke-width: 3; } .themed .ours { fill: var(--sea); }
.themed .other { fill: var(--paper); stroke: var(--lost); stroke-width: 2.5; }"""


class Task(NamedTuple):
    """Ratios to the baseline: the slowest of ours, and the fastest of the others."""

    name: str
    of: str
    ours: float
    other: float
    library: str


class Cost(NamedTuple):
    tasks: list[Task]
    about: str


def found() -> Cost:
    """Each task by its case in which the best other library comes closest to us; tasks that no other library has are left out."""
    path = newest("bench")
    assert path is not None
    result = json.loads(path.read_text(encoding="utf-8"))
    cases: dict[str, dict[Any, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["group"], {}).setdefault((row["passed"], row["batch"], row["length"]), []).append(row)
    tasks = []
    for name, by_case in cases.items():
        there = [task for rows in by_case.values() if (task := _task(name, rows))]
        if there and not name.endswith("with a bias"):  # the Llama has no bias: another task
            tasks.append(min(there, key=lambda task: task.other / task.ours))
    tasks.sort(key=lambda task: -task.other / task.ours)
    cpu, first = result["machine"]["cpu"], result["rows"][0]
    about = f"{PROCESSORS.get(cpu, cpu).partition(',')[0]}, {count(first['threads'], 'thread')}, {result['made'][:10]}"
    return Cost(tasks, about)


def _task(name: str, rows: list[dict[str, Any]]) -> Task | None:
    """None where no library does the same, or the ratios are of memory or of a share."""
    ours = [row for row in rows if row["kind"] == "ours" and row["ratio"] and row["score"] is None]
    others = [row for row in rows if row["kind"] == "peer" and row["ratio"] and row["score"] is None]
    of = ours[0]["against"] if ours else ""
    if of == "transformers Llama":  # the baseline is the other library
        others = [{"name": of, "ratio": 1.0, "against": of}]
    others = [row for row in others if row["against"] == of]
    if not ours or not others:
        return None
    best = min(others, key=lambda row: row["ratio"])
    return Task(WORDS.get(name, name), of, max(row["ratio"] for row in ours), best["ratio"], best["name"])


def finding(cost: Cost) -> str:
    times = [task.other / task.ours for task in cost.tasks if task.other > 1.1 * task.ours]
    alike = [task.name for task in cost.tasks if task.other <= 1.1 * task.ours]
    rest = f"; {' and '.join(alike)} takes as long in both" if alike else ""
    return f"For position, the best other library takes {min(times):.0f} to {max(times):.0f} times as long as Longitude{rest}"


def words(cost: Cost) -> str:
    rows = [
        f"{task.name}, over {BASELINES[task.of]}: Longitude {task.ours:.2f}, {task.library} {task.other:.2f}"
        for task in cost.tasks
    ]
    return f"{finding(cost)}. Ratios of time, lower is better. {'; '.join(rows)}. {cost.about}."


def _x(ratio: float) -> float:
    low, high = math.log(0.45), math.log(12)
    return EDGES + (math.log(ratio) - low) / (high - low) * (WIDTH - 2 * EDGES)


def chart(cost: Cost) -> str:
    """A group for each baseline; two dots a row."""
    parts, top = titled(finding(cost))
    parts += _key(top + 14)
    y, rows = top + 30, []
    for of in dict.fromkeys(task.of for task in cost.tasks):
        rows.append(words_at(0, y + 20, f"time / {BASELINES[of]}", "quiet small"))
        y += 26
        for task in cost.tasks:
            if task.of == of:
                rows += _row(task, y)
                y += ROW
        y += 6
    for tick in TICKS:
        line = f'x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{top + 30}" y2="{y}"'
        parts.append(f'<line class="{"one" if tick == 1 else "rule"}" {line}/>')
        parts.append(words_at(_x(tick), y + 16, f"{tick:g}", "quiet small middle"))
    parts.append(
        words_at(WIDTH, y + 34, "times as long as the baseline (log scale), lower is better", "quiet small end")
    )
    parts.append(
        words_at(WIDTH, y + 52, "Each row: the case in which the other library comes closest.", "quiet small end")
    )
    parts.append(words_at(WIDTH, y + 70, cost.about, "quiet small end"))
    return drawing(WIDTH, y + 78, [*parts, *rows], STYLE)


def _key(y: float) -> Iterator[str]:
    yield f'<circle class="ours" cx="8" cy="{y - 4}" r="6"/>{words_at(20, y, "Longitude", "small")}'
    yield f'<circle class="other" cx="118" cy="{y - 4}" r="5"/>{words_at(130, y, "best other library", "small")}'


def _row(task: Task, y: float) -> Iterator[str]:
    yield words_at(0, y + 13, task.name, "small strong")
    line = y + 27
    yield f'<line class="between" x1="{_x(task.ours):.1f}" x2="{_x(task.other):.1f}" y1="{line}" y2="{line}"/>'
    yield f'<circle class="other" cx="{_x(task.other):.1f}" cy="{line}" r="5"/>'
    yield f'<circle class="ours" cx="{_x(task.ours):.1f}" cy="{line}" r="6"/>'
    if task.other > task.ours:
        yield words_at(_x(task.ours) - 10, line + 5, f"{task.ours:.2f}", "small end")
        yield words_at(_x(task.other) + 10, line + 5, f"{task.other:.1f}", "small")
        yield words_at(_x(task.other) + 5, line + 21, task.library, "small quiet end")
    else:
        yield words_at(_x(task.ours) + 10, line + 5, f"{task.ours:.2f}, {task.library} {task.other:.2f}", "small")


COST = Picture("cost", "Time of Longitude and of the best other library", found, chart, words, both=True)
