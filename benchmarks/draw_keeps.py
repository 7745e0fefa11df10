"""docs/keeps.svg: what methods of context extension keep, from the newest result of benchmarks/retrieval.py."""

import json
from typing import Any

from fill_numbers import newest
from longitude.report.figure import apart
from pictures import Picture, drawing, titled, words_at

WIDTH, HEIGHT, GAP = 400, 250, 17
LOSS, SCORE, NAMES = (34, 122), (178, 262), 270
"""Where the panels begin and end, and where the names begin."""
COLORS = {"unchanged": "ink", "linear": "lost", "dynamic": "holds", "ntk": "sea"}
"""Methods that the text is about, the last one on top; others are grey."""
STYLE = """
.themed path { fill: none; stroke-width: 2; } .themed .rule { stroke: var(--grid); }"""


def found() -> dict[str, Any]:
    path = newest("retrieval")
    assert path is not None
    return json.loads(path.read_text(encoding="utf-8"))


def name(row: dict[str, Any]) -> str:
    return row["method"] + (", trained" if row["steps"] else "")


def percent(share: float) -> str:
    return f"{round(share, 2):.0%}"  # as the table rounds


def ends(row: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Bits per byte and score, at the first length and at the last."""
    lengths = [*row["bits"]][:: len(row["bits"]) - 1]
    return [row["bits"][n] for n in lengths], [row["means"][n]["value"] for n in lengths]


def finding(result: dict[str, Any]) -> str:
    """The untrained method that keeps the loss and finds least."""
    keeping = [row for row in result["rows"] if not row["steps"] and "perplexity" in row["kept"]]
    worst = min(keeping, key=lambda row: ends(row)[1][1])
    bits, score = ends(worst)
    return (
        f"At {result['protocol']['factor']} times the length, {worst['method']} keeps its loss ({bits[1]:.2f}) and "
        f"answers {percent(score[1])} of the questions"
    )


def words(result: dict[str, Any]) -> str:
    first, *_, last = result["rows"][0]["bits"]
    rows = []
    for row in result["rows"]:
        bits, score = ends(row)
        answers = f"{percent(score[0])} and {percent(score[1])} of the answers"
        rows.append(f"{name(row)}: {bits[0]:.2f} and {bits[1]:.2f} bits per byte, {answers}")
    return f"{finding(result)}. At {first} and at {last} tokens, trained at {first}: {'; '.join(rows)}."


def chart(result: dict[str, Any]) -> str:
    """Two slopes for each method: its loss, and its answers."""
    first, *_, last = result["rows"][0]["bits"]
    parts, top = titled(finding(result))
    top += 50
    order, trained = [*COLORS], max(row["steps"] for row in result["rows"])
    rows = sorted(
        result["rows"],
        key=lambda row: order.index(row["method"]) if row["method"] in COLORS and not row["steps"] else -1,
    )
    every = [bits for row in rows for bits in ends(row)[0]]
    low, high = min(every) - 0.05, max(every) + 0.05
    panels = (
        (LOSS, "Bits per byte", "lower is better", 0, low, high, [1.4 + 0.2 * i for i in range(6)], "{:.1f}"),
        (SCORE, "Answers right", "higher is better", 1, -0.03, 1.0, [0.25 * i for i in range(5)], "{:.0%}"),
    )
    for (left, right), title, better, which, bottom, height, ticks, form in panels:

        def y(value: float, bottom: float = bottom, height: float = height) -> float:
            return top + HEIGHT * (height - value) / (height - bottom)

        parts += [
            words_at(left - 34, top - 30, title, "strong small"),
            words_at(left - 34, top - 13, better, "quiet small"),
        ]
        for tick in ticks:
            parts.append(f'<line class="rule" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
            parts.append(words_at(left - 6, y(tick) + 4, form.format(tick), "quiet end", style="font-size: 12px"))
        parts += [words_at(at, top + HEIGHT + 18, n, "quiet small middle") for at, n in ((left, first), (right, last))]
        for row in rows:
            a, b = ends(row)[which]
            ink = f"var(--{COLORS.get(row['method'], 'edge') if not row['steps'] else 'edge'})"
            dash = ' stroke-dasharray="5 3"' if row["steps"] else ""
            parts.append(f'<path stroke="{ink}"{dash} d="M{left} {y(a):.1f}L{right} {y(b):.1f}"/>')
            parts += [f'<circle cx="{x}" cy="{y(v):.1f}" r="3.5" fill="{ink}"/>' for x, v in ((left, a), (right, b))]
        if which:
            last_first = sorted(rows, key=lambda row: -ends(row)[1][1])
            for row, at in zip(last_first, apart([y(ends(row)[1][1]) for row in last_first], GAP), strict=True):
                ink = COLORS.get(row["method"], "grey") if not row["steps"] else "grey"
                weight = "strong" if ink != "grey" else ""
                score = percent(ends(row)[1][1])
                parts.append(
                    words_at(NAMES, at + 4, f"{score} {name(row)}", f"small {weight}", style=f"fill: var(--{ink})")
                )
    axis = words_at(
        0, top + HEIGHT + 38, f"tokens; trained at {first}; dashed: after {trained} steps of training", "quiet small"
    )
    return drawing(WIDTH, top + HEIGHT + 46, [*parts, axis], STYLE)


KEEPS = Picture(
    "keeps",
    "Loss and retrieval of extended models, at the training length and at the new one",
    found,
    chart,
    words,
    True,
)
