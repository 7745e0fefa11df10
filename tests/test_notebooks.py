"""The notebooks of examples/ run from the top, and what is stored in them belongs to their sources."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from make_notebooks import EXAMPLES, PICTURES, alternatives, cells_of, digest, executed, names

ABSOLUTE = re.compile(r"(?<![\w<:/.)])/[a-z]\w+/\w|[A-Z]:\\")
"""A path of one machine; not of an address, nor the end of an element."""


@pytest.fixture(params=names())
def notebook(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(EXAMPLES / f"{request.param}.ipynb", as_version=4)


def test_the_format_is_valid(notebook):
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


def test_outputs_belong_to_the_sources(notebook):
    """Else run `make notebooks`."""
    assert notebook.metadata.get("longitude") == {"sources": digest(notebook)}
    code = cells_of(notebook)
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]


def test_outputs_are_those_of_any_reader(notebook):
    for cell in cells_of(notebook):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", cell.source
        shown = str([output.get("text") or output.data for output in cell.outputs])
        assert not ABSOLUTE.search(cell.source) and not ABSOLUTE.search(shown), cell.source


def test_every_picture_says_what_it_shows(notebook):
    for cell in cells_of(notebook):
        pictures = [
            data for output in cell.outputs for kind, data in output.get("data", {}).items() if kind in PICTURES
        ]
        words = alternatives(cell)
        assert len(words) == len(pictures) <= 1 and all(len(each) > 40 for each in words), cell.source
        assert cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "") == "".join(words)
        assert all(len(picture) < 100_000 for picture in pictures)
    for cell in notebook.cells:
        assert cell.cell_type == "code" or "![](" not in cell.source


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names())
def test_it_runs_from_the_top(name: str, tmp_path: Path):
    """Every assertion in it holds, and nothing warns. In a process of its own: what starts kernels has warnings of its own."""
    script = EXAMPLES.parent / "docs" / "make_notebooks.py"
    done = subprocess.run([sys.executable, script, name, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    stored, again = (nbformat.read(folder / f"{name}.ipynb", as_version=4) for folder in (EXAMPLES, tmp_path))
    assert [cell.source for cell in again.cells] == [cell.source for cell in stored.cells]
    kinds = [[[*output.get("data", {})] for output in cell.outputs] for cell in cells_of(again)]
    assert kinds == [[[*output.get("data", {})] for output in cell.outputs] for cell in cells_of(stored)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "warns", ["import warnings; warnings.warn('old')", "import sys; print('old', file=sys.stderr)"]
)
def test_a_cell_that_warns_is_refused(warns: str):
    with pytest.raises((CellExecutionError, ValueError), match="old"):
        executed(new_notebook(cells=[new_code_cell(warns)]))
