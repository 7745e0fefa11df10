"""The picture of README.md: docs/study.svg and docs/study-dark.svg, drawn from the newest study committed here.

`make numbers` writes both, and a test compares their numbers with the study's.
"""

import re
from typing import Any
from xml.sax.saxutils import escape

import altair as alt

from fill_numbers import ROOT, newest
from longitude.report.figure import DARK, GREY, apart, color_of, dashes_of, described, save, themed
from longitude.report.wording import papers
from longitude.study.blind import is_blind, seen
from longitude.study.config import StudyConfig
from longitude.study.results import ngrams_named

WIDTH, HEIGHT, GAP = 360, 300, 17
TITLE = (
    "RoPE and sinusoids rise past the training length, the T5 bias and ALiBi stay as level as a model that sees little"
)
FILES = {ROOT / "docs" / "study.svg": False, ROOT / "docs" / "study-dark.svg": True}
"""Whether it is for dark pages."""


def names_of(kept: dict[str, Any]) -> dict[str, str]:
    """Label -> the paper's name, or what a blind control sees."""
    config = StudyConfig.of(kept["study"]["configuration"])
    names = papers([*dict.fromkeys(row["label"] for row in kept["rows"])])
    blind = [label for label in names if is_blind(label, config.train_length)]
    return names | {label: f"sees {seen(label, config.layers)} bytes" for label in blind}


def floor(kept: dict[str, Any]) -> tuple[str, float]:
    """The best n-grams, and what they reach."""
    order, bits = min(kept["study"]["ngrams"].items(), key=lambda item: item[1])
    return ngrams_named(int(order)), bits


def described_chart(kept: dict[str, Any]) -> str:
    """What the picture shows with all its numbers, for readers who do not see it."""
    trained = kept["study"]["configuration"]["train_length"]
    labels = list(dict.fromkeys(row["label"] for row in kept["rows"]))
    names = names_of(kept)
    by_label = [[row for row in kept["rows"] if row["label"] == label] for label in labels]
    lines = [
        f"{names[rows[0]['label']]} " + ", ".join(f"{r['value']:.2f} at {r['length']}" for r in rows)
        for rows in by_label
    ]
    lines.append("{} {:.2f}".format(*floor(kept)))
    return f"Line chart of bits per byte, lower is better, by window length in bytes, trained on {trained}: {'; '.join(lines)}."


def chart(kept: dict[str, Any]) -> Any:
    """A line for each encoding, its band over the seeds, its name at the end, and the training length."""
    rows, trained = kept["rows"], kept["study"]["configuration"]["train_length"]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    low, high = min(row["seed_low"] for row in rows) - 0.1, max(row["seed_high"] for row in rows) + 0.1
    x = alt.X(
        "length:Q",
        title="Window length in bytes (log scale)",
        scale=alt.Scale(type="log", base=2, domain=[lengths[0], lengths[-1]]),
        axis=alt.Axis(values=lengths, format="d", grid=False),
    )
    scale, title = alt.Scale(domain=[low, high], zero=False, nice=False), "Bits per byte, lower is better"
    y = alt.Y("value:Q", title=title, scale=scale)
    dash = alt.StrokeDash("label:N", scale=alt.Scale(domain=labels, range=dashes_of(labels)), legend=None)
    range_ = [*map(color_of, labels)]
    color = alt.Color("label:N", scale=alt.Scale(domain=labels, range=range_), legend=None)
    base = alt.Chart(alt.Data(values=rows)).encode(x, y, color)
    last = sorted((row for row in rows if row["length"] == lengths[-1]), key=lambda row: row["value"])
    gap = GAP * (high - low) / HEIGHT
    ends = [
        row | {"at": at, "name": names_of(kept)[row["label"]]}
        for row, at in zip(last, apart([row["value"] for row in last], gap), strict=True)
    ]
    names = alt.Chart(alt.Data(values=ends)).mark_text(align="left", dx=10, fontSize=13, fontWeight=600)
    name, bits = floor(kept)
    grams = alt.Chart(alt.Data(values=[{"length": lengths[-1], "value": bits, "words": name}]))
    mark = alt.Chart(alt.Data(values=[{"length": trained, "value": high, "words": f"trained at {trained}"}]))
    layers = [
        mark.mark_rule(color=GREY, strokeDash=[4, 4]).encode(alt.X("length:Q")),
        mark.mark_text(align="left", dx=6, dy=8, color=GREY, fontSize=12).encode(x, y, text="words:N"),
        grams.mark_rule(color=GREY, strokeDash=[1, 3]).encode(y),
        grams.mark_text(align="right", dx=-6, dy=-7, color=GREY, fontSize=12).encode(x, y, text="words:N"),
        base.mark_area(opacity=0.15).encode(alt.Y("seed_low:Q", title=title), alt.Y2("seed_high:Q")),
        base.mark_line(strokeWidth=2.4).encode(dash),
        base.mark_circle(size=46, opacity=1),
        names.encode(x, alt.Y("at:Q", title=title), color, text="name:N"),
    ]
    return themed(
        alt.layer(*layers).properties(width=WIDTH, height=HEIGHT),
        padding={"left": 5, "top": 12, "right": 30, "bottom": 5},
    )


def write() -> None:
    """Both; the dark one is the other in the colors of dark pages."""
    drawn = chart(newest("study"))
    for path, dark in FILES.items():
        save(drawn, path)
        svg = path.read_text(encoding="utf-8")
        if dark:
            svg = re.sub("|".join(DARK), lambda color: DARK[color[0]], svg)
        path.write_text(
            described(svg, TITLE, described_chart(newest("study")), path.stem).rstrip() + "\n", encoding="utf-8"
        )


def differing() -> list[str]:
    """The files that were drawn from other numbers; by the words in them, as bytes depend on fonts and releases."""
    expected = f">{escape(described_chart(newest('study')))}</desc>"
    return [path.name for path in FILES if not path.exists() or expected not in path.read_text(encoding="utf-8")]


if __name__ == "__main__":
    write()
