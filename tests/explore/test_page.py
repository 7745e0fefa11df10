"""The page as a file, and as readers use it."""

import json
import re

import pytest

from longitude.cli import verbs
from longitude.positions.base import list_encodings
from longitude.show.build import built
from longitude.show.encodings import drawings
from longitude.show.shape import Shape

CHOICES = """(name) => {
    const { stops, choices, several } = CONTROLS[name];
    const every = stops ? stopsOf(name) : choices ? namesOf(choices) : [several, [], [several[0]]];
    return stops && every.length > 12 ? [every[0], every[6], every.at(-1)] : every;
}"""
DRAWN = """() => [["path", "d"], [".see", "textContent"]].map(([which, what]) =>
    [...document.querySelectorAll(which)].map((each) => each[what] ?? each.getAttribute(what)).join(" "))"""
LOOKS = [(width, scheme) for width in (1280, 360) for scheme in ("light", "dark")]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("no/such/folder/x.html", "expected a file in a folder that exists"),
        ("x.svg", "--out x.svg: expected a name that ends in .html"),
    ],
)
def test_wrong_use_is_one_line(out, reason, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, err = command("explore", "--out", out)
    assert code == 2 and printed == "" and err.count("\n") == 1 and reason in err
    assert not list(tmp_path.iterdir())


def test_the_verb_is_there():
    assert "explore" in verbs()


@pytest.mark.slow
def test_one_small_file_that_asks_for_nothing(written):
    text = written.read_text()
    assert len(text) < 1.5e6
    assert not re.search(r"<(script|img|link|iframe)[^>]*(src|href)=.?http|@import|fetch\(|XMLHttp", text)


@pytest.mark.slow
def test_an_existing_file_is_replaced(command, tmp_path, monkeypatch):
    import longitude.explore.page as page

    monkeypatch.setattr(page, "ahead", lambda: {"encodings": [], "configs": {}})
    out = tmp_path / "explore.html"
    out.write_text("an older page")
    code, printed, err = command("explore", "--out", out)
    assert code == 0 and printed == "" and str(out) in err and "an older page" not in out.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["explore.html"]


@pytest.mark.slow
def test_what_is_ahead_of_time_is_what_the_classes_draw(written):
    """Each encoding that has a picture, and its numbers to four digits."""
    ahead = json.loads(re.search(r'id="ahead">(.*?)</script>', written.read_text(), re.DOTALL)[1])
    labels = [each["label"] for each in ahead["encodings"]]
    assert labels == [name for name in list_encodings() if name not in ("none", "sink")]  # nothing to draw
    for each in ahead["encodings"]:
        assert each["formula"] and each["source"]
    for name in ("alibi", "t5", "rope", "sinusoidal"):
        shape = Shape(length=256)
        [ours] = (each["drawings"]["256"] for each in ahead["encodings"] if each["label"] == name)
        for page, own in zip(ours, drawings(built(name, shape).encoding, shape), strict=True):
            assert (page["name"], page["title"]) == (own.name, own.title)
            if "lines" in page:
                for line in page["lines"]:
                    x, y = own.lines[line["name"]]
                    known = dict(zip(map(float, x), map(float, y), strict=True))
                    assert line["y"] == pytest.approx([known[at] for at in line["x"]], rel=1e-3)
            else:
                for row, values in zip(page["values"], own.values, strict=True):
                    assert row == pytest.approx(list(values), rel=1e-3)


# ---- in a browser ----------------------------------------------------------------------------------------------------
def slide(page, panel, name, key="ArrowRight"):
    page.locator(f"#{panel} [data-name={name}] input").press(key)


@pytest.mark.slow
@pytest.mark.browser
def test_a_slider_moves_the_curve_and_the_address(opened):
    page = opened()
    line = page.locator("#compare .picture .line.c1")
    before = line.get_attribute("d")
    slide(page, "compare", "head")
    page.wait_for_function(
        "([d]) => document.querySelector('#compare .picture .line.c1').getAttribute('d') !== d", arg=[before]
    )
    assert (
        page.evaluate("location.hash") == "#head=4" and "its head 4 to" in page.locator("#compare .see").text_content()
    )
    slide(page, "rotation", "base", "Home")
    page.wait_for_function(
        "document.querySelector('#scores [data-name=base] output').textContent === '10'"
    )  # one base for all panels


@pytest.mark.slow
@pytest.mark.browser
def test_an_address_is_a_view_and_what_it_gets_wrong_is_named(opened):
    page = opened(address="#compared=alibi%2Csandwich&heads=12&head=9&scheme=yarn&erratum=ramp&encoding=t5")
    assert page.locator("#compare [data-name=head] output").text_content() == "9"
    assert page.locator("#compare .key li").count() == 2 and page.locator("#address").is_hidden()
    assert (
        page.locator("#errata select").input_value() == "ramp"
        and "buckets" in page.locator("#drawn .formula").text_content()
    )
    page = opened(address="#head=3&heads=1e9&color=red&scheme=yarm&compared=alibi,nope")
    said = page.locator("#address").text_content()
    assert (
        all(part in said for part in ("heads=1e9", "color=red", "scheme=yarm", "compared=alibi,nope"))
        and "head=3" not in said
    )


@pytest.mark.slow
@pytest.mark.browser
def test_every_choice_of_every_panel_draws(opened):
    """Ends and middles of all sliders, all options: complaints of the browser fail, and so does a number that is none."""
    page = opened()
    for name in page.evaluate("Object.keys(CONTROLS)"):
        for value in page.evaluate(CHOICES, name):
            page.evaluate("([name, value]) => set(name, value)", [name, value])
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            drawn, words = page.evaluate(DRAWN)
            assert "NaN" not in drawn, (name, value)
            assert not re.search("NaN|undefined|Infinity|null", words), (name, value, words)
        page.evaluate("(name) => set(name, CONTROLS[name].start)", name)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_anyone_can_read_it(width, scheme, opened):
    """No violations that axe finds, tables open, a config read and one refused; nothing is cut off at the right."""
    from axe_playwright_python.sync_playwright import Axe

    page = opened(width, scheme)
    page.get_by_role("button", name="Gemma 3 4B").click()
    page.locator("details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.locator("#config textarea").fill("no")
    assert Axe().run(page).violations_count == 0


@pytest.mark.slow
@pytest.mark.browser
def test_charts_have_words_and_their_numbers(opened):
    page = opened()
    charts = page.locator(".picture > svg")
    assert charts.count() >= 8
    for alt in charts.evaluate_all(
        "(all) => all.map((each) => [each.getAttribute('role'), each.getAttribute('aria-label')])"
    ):
        assert alt[0] == "img" and re.match(r"(Line chart|Heat map): .{20}", alt[1])
    page.locator("#compare summary").click()
    rows = page.locator("#compare tbody tr")
    assert rows.first.inner_text().split() == ["0", "0", "0", "0"] and rows.count() > 100


@pytest.mark.slow
@pytest.mark.browser
def test_the_keyboard_reaches_everything(opened):
    """Every control in its order by Tab alone; a select and a check box answer to it."""
    page = opened()
    controls = "#compare input, #compare select"
    wanted = page.locator(controls).evaluate_all("(all) => all.filter((each) => each.offsetParent).length")
    reached = set()
    for _ in range(wanted + 3):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"[...document.querySelectorAll('{controls}')].indexOf(document.activeElement)"))
    assert len(reached - {-1}) == wanted
    page.locator("#compare input[value=sandwich]").focus()
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelectorAll('#compare .key li').length === 4")
