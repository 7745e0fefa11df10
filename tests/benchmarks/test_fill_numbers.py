"""Numbers in README and docs are those of the committed results."""

import json

import pytest

import draw
import draw_study
import fill_numbers


def test_documents_have_what_the_results_have() -> None:
    assert fill_numbers.differing(fill_numbers.documents()) == [], "run `make numbers`"
    for path in fill_numbers.documents():
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- numbers: ") == text.count("<!-- end -->") == len(fill_numbers.blocks(text)), path


def test_pictures_are_those_of_the_results() -> None:
    """By the words in them: the bytes of an SVG depend on fonts and releases."""
    assert [name for each in draw.PICTURES.values() for name in each.differing()] == [], "run `make numbers`"
    study = draw_study.study()
    study["rows"][4]["value"] += 0.01
    changed = draw_study.STUDY._replace(found=lambda: study)
    assert changed.differing() == [*changed.files]


@pytest.mark.parametrize("name", ["bench", "bench-mixers", "decode"])
def test_a_block_is_filled_from_the_newest_result(name, tmp_path, monkeypatch) -> None:
    """A number that changes in the results differs in the document until it is filled, and nothing else changes."""
    found = json.loads(fill_numbers.newest(name).read_text())
    monkeypatch.setattr(fill_numbers, "RESULTS", tmp_path)
    document = tmp_path / "page.md"
    document.write_text(f"before\n<!-- numbers: {name} -->\n<!-- end -->\nafter\n")
    assert fill_numbers.filled(document.read_text()) == document.read_text()
    assert fill_numbers.differing([document]) == [f"page.md: {name} (no result *{fill_numbers.ending(name)})"]
    for day, ratio in (("01", 0.123), ("02", 4.567)):
        for row in (*found.get("targets", []), *found["rows"]):
            row["measured" if "measured" in row else "ratio"] = ratio
        (tmp_path / f"2026-01-{day}{fill_numbers.ending(name)}").write_text(json.dumps(found))
    assert fill_numbers.differing([document]) == [f"page.md: {name}"]
    text = fill_numbers.filled(document.read_text())
    assert "4.57" in text and "0.12 |" not in text
    assert text.startswith("before\n<!-- numbers") and text.endswith("<!-- end -->\nafter\n")
    assert fill_numbers.filled(text) == text
