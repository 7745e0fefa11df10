"""The page as a file, its numbers against formulas of the papers, and as readers use it."""

import json
import re

import pytest
import torch

import longitude as lg
from longitude import explore
from longitude.explore import values
from longitude.positions.base import list_encodings
from tests.study.test_report import launched

BOTH = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    explore.write(path)
    return path


def grids(page):
    """All rows of numbers of each chart."""
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    return {name: [row for rows in spec["datasets"].values() for row in rows] for name, spec in charts.items()}


def only(rows, **what):
    [row] = [row for row in rows if all(row.get(key) == value for key, value in what.items())]
    return row


@pytest.mark.parametrize("out", ["no/such/folder/x.html", "x.svg"])
def test_wrong_use_is_one_line(out, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, err = command("explore", "--out", out)
    assert code == 2 and printed == "" and err.count("\n") == 1 and out in err
    assert not list(tmp_path.iterdir())


def test_shares_of_pairs_at_new_angles():
    """A pair meets new angles at s times the length if it never finished a rotation, unless it became s times slower."""
    rows = [*values.unseen()]
    theta = 10_000.0 ** -(torch.arange(64).double() / 64)
    never = float((4096 * theta < 2 * torch.pi).double().mean())
    for factor in (2, 4, 8, 16):
        assert only(rows, scheme="none", factor=factor)["share"] == pytest.approx(never)
        assert only(rows, scheme="linear", factor=factor)["share"] == 0
        assert {*only(values.pairs(), scheme="linear", factor=factor)["slower"]} == {factor}


def test_dials_are_the_angles_of_a_pair_at_each_length():
    theta = 10_000.0 ** -(torch.arange(64).double() / 64)
    turns = 4096 * theta / (2 * torch.pi)
    for row in values.clocks():
        assert row["seen"] == pytest.approx(turns.clamp(max=1).tolist(), rel=1e-3)
        if row["scheme"] in ("none", "linear"):
            longer = turns * (row["factor"] if row["scheme"] == "none" else 1)
            assert row["asked"] == pytest.approx(longer.clamp(max=1).tolist(), rel=1e-3)


@pytest.mark.slow
def test_one_small_file_that_asks_for_nothing(written):
    text = written.read_text()
    assert len(text) < 2e6
    assert not re.search(r"<(script|img|link|iframe)[^>]*(src|href)=.?http|@import", text)


@pytest.mark.slow
def test_every_encoding_and_its_numbers_are_there(written):
    found = grids(written)
    for chart in ("compare", "weights"):
        assert {row["name"] for row in found[chart] if "name" in row} == {*list_encodings()}
    bias = only(found["compare"], name="alibi", line="head 2")
    assert bias["y"][:50] == pytest.approx([-(2.0**-4) * x for x in bias["x"][:50]], rel=1e-3)  # slopes 2^(-8h/4)
    weights = only(found["weights"], name="log_n", factor=16, line="every head")
    assert weights["y"] == pytest.approx([1 / 2048] * len(weights["y"]), rel=1e-3)
    for name, scaling in {"linear": lg.scaling.Linear(8.0), "yarn": lg.scaling.YaRN(8.0, 4096)}.items():
        after = lg.rope_frequencies(128, base=10_000.0, scaling=scaling).inverse
        row = only(found["wavelengths"], scheme=name, factor=8)
        assert row["positions"] == pytest.approx((2 * torch.pi / after).tolist(), rel=1e-3)


# ---- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture
def opened(written):
    """(width, scheme, the address after #) -> the page; requests and complaints of the browser fail the test."""
    from playwright.sync_api import sync_playwright

    wrong = []
    with sync_playwright() as playwright:
        browser = launched(playwright)

        def open_(width=1280, scheme="light", address=""):
            page = browser.new_page(viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme)
            page.on("request", lambda request: request.url.startswith(written.as_uri()) or wrong.append(request.url))
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(written.as_uri() + address)
            page.wait_for_function("document.querySelectorAll('.chart.drawn').length === 6")
            return page

        yield open_
        browser.close()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), BOTH)
def test_anyone_can_read_it(width, scheme, opened):
    """No violations that axe finds outside the charts of Vega; nothing is cut off at the right."""
    from axe_playwright_python.sync_playwright import Axe

    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page, context={"exclude": [".vega-embed"]})
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.slow
@pytest.mark.browser
def test_controls_move_the_charts_by_keyboard_and_stand_in_the_address(opened):
    page = opened(address="#first=t5&second=unknown&scheme=llama3")
    assert page.locator("#first").input_value() == "t5" and page.locator("#second").input_value() == "alibi"
    drawn = "() => [...document.querySelectorAll('.chart svg .mark-line path')].map((each) => each.getAttribute('d')).join()"
    for control, key in (
        ("#first", "ArrowDown"),
        ("#second", "ArrowUp"),
        ("#scheme", "End"),
        ("#doublings", "ArrowRight"),
    ):
        before = page.evaluate(drawn)
        page.locator(control).press(key)
        page.wait_for_function(f"(before) => ({drawn})() !== before", arg=before)
    assert "doublings=3" in page.evaluate("location.hash") and "8×" in page.locator("output").text_content()


@pytest.mark.slow
@pytest.mark.browser
def test_an_arrow_chooses_an_encoding_of_its_place(opened):
    page = opened()
    assert {*explore.PLACES.values()} <= {*list_encodings()}
    for name in explore.PLACES.values():
        page.locator(f"a[href='#first={name}']").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("(name) => document.getElementById('first').value === name", arg=name)
        assert page.locator(f"article[data-of=first][data-name={name}]").is_visible()
        assert "second=alibi" in page.evaluate("location.hash")


@pytest.mark.slow
@pytest.mark.browser
def test_every_choice_draws(opened):
    page = opened()
    for name in list_encodings():
        page.locator("#first").select_option(name)
        page.wait_for_timeout(50)
        assert page.locator(f"article[data-of=first][data-name={name}]").is_visible()
    assert "NaN" not in page.locator("main").inner_html()
