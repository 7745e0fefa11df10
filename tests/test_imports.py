"""Imports go one way, between files too: every import statement counts, wherever it stands."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def imported(file: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file names in an import: at its top, inside functions, and for type checkers only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & known or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known


@pytest.mark.slow
def test_no_import_circle_between_files() -> None:
    files = modules()
    assert len(files) > 100
    # `import longitude as lg` in the package's own __init__ for type checkers names everything: it is the front door.
    graph = {name: imported(file, set(files)) - {name, "longitude"} for name, file in files.items()} | {
        "longitude": set()
    }
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError, match="longitude"):  # were there one
        TopologicalSorter(graph | {"longitude.errors": {"longitude.hf.stock"}}).prepare()
