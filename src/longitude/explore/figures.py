"""The charts of the page. Each has its whole grid of numbers, and the controls of the page choose what it draws."""

from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from typing import Any

import altair as alt
import pandas as pd

from longitude.explore import values
from longitude.report.figure import COLORS, EDGE, GREY, INK, Figure, ordered, themed
from longitude.show.charts import dials_chart, dials_page

HEIGHT, PANEL_WIDTH = 260, 360
HERE = "datum.factor == pow(2, doublings)"
"""A row of the context length that the slider is at."""
PAIRS = alt.X("pair:Q", title="rotary pair", axis=alt.Axis(grid=False, tickCount=8))
ROPE = f"{values.ROPE.trained:,} tokens, {values.ROPE.head_dim} dimensions per head and base 10,000, as in Llama 2"
Rows = Sequence[dict[str, Any]]


def figures(encodings: Rows) -> Iterator[Figure]:
    """All charts of the page; encodings: `values.encodings()`."""
    own = [{key: each[key] for key in ("name", "axes")} | line for each in encodings for line in each["lines"]]
    names = {each["name"]: each["paper"] for each in encodings}
    yield Figure(
        name="compare",
        title="What each encoding does with distance",
        caption=f"Two encodings side by side, with {values.DRAWN.heads} heads. The text below each chart says what it shows.",
        alt="Line charts of the two chosen encodings by distance. `longitude show NAME --json` prints the numbers.",
        chart=_two(own, names, None, f"{values.DRAWN.length}", alt.Scale(zero=False, nice=False)),
        resizes=False,
    )
    log = alt.Scale(type="log", domain=[values.FLOOR, 1])
    yield Figure(
        name="weights",
        title="Where attention looks when all keys are alike",
        caption="Weights of the last query in a context of the chosen length, on a log scale: what position alone prefers. The "
        f"dashed line is the training length, {values.TRAINED} tokens. What is only learned has no lines before training.",
        alt="Line charts of the weights of attention by distance, for the two chosen encodings at the chosen length.",
        chart=_two([*values.attention()], names, HERE, f"{values.TRAINED} * pow(2, doublings)", log),
        resizes=False,
    )
    turned, pairs, unseen = [*values.clocks()], [*values.pairs()], [*values.unseen()]
    dials, chosen = len(turned[0]["dial"]), f"{HERE} && datum.scheme == scheme"
    arcs = _lines(turned, chosen, "dial", "seen", "asked")
    yield Figure(
        name="clocks",
        title="RoPE as clocks: angles that training showed, and new ones",
        caption=f"A dial for each rotary pair of a model trained at {ROPE}. On it are the angles between a query and its keys: "
        "in training, and in a context of the chosen length under the chosen method.",
        alt="A dial for each rotary pair; the table of shares of pairs below tells how many meet new angles.",
        chart=themed(_controlled(dials_page(dials_chart(arcs, dials), dials))),
        table=_arcs(turned),
    )
    yield Figure(
        name="wavelengths",
        title="RoPE: positions of one full rotation, by pair",
        caption=f"A model trained at {ROPE}. A pair above the lower dashed line never finished a rotation in training. The upper "
        "dashed line is the context length.",
        alt="Line chart of the wavelength of each rotary pair, without scaling and with the chosen method.",
        chart=themed(_wavelengths(pairs)),
    )
    yield Figure(
        name="slowed",
        title="RoPE: how many times slower each pair rotates, by scaling method",
        caption="Frequencies without scaling over those with it, at the chosen length. The chosen method is drawn thick. "
        "Methods that need more than a factor, such as LongRoPE, are not drawn.",
        alt="Line chart of how many times slower each rotary pair rotates, one line for each scaling method.",
        chart=themed(_slowed(pairs)),
    )
    shares = pd.DataFrame(unseen).pivot_table(index="scheme", columns="factor", values="share", sort=False)
    yield Figure(
        name="unseen",
        title="RoPE: how many pairs meet angles that training never showed",
        caption="The share of rotary pairs at new angles in the chosen context, by scaling method. Lower is safer.",
        alt="Bar chart of the share of rotary pairs at unseen angles, one bar for each scaling method.",
        chart=themed(_unseen(unseen)),
        table=shares.map("{:.0%}".format).rename(columns="{}x the length".format).reset_index(),
    )


def _control(name: str, value: Any) -> Any:
    """A parameter that the element of the page with this id decides: all charts with the same one move together."""
    return alt.param(name=name, value=value, bind=alt.BindDirect(element=f"#{name}"))


def _controlled(chart: Any) -> Any:
    """By the length and the scaling method."""
    return chart.add_params(_control("doublings", 2), _control("scheme", values.NO_SCHEME))


def _rotary(chart: Any) -> Any:
    return _controlled(chart).properties(height=HEIGHT)


def _lines(rows: Rows, which: str, *columns: str) -> Any:
    """The points of the rows that a condition chooses; each row has a whole line."""
    kept = [{key: value for key, value in row.items() if key in columns or not isinstance(value, list)} for row in rows]
    return alt.Chart(alt.InlineData(values=kept)).transform_filter(which).transform_flatten([*columns])


def _arcs(rows: Rows) -> pd.DataFrame:
    """Shares of the circle of each pair at the longest context, and in training."""
    last = [row for row in rows if row["factor"] == values.FACTORS[-1]]
    columns = {f"{row['scheme']}, {values.FACTORS[-1]}x the length": row["asked"] for row in last}
    return pd.DataFrame({"pair": last[0]["dial"], "training": last[0]["seen"], **columns})


