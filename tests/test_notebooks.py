"""The notebooks of examples/ run from the top, and what is stored in them belongs to their sources."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from make_notebooks import EXAMPLES, cells_of, names


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
