"""Processes of a launcher: the first one leads, all fail together or all end, and nothing waits for ever."""

import os

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from longitude.runs import distributed
from longitude.runs.distributed import everywhere, is_first_process, launched, lead, mean, processes, wait_for_others


@pytest.fixture
def process(monkeypatch):
    """Make this the process of a rank, of two."""

    def of(rank: int) -> None:
        for name, value in {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(distributed, "_group", None)
    return of


class Sent(distributed._Group):
    """A group whose other processes are a list."""

    def __init__(self, receives=()):
        super().__init__()
        self.store, self.sent, self.receives = HashStore(), [], iter(receives)

    def exchange(self, work=None):
        self.sent.append(work)
        self.works += 1
        return next(self.receives) if not is_first_process() else work


def test_the_first_of_several_processes_writes(process):
    assert is_first_process() and processes() == 1 and not launched()
    process(1)
    assert not is_first_process() and processes() == 2 and launched()


def test_without_a_launcher_a_process_is_alone():
    value = torch.tensor(3.0)
    assert everywhere(lambda: 7, lambda: 1 / 0) == 7
    assert mean(value) is value
    wait_for_others()


def test_a_script_that_nothing_leads_is_refused(process):
    process(0)
    with pytest.raises(ValueError, match="under `torchrun -m longitude study`, not under your own script"):
        everywhere(lambda: 7, lambda: 7)


def test_the_first_process_sends_work_and_the_end(process, monkeypatch):
    process(0)
    group = Sent()
    monkeypatch.setattr(distributed, "_Group", lambda: group)
    assert lead(lambda: everywhere(lambda: 3, print)) == 3
    assert group.sent == [(print, torch.get_num_threads()), None]


def test_an_interrupted_first_process_does_not_wait_for_the_others(process, monkeypatch):
    """They are in training, where none receives."""
    process(0)
    group = Sent()
    monkeypatch.setattr(distributed, "_Group", lambda: group)

    def interrupted() -> int:
        with pytest.raises(KeyboardInterrupt):
            everywhere(lambda: (_ for _ in ()).throw(KeyboardInterrupt()), print)
        return 130

    assert lead(interrupted) == 130
    assert group.sent == [(print, torch.get_num_threads())]


def test_the_others_work_until_the_end(process, monkeypatch):
    process(1)
    done: list[int] = []
    threads = torch.get_num_threads()
    group = Sent([(lambda: done.append(torch.get_num_threads()), 3), (lambda: done.append(2), threads), None])
    monkeypatch.setattr(distributed, "_Group", lambda: group)
    monkeypatch.setattr(distributed.signal, "signal", lambda *of: None)
    assert lead(lambda: 7) == 0
    assert done == [3, 2] and torch.get_num_threads() == threads


def test_a_mean_is_over_all_processes(process, monkeypatch):
    process(0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: value.add_(5.0))  # what the other one has
    value = torch.tensor(3.0)
    assert mean(value) == 4.0 and value == 3.0
    wait_for_others()


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_all_failed_or_this_one_ends(rank, together, process, monkeypatch, capsys):
    """Where all failed the next work begins; where one did, another may wait for it in a sum."""
    process(rank)
    monkeypatch.setattr(distributed, "GRACE", 0.02)
    monkeypatch.setattr(distributed.signal, "signal", lambda *of: None)
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    group = Sent([(lambda: 1 / 0, 1), None])
    if together:
        group.store.set("longitude 1 failed 1" if rank == 0 else "longitude 1 failed", "")
    own = f"longitude 1 failed {rank}"
    if rank == 0:
        error = ZeroDivisionError if together else SystemExit
        with pytest.raises(
            error, match="^division" if together else "process 1 of 2 failed, and not all others: ZeroDivisionError"
        ):
            group.run(lambda: 1 / 0, print)
        assert group.working == (not together)
    elif together:
        group.follow()
    else:
        with pytest.raises(SystemExit):
            group.follow()
        message = "longitude: process 2 of 2 failed, and not all others: ZeroDivisionError: division by zero; the same"
        assert capsys.readouterr().err.startswith(message)
    assert group.store.check([own]) == together
    assert group.store.check(["longitude 1 failed"]) == together
