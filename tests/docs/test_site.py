"""The site: whole, without a warning or a network, searched, and read by everybody."""

from pathlib import Path

import pytest

import make_site
from make_words import as_rst


def test_links_to_files_are_those_of_the_site() -> None:
    root, page = make_site.ROOT, make_site.DOCS / "guides" / "own.md"
    places = {root / "CONTRIBUTING.md": Path("CONTRIBUTING.md"), root / "docs/cost.svg": Path("cost.svg")}
    text = "[how](../../CONTRIBUTING.md) [part](../../CONTRIBUTING.md#laws) ![cost](../cost.svg) [web](https://a.b/c)"
    expected = "[how](/CONTRIBUTING.md) [part](/CONTRIBUTING.md#laws) ![cost](/cost.svg) [web](https://a.b/c)"
    assert make_site.linked(text, page, places) == expected
    assert make_site.linked("[code](../../pyproject.toml)", page, places) == "code (`pyproject.toml`)"
    assert make_site.linked("[lost](nowhere.md)", page, places) == "[lost](nowhere.md)"  # Sphinx refuses it


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
    lines = ["Words.", "", "    lg.attend(q)  # |x|", "", "Args:", "    q: |x|"]
    assert as_rst(lines) == ["Words.", "", "::", "", "    lg.attend(q)  # |x|", "", "Args:", r"    q: \|x\|"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, in a folder of its own."""
    pytest.importorskip("sphinx", reason="the site needs longitude[docs]: make docs")
    folder = tmp_path_factory.mktemp("site")
    assert make_site.build(folder / "source", folder / "html") == 0
    return folder / "html"


@pytest.mark.slow
def test_it_is_built_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file() and (site / "searchindex.js").is_file()
