"""The notebooks of examples/, executed again in place, each in a kernel and an empty folder of its own.

python docs/make_notebooks.py                     # all of them
python docs/make_notebooks.py 2-train-short-test-long --out copies

A cell that raises, warns or writes to standard error ends it, and the notebook stays as it was. What is stored is the same for
every reader: no times, no version of Python, and with each picture its words.
"""

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

from longitude.runs.files import atomic

EXAMPLES = Path(__file__).parents[1] / "examples"
WARN = "import warnings; warnings.simplefilter('error'); warnings.filterwarnings('ignore', module='ipykernel')"
PICTURES = ("image/svg+xml", "image/png")


def names() -> list[str]:
    """Of all notebooks, in their order."""
    return sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


def executed(notebook: Any, timeout: int = 600) -> Any:
    """The notebook with the outputs of its cells. ValueError for one that writes to standard error."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # of the kernel, too: notebooks ask nothing of a network
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `longitude` is of this Python
    )
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.extra_arguments = [f"--IPKernelApp.exec_lines={WARN}", "--log-level=40"]
        client.execute()
    for cell in cells_of(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise ValueError(f"expected no warnings and no bars, got {output.text!r} from the cell\n{cell.source}")
        if words := alternatives(cell):
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(words)}}
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return notebook


def cells_of(notebook: Any) -> list[Any]:
    """Those with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def alternatives(cell: Any) -> list[str]:
    """Of each picture that a cell shows, what it says to those who do not see it; "" where it says nothing."""
    pictures = [output for output in cell.outputs if any(kind in output.get("data", ()) for kind in PICTURES)]
    return [next((about.get("alt", "") for about in each.metadata.values()), "") for each in pictures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*names(), []], help="without .ipynb; all of them by default")
    parser.add_argument("--out", type=Path, default=EXAMPLES, help="a folder for them")
    options = parser.parse_args()
    for name in options.names or names():
        notebook = executed(nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4))
        options.out.mkdir(parents=True, exist_ok=True)
        with atomic(options.out / f"{name}.ipynb") as unfinished:
            nbformat.write(notebook, unfinished)
        print(f"{name}: {len(cells_of(notebook))} cells")


if __name__ == "__main__":
    main()