def _color(field: str, columns: int) -> alt.Color:
    legend = alt.Legend(orient="bottom", columns=columns)
    return alt.Color(field, title=None, sort=None, scale=alt.Scale(range=[*COLORS]), legend=legend)


def _hues(of: Mapping[str, Sequence[str]]) -> alt.Scale:
    """Colors of all lines: of heads in their order, of others by their place in their encoding; of: its lines."""
    heads = {f"head {head}": color for head, color in enumerate(ordered(values.DRAWN.heads), 1)}
    others = {line: color for lines in of.values() for line, color in zip(lines, COLORS, strict=False)} | heads
    return alt.Scale(domain=[*others], range=[*others.values()])


def _dashed(rows: Rows, **at: Any) -> Any:
    """Rules at the numbers of some rows."""
    return alt.Chart(alt.InlineData(values=[*rows])).mark_rule(strokeDash=[4, 4], color=GREY).encode(**at)


def _two(rows: Rows, names: Mapping[str, str], also: str | None, end: str, scale: alt.Scale) -> Any:
    """A panel for each of the two chosen encodings.

    Args:
        rows: Lines with the registered name of their encoding.
        names: Registered name -> the paper's name.
        also: A condition for rows besides.
        end: An expression of the last offset.
        scale: Scale of what is drawn.
    """
    of: dict[str, list[str]] = {}
    for row in rows:
        if row["line"] not in of.setdefault(row["name"], []):
            of[row["name"]].append(row["line"])
    hues = _hues(of)
    panels, above = [], {"y": alt.value(-12)}
    for chosen in ("first", "second"):
        which = " && ".join(filter(None, [f"datum.name == {chosen}", also]))
        axis = alt.Axis(grid=False, tickCount=6)
        x = alt.X("x:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, alt.ExprRef(end)], nice=False))
        y = alt.Y("y:Q", title=None, axis=alt.Axis(format="~e" if also else "~g", tickCount=5), scale=scale)
        legend = alt.Legend(orient="bottom", columns=2, values=alt.ExprRef(f"({dumps(of)})[{chosen}]"))
        color = alt.Color("line:N", title=None, scale=hues, legend=legend)
        lines = _lines(rows, which, "x", "y").encode(x, y, color, tooltip=["line:N", "x:Q", "y:Q"])
        parts = [lines.mark_line(strokeWidth=1.8, clip=True), lines.mark_point(opacity=0, size=60)]
        title = alt.ExprRef(f"({dumps(names)})[{chosen}]")
        heading = alt.Chart(alt.InlineData(values=[{}])).encode(x=alt.value(0), **above)
        parts.append(heading.mark_text(align="left", fontWeight=600, fontSize=13, color=INK, text=title))
        if also is None:
            axes = {row["name"]: row["axes"] for row in rows}
            named = [{"name": name, "axes": each} for name, each in axes.items()]
            label = alt.Chart(alt.InlineData(values=named)).transform_filter(which).mark_text(align="right", color=GREY)
            parts.append(label.encode(x=alt.value("width"), text="axes:N", **above))
        else:
            parts.append(_dashed([{"x": values.TRAINED}], x="x:Q"))
        panels.append(alt.layer(*parts).properties(width=PANEL_WIDTH, height=HEIGHT))
    both = alt.concat(*panels, columns=2, spacing=40).resolve_scale(color="independent")
    return themed(both.add_params(_control("first", "rope"), _control("second", "alibi"), _control("doublings", 2)))


def _wavelengths(rows: Rows) -> Any:
    chosen = f"{HERE} && (datum.scheme == scheme || datum.scheme == '{values.NO_SCHEME}')"
    lines = _lines(rows, chosen, "pair", "positions").mark_line(strokeWidth=1.8)
    axis = alt.Axis(values=[10**power for power in range(7)])
    y = alt.Y("positions:Q", title="positions of one rotation (log scale)", axis=axis, scale=alt.Scale(type="log"))
    lengths = [{"positions": values.ROPE.trained * factor, "factor": factor} for factor in values.FACTORS]
    lines = lines.encode(PAIRS, y, _color("scheme:N", 2), tooltip=["scheme:N", "pair:Q", "positions:Q"])
    return _rotary(alt.layer(lines, _dashed(lengths, y=y).transform_filter(f"{HERE} || datum.factor == 1")))


def _slowed(rows: Rows) -> Any:
    y = alt.Y("slower:Q", title="times slower (log scale)", scale=alt.Scale(type="log", base=2))
    thick = alt.condition("datum.scheme == scheme", alt.value(4), alt.value(1.5))
    tooltip = ["scheme:N", "pair:Q", "slower:Q"]
    lines = _lines(rows, HERE, "pair", "slower").mark_line()
    return _rotary(lines.encode(PAIRS, y, _color("scheme:N", 4), strokeWidth=thick, tooltip=tooltip))


def _unseen(rows: Rows) -> Any:
    x = alt.X("share:Q", title="share of pairs", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    y, tooltip = alt.Y("scheme:N", title=None, sort=None), ["scheme:N", alt.Tooltip("share:Q", format=".0%")]
    color = alt.condition("datum.scheme == scheme", alt.value(COLORS[0]), alt.value(EDGE))
    bars = alt.Chart(alt.InlineData(values=[*rows])).transform_filter(HERE).mark_bar()
    return _rotary(bars.encode(x, y, color=color, tooltip=tooltip))
