"""Numbers in README and docs are those of the committed results."""

import json

import pytest

import draw
import fill_numbers


def test_documents_and_pictures_have_what_the_results_have(monkeypatch) -> None:
    """Pictures by the words in them: the bytes of an SVG depend on fonts and releases."""
    assert fill_numbers.differing(fill_numbers.documents()) == draw.differing() == [], "run `make numbers`"
    study = draw.newest("study")
    study["rows"][4]["value"] += 0.01
    monkeypatch.setattr(draw, "newest", lambda name: study)
    assert draw.differing() == [path.name for path in draw.FILES]


@pytest.mark.parametrize("name", ["bench", "study"])
def test_a_block_is_filled_from_the_newest_result(name, tmp_path, monkeypatch) -> None:
    """A number that changes in the results differs in the document until it is filled, and nothing else changes."""
    found = fill_numbers.newest(name)
    monkeypatch.setattr(fill_numbers, "RESULTS", tmp_path)
    document = tmp_path / "page.md"
    document.write_text(f"before\n<!-- numbers: {name} -->\n<!-- end -->\nafter\n")
    with pytest.raises(ValueError, match=name):
        fill_numbers.filled(document.read_text())
    for day, number in (("01", 0.123), ("02", 4.567)):
        for row in found.get("targets", found["rows"]):
            row["measured" if name == "bench" else "value"] = number
        (tmp_path / f"2026-01-{day}{'' if name == 'bench' else '-study'}.json").write_text(json.dumps(found))
    assert fill_numbers.differing([document]) == [f"page.md: {name}"]
    text = fill_numbers.filled(document.read_text())
    assert "4.57" in text and "0.12 |" not in text
    assert text.startswith("before\n<!-- numbers") and text.endswith("<!-- end -->\nafter\n")
    assert fill_numbers.filled(text) == text
