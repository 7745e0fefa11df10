"""An install that cannot work says so, in a sentence."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import longitude
from longitude import cli, errors
from longitude.cli.shared import print_json
from tests.support import printed

ROOT = Path(__file__).parents[1]


def with_torch(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with a torch that is this code and nothing else."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(code)
    path, command = os.pathsep.join([str(folder), str(ROOT / "src")]), [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.slow
def test_a_torch_older_than_supported_is_one_sentence(tmp_path: Path):
    sentence = f"longitude needs torch {errors.OLDEST_TORCH} or newer, and this is torch 2.9.1+cpu: pip install --upgrade torch"
    version = "__version__ = '2.9.1+cpu'"
    done = with_torch(version, tmp_path, "-c", "import longitude as lg; lg.attend")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"longitude.errors.UnsupportedVersion: {sentence}"
    done = with_torch(version, tmp_path, "-m", "longitude", "list")
    assert (done.returncode, done.stderr) == (2, f"longitude: {sentence}\n")


@pytest.mark.parametrize("extra", errors.EXTRAS)
def test_the_extras_are_those_that_are_declared(extra: str):
    """By the names of their distributions, which `import` writes otherwise."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[><=; ]", each)[0].replace("-python", "").replace("-", "_") for each in declared[extra]}
    mine = set(errors.EXTRAS[extra]) - (set(errors.MODELS) if extra != "models" else set())
    assert names - {f"longitude[{other}]" for other in errors.EXTRAS} == mine


ROOMS = {"models": "hf models check checkpoints LongitudeConfig", "study": "extend measure study"}
WITHOUT = f"import runpy, sys; sys.modules.update(dict.fromkeys({errors.EXTRAS['study']!r})); "


@pytest.mark.slow
def test_what_needs_an_extra_says_which(tmp_path: Path):
    """At the first touch, in a sentence; attention needs none."""
    rooms = {room: extra for extra, names in ROOMS.items() for room in names.split()}
    code = f"""{WITHOUT}
import torch, longitude as lg
for room in {[*rooms]}:
    try:
        getattr(lg, room)
    except ImportError as error:
        print(room, type(error).__name__, error)
try:
    import longitude.bench
except ImportError as error:
    print("bench", type(error).__name__, error)
lg.attend(*torch.ones(3, 1, 1, 4, 8), encoding="alibi")
"""
    lines = printed(code).splitlines()
    for line, (room, extra) in zip(lines, [*rooms.items(), ("bench", "study")], strict=True):
        assert line.startswith(f"{room} MissingPackage") and f"'longitude[{extra}]'" in line, line


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["list"], 2)])
def test_the_command_without_its_extra_is_one_line(arguments: list[str], code: int):
    program = f"{WITHOUT}sys.argv = ['longitude', *{arguments}]; runpy.run_module('longitude', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    if code:
        assert done.stdout == "" and done.stderr.count("\n") == 1 and "'longitude[study]'" in done.stderr
    else:
        assert (done.stdout, done.stderr) == (f"longitude {longitude.__version__}\n", "")


@pytest.mark.slow
def test_ctrl_c_while_modules_are_loaded_is_one_line(tmp_path: Path):
    """Which is most of what a short command does."""
    code = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\n"
    done = with_torch(code, tmp_path, "-m", "longitude", "list")
    assert done.returncode == 130 and done.stderr.count("\n") == 1 and "interrupted" in done.stderr, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_signs_that_a_terminal_lacks_raise_nothing(encoding: str, monkeypatch: pytest.MonkeyPatch):
    """Output comes last: an error there would throw hours of work away."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)

    def verb(arguments: list[str]) -> int:
        print("1.5 ± 0.2 − 3 × 2 – … │ 位")
        print_json({"é": "±"})
        return 0

    monkeypatch.setattr(cli, "_dispatch", verb)
    assert cli.main(["check", "alibi"]) == 0
    shown, data = out.buffer.getvalue().decode(encoding).split("\n", 1)  # pyright: ignore[reportAttributeAccessIssue]
    wanted = {"ascii": "1.5 ? 0.2 ? 3 ? 2 ? ? ? ?", "latin-1": "1.5 ± 0.2 ? 3 × 2 ? ? ? ?"}
    assert shown == wanted.get(encoding, "1.5 ± 0.2 − 3 × 2 – … │ 位")
    assert json.loads(data) == {"é": "±"}
