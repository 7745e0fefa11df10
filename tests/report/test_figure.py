"""A figure in a notebook, and what goes with it into a page."""

import re

import altair as alt
import pytest

from longitude.report.figure import DARK, ORDERED, Figure, _javascript, ordered, themed


@pytest.mark.slow
def test_a_notebook_shows_a_figure_with_its_words() -> None:
    values = [{"a": 0, "b": 0}, {"a": 1, "b": 2}]
    base = alt.Chart(alt.Data(values=values)).encode(alt.X("a:Q"), alt.Y("b:Q"))
    words = "A line from 0 & 0 to <2>."
    chart = themed(alt.layer(base.mark_line(), base.mark_text(text="of the pointer", opacity=0)))
    figure = Figure(name="rises", title="It rises", caption="Two points.", alt=words, chart=chart)
    data, about = figure._repr_mimebundle_()
    assert data["text/plain"] == words and about == {"image/svg+xml": {"alt": words}}
    picture = data["image/svg+xml"]
    assert re.match(r'<svg [^>]*role="img" aria-labelledby="rises-title rises-desc">', picture)
    assert '<title id="rises-title">It rises</title>' in picture
    assert '<desc id="rises-desc">A line from 0 &amp; 0 to &lt;2&gt;.</desc>' in picture
    assert "of the pointer" not in picture


@pytest.mark.parametrize("dark", [False, True])
def test_an_ordered_palette_has_one_direction(dark):
    """Each of its colors is lighter than the one before, on white and on black."""

    def light(color):
        channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))

    for count in (2, 4, len(ORDERED)):
        colors = ordered(count)
        assert len({*colors}) == count
        lightness = [light(DARK[each] if dark else each) for each in colors]
        assert lightness == sorted(lightness)


@pytest.mark.slow
def test_the_notice_of_what_draws_charts_goes_with_it() -> None:
    """Its licences ask for it, and the bundle has none."""
    for notice in ("University of Washington Interactive Data Lab", "Mike Bostock"):
        assert notice in _javascript()[:5000]
