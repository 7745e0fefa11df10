"""The page as a file, and as readers use it."""

import pytest


@pytest.mark.slow
def test_one_small_file_that_asks_for_nothing(command, tmp_path):
    out = tmp_path / "explore.html"
    code, printed, err = command("explore", "--out", out)
    text = out.read_text()
    assert code == 0 and printed == "" and str(out) in err
    assert len(text) < 1e6 and "<script src" not in text and '<link rel="stylesheet"' not in text


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


@pytest.mark.slow
@pytest.mark.browser
def test_a_slider_moves_the_curve_and_the_address(opened):
    page = opened()
    line = page.locator("#compare .line.c1").first
    before = line.get_attribute("d")
    page.get_by_label("head", exact=False).first.focus()
    page.locator("[data-name=head] input").press("ArrowRight")
    page.wait_for_function("([d]) => document.querySelector('#compare .line.c1').getAttribute('d') !== d", arg=[before])
    assert page.evaluate("location.hash") == "#head=4"
