"""The site: whole, made without a warning or a network, searched offline, read by everybody."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import longitude as lg
import make_gallery
import make_laws
import make_pages
import make_site
from longitude.attention.mixer import MIXERS
from longitude.positions.base import ENCODINGS
from make_words import as_rst
from tests.study.test_report import launched

PAGES = (
    "index",
    "gallery",
    "encodings/rope",
    "mixers/hierarchical",
    "api",
    "api/attention",
    "claims",
    "search",
    "choose",
)
NOTEBOOK, PROSE = "examples/1-relative-encodings", "concepts/where-position-enters"


# ---- the source --------------------------------------------------------------------------------------------------------
def test_links_to_files_are_those_of_the_site() -> None:
    root, page = make_site.ROOT, make_site.DOCS / "guides" / "own.md"
    places = {root / "CONTRIBUTING.md": Path("CONTRIBUTING.md"), root / "docs/cost.svg": Path("cost.svg")}
    text = "[how](../../CONTRIBUTING.md) [part](../../CONTRIBUTING.md#laws) ![cost](../cost.svg) [web](https://a.b/c)"
    expected = "[how](/CONTRIBUTING.md) [part](/CONTRIBUTING.md#laws) ![cost](/cost.svg) [web](https://a.b/c)"
    assert make_site.linked(text, page, places) == expected
    assert make_site.linked("[code](../../pyproject.toml)", page, places) == "code (`pyproject.toml`)"
    assert make_site.linked("[lost](nowhere.md)", page, places) == "[lost](nowhere.md)"  # Sphinx refuses it
    both = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../cost-dark.svg">
  <img src="../cost.svg" alt="The cost of each.">
</picture>"""
    assert make_site.linked(both, page, places) == "![The cost of each.](/cost.svg)"


def test_every_claim_is_on_the_page_of_its_number() -> None:
    text = Path("docs/claims.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^## (\d+)\w* ", text.partition("## The studies")[0], re.MULTILINE)
    pages = make_site.by_topic(text)
    assert {f"claims/{int(number):02}.md" for number in numbers} == {*pages} - {"claims.md", "claims/studies.md"}
    assert sum(page.count("\n## ") for page in pages.values()) == text.count("\n## ") - 1


def test_names_of_a_table_lead_to_their_pages() -> None:
    row = "| `t5`, `alibi` | `T5Bias` | a `bias` |"
    assert make_site.indexed(row, "encodings") == (
        "| [`t5`](/encodings/t5.md), [`alibi`](/encodings/alibi.md) | `T5Bias` | a `bias` |"
    )


def test_a_small_picture_has_the_lines_of_the_large_one() -> None:
    x, y = np.arange(500.0), np.random.default_rng(0).normal(size=500).cumsum()
    kept = np.array([*make_gallery._thinned(x, y)])
    assert len(kept) < len(x) and np.abs(np.interp(x, *kept.T) - y).max() <= make_gallery.NEAR
    drawn = make_gallery.thumbnail("ALiBi", make_pages.shown("alibi").drawings)
    ends = [float(path.split()[-1]) for path in re.findall(r'd="M([^"]+)"', drawn)]  # of the heads, from steep to flat
    assert len(ends) == 8 and ends == sorted(ends, reverse=True) and ends[0] > ends[-1]


@pytest.mark.parametrize(
    ("plain", "rst"),
    [
        ("-m |i - j|, H_i H_(i-1), x_ and *this*", r"-m \|i - j\|, H_i H\_(i-1), x\_ and \*this\*"),
        ("`attend` of a_b", "``attend`` of a_b"),
        ("* a point", "* a point"),
    ],
)
def test_plain_words_stay_as_they_are(plain: str, rst: str) -> None:
    assert as_rst([plain]) == [rst]


def test_indented_lines_are_code_but_in_sections() -> None:
    lines = ["Words.", "", "    lg.attend(q)  # |x|", "", "Args:", "    q: |x|", "", "    k: y"]
    code = ["::", "", "    lg.attend(q)  # |x|"]
    assert as_rst(lines) == ["Words.", "", *code, "", "Args:", r"    q: \|x\|", "", "    k: y"]


# ---- what a page is made of --------------------------------------------------------------------------------------------
def test_laws_that_are_kept_are_those_of_today() -> None:
    """docs/make_laws.py tries what is lacking; what is kept has its name still, and none is broken."""
    kept = make_laws.read()["found"]
    batteries = {name: {*battery} for name, (_, battery) in make_laws.subjects().items()}
    assert kept.keys() <= batteries.keys() and all({*found} <= batteries[name] for name, found in kept.items())
    statuses = [result["status"] for found in kept.values() for result in found.values()]
    assert "failed" not in statuses and statuses.count("not applicable") > 50
    assert kept["alibi"]["places"]["status"] == "not applicable" and kept["abacus"]["places"]["status"] == "passed"


