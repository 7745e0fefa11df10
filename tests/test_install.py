"""An install that cannot work says so, in a sentence."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from longitude import cli, errors

ROOT = Path(__file__).parents[1]


def with_torch(version: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with a torch that has a version and nothing else."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def test_a_torch_older_than_supported_is_one_sentence(tmp_path: Path):
    sentence = "longitude needs torch 2.6 or newer, and this is torch 2.5.1+cpu: pip install --upgrade torch"
    done = with_torch("2.5.1+cpu", tmp_path, "-c", "import longitude as lg; lg.attend")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"longitude.errors.UnsupportedVersion: {sentence}"
    done = with_torch("2.5.1+cpu", tmp_path, "-m", "longitude", "list")
    assert (done.returncode, done.stderr) == (2, f"longitude: {sentence}\n")
    done = with_torch("2.6.0", tmp_path, "-c", "import longitude as lg; lg.attend")
    assert done.returncode == 1 and "longitude needs torch" not in done.stderr  # the stub has no more to give


def test_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refused(arguments: list[str]) -> int:
        raise errors.UnsupportedVersion("this is another version")

    monkeypatch.setattr(cli, "_dispatch", refused)
    assert cli.main(["check", "alibi"]) == 2 and capsys.readouterr().err == "longitude: this is another version\n"


@pytest.mark.parametrize("version", ["2.6.0", "2.10.0", "2.13.0+cpu", "3.0.0a0+git1", torch.__version__])
def test_newer_ones_pass(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", version)
    errors.require_torch()


def test_the_oldest_torch_is_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={errors.OLDEST_TORCH}" in project["dependencies"]
