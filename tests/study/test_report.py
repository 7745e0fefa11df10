"""The page: whole, alone, true to the rows, safe with any text, and alive in a real browser without a network."""

import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from longitude.report.wording import papers
from longitude.study.analysis import analyse, conclude
from longitude.study.criterion import Cell, Column
from longitude.study.report import table, write_report
from tests.study.conftest import summary, values, write_answers, write_run

NAMES = ("by-length", "one-text", "by-position", "by-length-sliding")
EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)> & </script>'


class Page(HTMLParser):
    """Text of the table cells, of the paragraphs, and every address that the page names."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.addresses, self.tags, self.text, self.open = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open.append(tag)
        fetched = ("src", "href", "action", "data", "srcset") if tag != "a" else ()  # a link waits for a click
        self.addresses += [value for name, value in attributes if name in fetched]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.open or "style" in self.open:
            return
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_run, write_answers])
def test_a_new_column_is_shown_everywhere(write, tmp_path, monkeypatch):
    """It stands in the columns of its criterion and nowhere else: terminal and page read these."""
    analysis = analyse(write(tmp_path))
    kind = type(analysis.criterion)
    column = Column("ninth", lambda lines: Cell(f"ninth of {lines[0].label}", "low to high"))
    columns = kind.every_column
    monkeypatch.setattr(kind, "every_column", lambda self: [*columns(self), column])
    label = analysis.run.labels[0]
    page = write_report(analysis).read_text()
    assert f"ninth of {label} <small>low to high</small>" in page
    assert next(str(cell) for cell in table(analysis).columns[-1].cells).startswith("ninth of")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything in it, its report written; tests read only."""
    path = tmp_path_factory.mktemp("run")
    states = {("sinusoidal", 0): {"status": "diverged", "step": 117, "reason": EVIL}}
    methods = ("non-overlapping", "sliding", "per-position")
    write_run(path, states=states, source=EVIL, methods=methods, ngrams={"2": 3.4}, steps=200)
    assert write_report(analyse(path)) == path / "report.html"
    return path


