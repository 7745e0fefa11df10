"""CONTRIBUTING.md is executed: each file that it tells a newcomer to write is written, found by its package, and tested."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTING = re.compile(r"`((?:src/longitude|tests)/[\w/]+\.py)`[^\n]*\n(?:[^\n`#]*\n)*\n?```python\n(.*?)```", re.DOTALL)


def listings() -> dict[str, str]:
    """Path -> content of every file that the page shows."""
    return dict(LISTING.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))


def test_modules_that_its_files_import_exist() -> None:
    modules = {*re.findall(r"^from (longitude[\w.]+) import", "\n".join(listings().values()), re.MULTILINE)}
    assert len(modules) > 20
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.slow
def test_its_files_work_and_their_tests_pass(tmp_path: Path) -> None:
    """In a copy of the package with the new files, and in a process of its own."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path, content in listings().items():
        file = tmp_path / path
        assert not file.exists(), f"{path} exists already"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run([*command, "tests"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(listings()) // 2} passed" in done.stdout  # each file of the package has one
