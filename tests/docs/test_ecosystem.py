"""docs/ecosystem.md: every line names tests that exist, and a line of code that stands in them or in the example they run."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ecosystem.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def lines(text: str) -> list[list[str]]:
    """The cells of every row that is no heading: what, how, tests."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in rows if row != ["what", "how", "tests"]]


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def squeezed(text: str) -> str:
    """Without what a formatter may move."""
    return re.sub(r"\s+|,(?=\s*\))", "", text)


def wrong(cells: list[str]) -> list[str]:
    """What a line of the page says that is not so."""
    what, how, tests = cells
    named = TEST.findall(tests)
    found = [] if named else [f"{what}: names no test"]
    sources = [ROOT / path for path in re.findall(r"\(\.\./([\w/.]+)\)", what)]
    for path, function in named:
        if not (ROOT / path).is_file() or function not in functions(ROOT / path):
            found.append(f"{what}: {path} has no {function}")
        elif not function.startswith("test_"):
            found.append(f"{what}: {function} is no test")
        else:
            sources.append(ROOT / path)
    code = how.strip("`")
    if not any(squeezed(code) in squeezed(source.read_text()) for source in sources if source.is_file()):
        found.append(f"{what}: no test has {code}")
    return found


@pytest.mark.parametrize("cells", lines(PAGE.read_text(encoding="utf-8")), ids=lambda cells: cells[0][:40])
def test_a_line_has_its_test(cells: list[str]) -> None:
    assert wrong(cells) == []


def test_what_is_missing_is_found() -> None:
    here, never = "tests/docs/test_ecosystem.py", "lg." + "magic()"
    page = f"""
| what | how | tests |
|---|---|---|
| good | `TEST.findall(tests)` | `{here}::test_what_is_missing_is_found` |
| gone | `TEST.findall(tests)` | `{here}::test_of_yesterday` |
| empty | `TEST.findall(tests)` | see the code |
| unproven | `lg.magic{"()"}` | `{here}::test_what_is_missing_is_found` |
"""
    good, gone, empty, unproven = map(wrong, lines(page))
    assert good == []
    assert f"gone: {here} has no test_of_yesterday" in gone
    assert "empty: names no test" in empty
    assert unproven == [f"unproven: no test has {never}"]


def test_every_library_and_every_test_has_a_line() -> None:
    """Of the extra that `make ecosystem` installs, and of the folder of its tests."""
    text = PAGE.read_text(encoding="utf-8")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ecosystem"]
    libraries = {re.split(r"[>=\[]", each)[0] for each in extra} - {
        "longitude",
        "datasets",
    }  # what TRL reads its texts with
    assert {name for name in libraries if name.lower() not in text.lower()} == set()
    tests = {(str(file.relative_to(ROOT)), name) for file in (ROOT / "tests" / "ecosystem").glob("test_*.py")
             for name in functions(file) if name.startswith("test_")}  # fmt: skip
    assert tests - set(TEST.findall(text)) == set()
