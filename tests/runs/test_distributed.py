"""Processes of a launcher, by their variables."""

from longitude.cli import main
from longitude.runs.distributed import is_first_process, launched, processes


def as_second_of_two(monkeypatch):
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_the_first_of_several_processes_writes(monkeypatch):
    assert is_first_process() and processes() == 1 and not launched()
    as_second_of_two(monkeypatch)
    assert not is_first_process() and processes() == 2 and launched()


def test_a_study_is_refused_under_a_launcher(monkeypatch, tmp_path, capsys):
    """Two processes would write one folder."""
    monkeypatch.chdir(tmp_path)
    as_second_of_two(monkeypatch)
    assert main(["study"]) == 2
    assert "torchrun" in capsys.readouterr().err and not list(tmp_path.iterdir())
