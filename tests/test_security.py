"""The promises of SECURITY.md about folders that somebody sent: a command ends with one line that names the file."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from longitude.cli import main
from longitude.extend.units import work_of, working
from longitude.measure.sources import read_text
from longitude.study.results import keep, read_run
from tests.extend.conftest import saved
from tests.study.conftest import units_in, write_run
from tests.support import edit_config, refused

ELSEWHERE = "elsewhere"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    bits = {"rope": (2.6, 2.7), "t5": (2.6, 2.6)}
    return write_run(tmp_path_factory.mktemp("whole") / "run", bits, test_lengths=(256, 512))


@pytest.fixture
def sent(whole, tmp_path) -> Path:
    """A study's folder that somebody sent, beside a folder that is none of its business."""
    (tmp_path / ELSEWHERE).mkdir()
    (tmp_path / ELSEWHERE / "mine.svg").write_text("mine")
    return shutil.copytree(whole, tmp_path / "run")


def link(path: Path) -> None:
    path.symlink_to(path.parents[len(path.parts) - path.parts.index("run") - 1] / ELSEWHERE)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**40)


STRANGE = {"a link": link, "a pipe": os.mkfifo, "a terabyte": sparse, "another type": lambda at: at.write_text("[]")}
"""What stands in the place of a file that a report reads."""


def replaced(path: Path, kind: str) -> Path:
    if path.exists():
        path.unlink()
    STRANGE[kind](path)
    return path


NAMES = ("question.json", "train/unit.json", "train/losses.jsonl", "measure/documents.parquet")
KINDS = ("another type", "a pipe", "a link", "a terabyte")


@pytest.mark.parametrize(("name", "kind"), [*zip(NAMES, KINDS, strict=True)])
def test_a_strange_file_in_a_study_is_named(kind, name, sent, capsys):
    """It is neither followed, nor waited for, nor read into memory. (tests/runs tries every kind.)"""
    folder, _, file = name.rpartition("/")
    path = replaced((units_in(sent, "rope")[folder] if folder else sent) / file, kind)
    assert main(["report", str(sent)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert path.name in line and str(path.parent) in line
    assert_elsewhere_is_as_before(sent)


def test_losses_behind_a_link_are_not_read(tmp_path, capsys):
    sent = write_run(tmp_path / "run", {"rope": (2.6,)}, {("rope", 0): {"status": "running"}}, test_lengths=(256,))
    folder = units_in(sent, "rope")["train"]
    folder.rename(tmp_path / ELSEWHERE)
    link(folder)
    assert main(["report", str(sent)]) == 2
    assert str(folder) in capsys.readouterr().err


def test_a_terabyte_in_a_study_that_is_kept_is_named(whole, tmp_path, capsys):
    sent = keep(read_run(whole), tmp_path / "run")
    replaced(sent / "documents.parquet", "a terabyte")
    assert main(["report", str(sent)]) == 2
    assert str(sent / "documents.parquet") in capsys.readouterr().err


@pytest.mark.slow
def test_figures_are_not_written_or_removed_elsewhere(sent, capsys):
    link(sent / "figures")
    assert main(["report", str(sent)]) == 2
    assert str(sent / "figures") in capsys.readouterr().err
    assert_elsewhere_is_as_before(sent)


@pytest.mark.parametrize("place", ["", "extended", "training-ab", "units", "units/.search-ab"])
def test_an_extension_writes_and_removes_nothing_elsewhere(place, tmp_path):
    elsewhere, path = tmp_path / ELSEWHERE, work_of(tmp_path / "out") / place
    elsewhere.mkdir()
    (elsewhere / "mine.svg").write_text("mine")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    with refused(str(path)), working(tmp_path / "out"):
        pass
    assert_elsewhere_is_as_before(tmp_path / "out")


def assert_elsewhere_is_as_before(sent: Path) -> None:
    elsewhere = sent.parent / ELSEWHERE
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"mine.svg": "mine"}


# ---- texts -----------------------------------------------------------------------------------------------------------
def test_a_text_is_known_to_be_binary_before_it_is_read(tmp_path):
    sparse(tmp_path / "text")
    for data in (tmp_path / "text", tmp_path):
        with refused("binary"):
            read_text(str(data))
    (tmp_path / "text").write_bytes(b"a" * 2**20 + b"\xc3")  # half a letter at the end of a block
    with refused("binary"):
        read_text(str(tmp_path / "text"))
    (tmp_path / "text").write_bytes(b"a" * (2**20 - 1) + "é".encode())
    assert read_text(str(tmp_path / "text")).documents[0][1].endswith("aé".encode())


def test_a_text_larger_than_memory_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("longitude.measure.sources.available_memory", lambda: 2**20)
    monkeypatch.setattr("longitude.measure.sources.LARGEST", 2**10)
    (tmp_path / "text").write_text("a" * 2**21)
    with refused("memory", str(tmp_path / "text")):
        read_text(str(tmp_path / "text"))


def test_a_pipe_and_no_name_are_no_text(tmp_path):
    os.mkfifo(tmp_path / "text")
    for data in (str(tmp_path / "text"), ""):
        with refused("--data"):
            read_text(data)


# ---- a checkpoint runs no code ---------------------------------------------------------------------------------------
EXTEND = "extend --to 256 --method yarn --no-measure --out out"


@pytest.fixture
def checkpoint(tmp_path):
    """A small Llama, and a file that code of its folder would write."""
    return saved("llama", tmp_path / "model"), tmp_path / "was run"


@pytest.mark.parametrize("command", ["check", "show", EXTEND])
def test_modeling_code_is_not_run(command, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, mark = checkpoint
    code = "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n{code}")
    edit_config(folder, model_type="mine", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    main([*command.split(), str(folder)])
    assert not mark.exists()


class Runs:
    """A pickle that creates a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("command", ["check", EXTEND])
def test_pickles_are_not_run(command, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, mark = checkpoint
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(32, 16), "other": Runs(mark)}, folder / "pytorch_model.bin")
    assert main([*command.split(), str(folder)]) == 2
    assert not mark.exists()