def test_a_page_has_the_rows_of_its_name() -> None:
    assert make_pages.property_row("learned") == ["0.82", "no", "0.71"]
    tests = [(test, passed) for test, passed, _, _ in make_pages.bench_rows("t5")]
    assert len({*tests}) == len(tests) > 5  # each once, with the range over its lengths
    assert {row["label"] for row in make_pages.decode_rows("window")} == {"window:size=512"}
    assert {row["label"] for row in make_pages.decode_rows("attention")} == {"rope+attention"}
    claims = {row["anchor"]: row for row in make_pages.claim_rows()}
    assert "alibi" in claims["2a-alibi-holds"]["about"] and claims["2a-alibi-holds"]["verdict"].startswith("undecided")
    assert "rope" not in claims["1b-tables-fail"]["about"] and len(claims) > 30


def test_everything_that_is_ours_has_a_text_by_hand() -> None:
    ours = {
        name for kinds in (ENCODINGS, MIXERS) for name, own in kinds.items() if own.__module__.startswith("longitude")
    }
    assert ours == {*make_pages.notes()}


def test_a_label_has_the_options_that_nothing_else_gives() -> None:
    assert make_pages.label_of("window", lg.attention.WindowAttention) == "window:size=128"
    assert make_pages.label_of("rope", lg.Rotary) == "rope"
    assert (
        make_pages.label_of("hierarchical", lg.attention.HierarchicalAttention) == "hierarchical"
    )  # its window has a default


def test_signs_of_markdown_are_escaped_but_in_code_and_addresses() -> None:
    plain = "a_b |i| `x_y` https://a.b/c_d [1]"
    assert make_pages.plain(plain) == r"a\_b \|i\| `x_y` https://a.b/c_d \[1\]"


@pytest.mark.slow
def test_an_encoding_of_a_plugin_has_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Halving(lg.ALiBi):
        """A bias that halves: score_h(i, j) += -|i - j| / 2^h."""

    monkeypatch.setitem(ENCODINGS.factories, "halving", Halving)
    monkeypatch.setattr(make_pages, "MIXERS", {})
    monkeypatch.setattr(make_pages, "ENCODINGS", {"halving": Halving})
    name, text = next(make_pages.pages(tmp_path))
    assert name == "encodings/halving" and "`longitude check halving` runs these" in text
    assert len(re.findall(r"!\[Line chart: .+\]\(/pictures/halving-\S+\.svg\)", text)) == 3
    assert "No [tested claim]" in text and "It has not been measured" in text


