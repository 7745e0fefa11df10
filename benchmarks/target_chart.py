"""The chart of a set of targets: a row per target with its limit, our measurements, those of others, and the worst of ours."""

from typing import Any

import altair as alt

from charts import STEP, chart_title, name_axis, point, ratio_axis, ratio_domain, styled
from longitude.bench.rows import Row
from longitude.report.figure import COLORS, GREY, INK
from longitude.report.wording import count

KEPT, BROKEN, PEER = "Longitude, target kept", "Longitude, target missed", "other libraries"
WIDTH = 660


def chart(measured: dict[str, Any]) -> Any:
    targets = {target["name"]: target for target in measured["targets"]}
    rows = [Row(**row) for row in measured["rows"]]
    points = []
    for row in rows:
        score = row.ratio if row.score is None else row.score
        if row.kind != "plain" and score is not None and score > 0:
            whose = PEER if row.kind == "peer" else KEPT if score <= targets[row.group]["limit"] else BROKEN
            points.append(point(row) | {"target": row.group, "whose": whose, "ratio": score})
    lines = [
        {
            "target": name,
            "ratio": target["limit"],
            "worst": "-" if target["measured"] is None else f"{target['measured']:.2f}",
            "promise": f"≤ {target['limit']:.2f} of {target['of']}",
        }
        for name, target in targets.items()
    ]
    x = ratio_axis("times what it is compared with", ratio_domain([each["ratio"] for each in (*points, *lines)]))
    y, kinds = name_axis("target", [*targets], 360), [KEPT, BROKEN, PEER]
    color = alt.Color(
        "whose:N",
        title=None,
        scale=alt.Scale(domain=kinds, range=[COLORS[0], COLORS[1], "#9aa3ad"]),
        legend=alt.Legend(orient="bottom", symbolType="circle"),
    )
    shape = alt.Shape("whose:N", scale=alt.Scale(domain=kinds, range=["circle", "circle", "diamond"]), legend=None)
    tooltip = [*(f"{name}:N" for name in ("name", "backend", "pass", "length")), alt.Tooltip("ratio:Q", format=".2f")]
    base, data = alt.Chart(alt.Data(values=points)), alt.Chart(alt.Data(values=lines)).encode(y)
    layers = [
        base.mark_point(filled=True, size=52, opacity=0.75).encode(x, y, color=color, shape=shape, tooltip=tooltip),
        data.mark_tick(thickness=2.5, size=STEP * 0.8, color=INK).encode(x),
        data.mark_text(align="right", fontSize=12, fontWeight=600, color=INK).encode(
            text="worst:N", x=alt.value(WIDTH + 44)
        ),
        data.mark_text(align="left", fontSize=12, color=GREY).encode(text="promise:N", x=alt.value(WIDTH + 56)),
    ]
    title = chart_title(
        "Performance targets, and the measured ratios",
        f"Bars: targets. Dots: medians of turns in one process, {count(rows[0].threads, 'thread')}. Numbers: our slowest case.",
    )
    return styled(alt.layer(*layers).properties(width=WIDTH, height=(STEP + 4) * len(targets), title=title))