@pytest.fixture(scope="module")
def html(run):
    return (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_text_of_others_is_text(html):
    page = Page(html)
    assert all(address.startswith("data:") for address in page.addresses) and "default-src 'none'" in html
    assert not {"iframe", "object", "base", "form"} & set(page.tags)
    assert not re.search(r"@import|url\(", html.partition("</style>")[0])
    assert len(html) < 1_500_000 and page.tags.count("script") == 4
    assert "".join(page.text).count(EVIL) >= 2  # the source of the text, the reason of the failure
    assert html.count("alert(") == html.count("alert(&#34;x") + html.count("onerror=alert(1)&gt;")


def row_of(names, label):
    """The head of a row: the paper's name, and the label where that is another."""
    return names[label] + (label if names[label] != label else "")


@pytest.mark.slow
def test_page_and_charts_hold_the_numbers_of_the_analysis(run, html):
    page = Page(html)
    text = "".join(page.text)
    spoken = analyse(run)
    spoken = replace(spoken, criterion=spoken.criterion.with_names(papers(spoken.run.labels)))
    assert all(line in text for line in conclude(spoken))
    rows = {row[0]: row[1:] for row in page.rows[1:8]}
    took = next(i for i, row in enumerate(page.rows) if row[1] == "learning rate")
    assert page.rows[took] == ["encoding", "learning rate", "steps", "seconds", "MFLOPs per token"]
    assert [cell.strip() for cell in page.rows[took + 3]] == ["RoPE (base=10000)rope", "0.005", "200", "43.2", "2.35"]
    for found in summary(run).to_dict("records"):
        label, names = found["label"], papers(spoken.run.labels)
        cell = rows["sinusoidaldiverged at step 117" if label == "sinusoidal" else row_of(names, label)]
        shown = cell[(256, 512, 1024, 2048, 4096).index(found["length"]) - 5]  # columns of lengths come last
        if found["value"] is None:
            assert shown == "–"
        else:
            assert shown == f"{found['value']:.3f} {found['low']:.2f} to {found['high']:.2f}"
    verdicts = {label: rows[row_of(names, label)][0] for label in ("rope", "alibi", "learned")}
    assert verdicts == {"rope": "1 of 3 seeds", "alibi": "1 of 3 seeds", "learned": ""}
    comparisons = analyse(run).comparisons["non-overlapping"]
    pairs = [row for row in page.rows if len(row) == 8 and row[3] in ("better", "not decided")]
    shown = [(*row[:3], row[3] == "better") for row in pairs if row[2] in ("256", "4096")]
    of_both = [each for each in comparisons if each.length in (256, 4096)]
    assert shown == [(names[of.better], names[of.worse], str(of.length), of.decided) for of in of_both]
    specs = json.loads(re.search(r'id="charts">(.*?)</script>', html, re.DOTALL)[1])
    assert set(specs) == set(NAMES)
    points = values(specs["by-length"], "line")
    frame = summary(run)
    expected = frame[frame["value"].notna()][["label", "length", "value"]].values.tolist()
    assert [[point["label"], point["length"], point["value"]] for point in points] == expected


# ---- in a browser -----------------------------------------------------------------------------------------------------
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INSTALL = "no Chromium here: install Debian's package, or run `.venv/bin/playwright install --with-deps chromium`"


def launched(playwright, path=CHROMIUM):
    """Chromium of this machine, or Playwright's own. Without one the test is skipped, but fails in CI, which installs it."""
    from playwright.sync_api import Error

    try:
        return playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
    except Error as error:
        if "CI" in os.environ:
            pytest.fail(f"{INSTALL} ({error.message.splitlines()[0]})")
        pytest.skip(INSTALL)


@pytest.fixture
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


def opened(browser, path, width, scheme="light"):
    """The page with the network off, every request and every complaint of the browser noted."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme)
    page = context.new_page()
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.goto(path.as_uri())
    page.wait_for_function(f"document.querySelectorAll('[data-chart] svg.marks').length === {len(NAMES)}")
    return page, requests, complaints


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 420, 360])
def test_a_reader_opens_it_and_points_at_a_number(width, run, browser):
    path = run / "report.html"
    page, requests, complaints = opened(browser, path, width)
    assert requests == [path.as_uri()] and complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    labels = page.locator("[data-chart=by-length] svg .mark-text.role-mark text")
    sides = "e => e.map(e => e.getBoundingClientRect()).map(b => [b.left, b.right, b.top, b.bottom])"
    boxes = [*dict.fromkeys(map(tuple, labels.evaluate_all(sides)))]  # words on lines are drawn twice: their edge first
    # six labels, and the names of the training length and of the n-grams; on narrow screens the legend has the labels
    assert len(boxes) == (8 if width > 480 else 1)
    for i, (left, right, top, bottom) in enumerate(boxes):
        assert left >= 0 and right <= width
        for other in boxes[:i]:
            apart = left >= other[1] or other[0] >= right or top >= other[3] - 3 or other[2] >= bottom - 3
            assert apart, "two labels lie on each other"
    found = summary(run).query("label == 'rope' and length == 4096").iloc[0]
    place = page.locator("[data-chart=by-length] svg .mark-symbol path[aria-label*='rope']").last
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    text = tooltip.inner_text()
    for words in ("rope", "4096", f"{found['value']:.3f}", f"{found['low']:.3f} to {found['high']:.3f}"):
        assert words in text
    page.evaluate("document.querySelectorAll('details.fold').forEach(each => { each.open = true; })")
    button = page.locator(".legend button[data-label=alibi]")
    button.click()
    drawn = "document.querySelectorAll('[data-chart=by-length] svg .mark-line path').length"
    page.wait_for_function(f"{drawn} === 1")
    rows = page.locator("tbody tr[data-label]:visible")  # of lengths, twice, of what was learned and what training took
    assert rows.count() == 4
    assert button.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    page.wait_for_function(f"{drawn} === 6")
    assert requests == [path.as_uri()] and complaints == []


UNREADABLE = """() => {
  const every = (selector) => [...document.querySelectorAll(selector)], found = [];
  const called = (e) => e.getAttribute("aria-label") || e.textContent.trim();
  const levels = every("h1, h2, h3").map((e) => Number(e.tagName[1]));
  if (levels.some((level, i) => level > (levels[i - 1] ?? 0) + 1)) found.push("a heading skips a level");
  if (document.documentElement.lang !== "en") found.push("no language");
  if (every("[tabindex]").some((e) => e.tabIndex > 0)) found.push("an order of its own for the keyboard");
  const ids = every("[id]").filter((e) => !e.closest("svg")).map((e) => e.id);
  if (new Set(ids).size < ids.length) found.push("two elements with one id");
  for (const e of every("button, a, summary, [role=region], [role=group]")) if (!called(e)) found.push("no name: " + e.outerHTML);
  for (const e of every("img")) if (!e.alt) found.push("no text for an image");
  for (const e of every("th")) if (!e.scope) found.push("a head of neither row nor column: " + e.textContent);
  for (const e of every("figure")) {
    const name = e.querySelector("h2").id;
    if (!e.querySelector("[role=graphics-document]")?.ariaLabel) found.push(name + " has no description");
    if (!e.querySelector("table") && !e.nextElementSibling?.querySelector("table")) found.push(name + " has no table");
  }
  return found;
}"""
"""What a screen reader or a keyboard does not reach, of a page whose charts are drawn."""


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_the_dark_on_a_phone_on_paper_and_read_aloud(run, browser):
    page, _, complaints = opened(browser, run / "report.html", 420, scheme="dark")
    background, text = "getComputedStyle(document.body).backgroundColor", "getComputedStyle(document.body).color"
    assert page.evaluate(background) == "rgb(18, 23, 29)" and page.evaluate(text) == "rgb(230, 235, 240)"
    charts = page.content().partition('id="charts"')[0]
    assert not re.search(r'fill="(#5b6673|#ffffff|white|#0072b2)"', charts)  # no color of the light page is drawn
    described = page.locator("[data-chart] [role=graphics-document][aria-label]")
    assert described.count() == len(NAMES)
    assert "Line chart of bits per byte" in described.first.get_attribute("aria-label")
    verdict = page.locator(".verdict").first.bounding_box()
    assert verdict["x"] + verdict["width"] <= 420  # seen without scrolling
    assert page.evaluate(UNREADABLE) == []
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 688, "height": 1000})  # the text of A4
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    tables = page.evaluate("[...document.querySelectorAll('table')].map(e => e.getBoundingClientRect().right)")
    assert max(tables) <= 688
    page.pdf()
    assert page.locator(".fold[open] dl").first.is_visible()  # the whole recipe
    assert page.locator(".chart img:visible").count() == len(NAMES)
    assert page.locator(".live:visible, .legend:visible").count() == 0
    assert complaints == []