# ---- built -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, in a folder of its own, where every connection is refused."""
    pytest.importorskip("sphinx", reason="the site needs longitude[docs]: make docs")

    folder = tmp_path_factory.mktemp("site")
    code = f"""
import socket, sys
from pathlib import Path

def refuse(*_, **__):
    raise SystemExit("the build of the site asked a network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.path[:0] = {[str(make_site.DOCS), str(make_site.ROOT / "benchmarks"), str(make_site.ROOT / "src")]}
import make_site
sys.exit(make_site.build(Path({str(folder)!r}, "source"), Path({str(folder)!r}, "html")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "html"


def html(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_encoding_and_mixer_has_its_page(site: Path) -> None:
    for kind, names in (("encodings", lg.list_encodings()), ("mixers", lg.list_mixers())):
        overview = html(site, kind)
        for name in names:
            page = html(site, f"{kind}/{name}")
            assert f'href="{kind}/{name}.html"' in overview
            assert all(
                f'id="{part}"' in page for part in ("what-it-is", "loss-and-runtime", "claims-of-papers", "tests")
            )
            assert page.count('class="only-dark') == page.count('class="only-light') >= (name not in ("nope", "sink"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_snippets_run(site: Path) -> None:
    """Each in the model that it makes; what they build is what the page is about."""
    for page in (site.parent / "source").glob("*s/*.md"):
        if page.parent.name in ("encodings", "mixers"):
            [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
            names: dict = {}
            exec(code, names)
            config = names["config"]
            spec = str(config.encoding if page.parent.name == "encodings" else config.mixer)
            assert page.stem in spec


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_asks_no_network_and_every_picture_has_words(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "explore.html"]
    assert len(pages) > 100 and sum(file.stat().st_size for file in site.rglob("*.*")) < 40e6
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|source|iframe)[^>]*?\ssrc=\"([^\"]*)|<link[^>]*?\shref=\"([^\"]*)", text)
        assert [each for pair in fetched for each in pair if each.startswith(("http", "//"))] == [], page
        for picture in re.findall(r"<img[^>]*>", text):
            alt, file = re.search(r'alt="([^"]*)"', picture), re.search(r'src="([^"]*)"', picture)
            assert file is not None and (file[1].startswith("data:") or (page.parent / file[1]).is_file()), picture
            assert alt is not None and len(alt[1]) > 20, (page, picture)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_names_lead_to_their_docstrings(site: Path) -> None:
    assert '<a class="reference internal" href="api/attention.html#longitude.attend"' in html(site, "performance")
    reference = html(site, "api/attention")
    main = re.sub(r"<script.*?</script>", "", reference.partition("<main")[2].partition("</main>")[0], flags=re.DOTALL)
    words = re.sub(r"<[^>]+>", "", main)
    assert 'id="longitude.attend"' in main and "Float[Tensor" in words and "~" not in words
    assert "https://arxiv.org/abs/2108.12409" in html(site, "api/positions")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_links_of_pictures_lead_somewhere(site: Path) -> None:
    """Sphinx does not read these."""
    for page in ("claims", "choose", "concepts/where-position-enters", "gallery"):
        text = html(site, page)
        parts = re.findall(r'<svg[^>]*class="themed".*?</svg>|<table class="sortable">.*?</table>', text, re.DOTALL)
        links = [link for part in parts for link in re.findall(r'<a [^>]*href="([^"]+)"', part)]
        assert len(links) >= 6, page
        for link in links:
            file, _, anchor = link.partition("#")
            target = (site / page).parent / file if file else site / f"{page}.html"
            assert target.is_file() and (not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8")), link


# ---- in a browser ------------------------------------------------------------------------------------------------------
@pytest.fixture
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


def opened(browser, path: Path, width: int, scheme: str):
    """A page from the disk, with the network off; what it asked for beyond the disk is an error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    asked: list[str] = []
    page.goto(path.as_uri())
    page.wait_for_timeout(300)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    return page


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [*PAGES, NOTEBOOK, PROSE])
def test_axe_finds_nothing(site: Path, browser, page: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for width in (1280, 360):
        for scheme in ("light", "dark"):
            shown = opened(browser, site / f"{page}.html", width, scheme)
            if page == "search":
                shown.goto(f"{(site / 'search.html').as_uri()}?q=alibi")
                shown.wait_for_selector("#search-results li")
            found = {each["id"]: each["nodes"][0]["html"] for each in Axe().run(shown).response["violations"]}
            assert found == {}, (width, scheme)
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            shown.context.close()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_typed_word_is_found_offline(site: Path, browser) -> None:
    page = opened(browser, site / "index.html", 1280, "light")
    page.keyboard.press("Control+k")
    page.keyboard.type("kerple")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li")
    found = page.eval_on_selector_all("#search-results li > a", "links => links.map(each => each.getAttribute('href'))")
    assert any(link.startswith("encodings/kerple_log.html") for link in found)
    page.click("#search-results li > a")
    page.wait_for_load_state()
    assert "kerple" in page.inner_text("main").lower()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_the_gallery_is_sorted_by_a_heading(site: Path, browser) -> None:
    page = opened(browser, site / "gallery.html", 1280, "light")
    years = "[...document.querySelectorAll('.sortable tbody tr')].map(row => +row.cells[3].textContent)"
    assert page.evaluate(years) != sorted(page.evaluate(years))
    page.click("th button:text('year')")
    assert page.evaluate(years) == sorted(page.evaluate(years)) and len(page.evaluate(years)) == len(ENCODINGS)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_the_page_to_play_with_is_a_click_away(site: Path, browser) -> None:
    page = opened(browser, site / "exploring.html", 1280, "light")
    page.click("text=Open the page")
    page.wait_for_load_state()
    assert page.url.partition("#")[0].endswith("/explore.html") and page.locator("h1").count() >= 1


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("scheme", "hidden"), [("light", "only-dark"), ("dark", "only-light")])
def test_a_picture_is_shown_in_the_colors_of_the_page(site: Path, browser, scheme: str, hidden: str) -> None:
    page = opened(browser, site / "encodings/alibi.html", 360, scheme)
    shown = page.locator("main img:visible")
    assert shown.count() == page.locator(f"main img.{hidden}").count() > 0
    assert page.locator(f"main img.{hidden}:visible").count() == 0
    assert shown.first.evaluate("image => image.naturalWidth > 0 && image.clientWidth >= 600")  # and scrolls
