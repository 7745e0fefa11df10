"""The picture of what encodings cost, on every machine that measured: docs/machines.svg and docs/machines-dark.svg.

python benchmarks/draw_machines.py            # write both
python benchmarks/draw_machines.py --check    # exit code 1 where one has other numbers than the results
"""

import json
import sys
from typing import Any

import altair as alt

from fill_numbers import every_machine, newest
from longitude.bench.figures import STEP, name_axis, ratio_axis, styled
from longitude.report.figure import COLOURS, GREY, INK
from pictures import Picture

SHOWN = ("plain causal attention", "torch's attention")
"""Promises over these are drawn: the same unit for all."""
WIDTH, SHAPES = 520, ("circle", "square", "triangle-up", "cross")


def results() -> dict[str, dict[str, Any]]:
    """Of every processor, the newest measured last."""
    path = newest("bench")
    assert path is not None
    return every_machine(json.loads(path.read_text(encoding="utf-8")))


def limits(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Promise -> what it may take at most."""
    last = [*found.values()][-1]
    return {target["name"]: target["limit"] for target in last["targets"] if target["of"] in SHOWN}


def measured(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst number of each promise on each machine."""
    names = limits(found)
    return [
        {"promise": target["name"], "machine": machine, "ratio": target["measured"]}
        for machine, one in found.items()
        for target in one["targets"]
        if target["name"] in names and target["measured"] is not None
    ]


def others(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest and the slowest of other libraries, on the machine that measured last."""
    scores: dict[str, list[float]] = {}
    for row in [*found.values()][-1]["rows"]:
        if row["kind"] == "peer" and row["group"] in limits(found) and row["ratio"]:
            scores.setdefault(row["group"], []).append(row["ratio"])
    return [{"promise": name, "ratio": min(own), "high": max(own)} for name, own in scores.items()]


def words(found: dict[str, dict[str, Any]]) -> str:
    rows, lines = measured(found), []
    for name, limit in limits(found).items():
        own = ", ".join(f"{row['ratio']:.2f} on {row['machine']}" for row in rows if row["promise"] == name)
        lines.append(f"{name}, at most {limit:.2f}: {own}")
    lines += [
        f"other libraries, {each['promise']}: {each['ratio']:.1f} to {each['high']:.1f}" for each in others(found)
    ]
    return (
        f"Dots of time over torch's attention without an encoding, the worst case of each promise. {'; '.join(lines)}."
    )


def chart(found: dict[str, dict[str, Any]]) -> Any:
    """A row for each promise: its limit, a dot for each machine, a bar for other libraries."""
    rows, names = measured(found), limits(found)
    peers, machines = others(found), [*found]
    spans = [peer | {"high": max(peer["high"], 1.03 * peer["ratio"])} for peer in peers]  # one library is seen, too
    ends = [*names.values(), *(row["ratio"] for row in rows), *(peer["high"] for peer in peers)]
    x = ratio_axis("times torch's attention without an encoding", [min(ends) / 1.1, max(ends) * 1.1])
    y = name_axis("promise", [*names], 340)
    legend = alt.Legend(orient="bottom", columns=1, labelLimit=340)
    colour = alt.Color("machine:N", title=None, scale=alt.Scale(domain=machines, range=list(COLOURS)), legend=legend)
    shape = alt.Shape("machine:N", title=None, scale=alt.Scale(domain=machines, range=list(SHAPES)), legend=legend)
    promises = alt.Chart(alt.Data(values=[{"promise": name, "ratio": limit} for name, limit in names.items()]))
    bars = alt.Chart(alt.Data(values=spans))
    layers = [
        alt.Chart(alt.Data(values=[{"ratio": 1}])).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x),
        bars.mark_bar(color=GREY, opacity=0.35, height=6).encode(x, y, x2="high:Q"),
        bars.mark_text(align="left", dx=4, color=GREY, fontSize=11).encode(
            alt.X("high:Q"), y, text=alt.value("others")
        ),
        promises.mark_tick(thickness=2.5, size=STEP * 0.8, color=INK).encode(x, y),
        alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=60, opacity=0.85).encode(x, y, colour, shape),
    ]
    return styled(alt.layer(*layers).properties(width=WIDTH, height=(STEP + 4) * len(names)))


MACHINES = Picture("machines", "What a position encoding costs", results, chart, words)

if __name__ == "__main__":
    sys.exit(MACHINES.main())
