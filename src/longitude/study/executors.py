"""Where the trials of a study run: in this process, side by side in processes of this machine, or on a Ray cluster.

An executor maps trials to statuses. It decides where and when a trial runs, never what comes of it: a trial has its seed and
its number of threads, so every executor gives equal rows on machines of one type. Importing this does not load torch.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longitude import plugins
from longitude.runs.files import lock
from longitude.study.trial import Status, Trial

if TYPE_CHECKING:
    from longitude.study.run_trial import Note

ATTEMPTS = 3
"""How often a trial begins in one call whose process is killed, say for want of memory."""
WRITING = "cells/.workers"
"""Locked by the workers of a run directory."""


class RunTrial(Protocol):
    """`run_trial` for one study; it can be pickled."""

    def __call__(self, *, trial: Trial, on_progress: Callable[[float, str], None], note: "Note") -> Status: ...


class Executor(Protocol):
    """Runs trials."""

    def map(
        self,
        run: RunTrial,
        trials: Sequence[Trial],
        on_progress: Callable[[Trial, float, str], None],
        note: "Note",
    ) -> Iterator[tuple[Trial, Status | str]]:
        """Run every trial once.

        Args:
            run: Runs one, and records how it ended.
            trials: In the order in which they begin.
            on_progress: Called with a trial, the share of it that is done, and words.
            note: Called with sentences about a trial.

        Returns:
            Each trial as soon as it ends, with its status, or why none was recorded.
        """
        ...


@dataclass(frozen=True)
class InProcess:
    """One trial after the other, in this process."""

    def map(self, run, trials, on_progress, note):
        for trial in trials:
            yield trial, run(trial=trial, on_progress=lambda *now, trial=trial: on_progress(trial, *now), note=note)


# ---- side by side on this machine ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Workers:
    """Trials side by side on this machine, each in a process of its own that ends with it.

    A trial whose process is killed continues from its newest checkpoint in another one. No process outlives this one.

    Attributes:
        workers: How many at once.
        gpus: Devices that CUDA_VISIBLE_DEVICES would name; each worker has one of them. None where trials run on the CPU.
    """

    workers: int
    gpus: tuple[str, ...] = ()

    def map(self, run, trials, on_progress, note):
        context: Any = multiprocessing.get_context(
            "forkserver"
        )  # fork would copy threads of torch that have already begun
        context.set_forkserver_preload(["longitude.study.run_trial"])
        waiting, attempts, running = list(trials), dict.fromkeys(trials, 0), {}
        slots = list(range(self.workers))
        try:
            while waiting or running:
                while waiting and slots:
                    trial, slot = waiting.pop(0), slots.pop(0)
                    attempts[trial] += 1
                    gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_work, args=(run, trial, sender, gpu, plugins.loaded()), daemon=True
                    )
                    process.start()
                    sender.close()  # the worker's end: the pipe ends with the worker
                    running[receiver] = (trial, slot, process)
                ready: list[Any] = wait(list(running))
                for receiver in ready:
                    trial, slot, process = running[receiver]
                    try:
                        kind, *content = receiver.recv()
                    except EOFError:
                        kind, content = "killed", []
                    if kind == "progress":
                        on_progress(trial, *content)
                    elif kind == "note":
                        note(*content)
                    else:
                        del running[receiver]
                        slots.append(slot)
                        process.join()
                        if kind == "raised":
                            raise content[0]
                        if kind == "ended":
                            yield trial, content[0]
                        elif attempts[trial] < ATTEMPTS:
                            note(f"{trial.title}: {_ending(process)}; it begins again")
                            waiting.insert(0, trial)
                        else:
                            yield trial, f"{_ending(process)}, {ATTEMPTS} times"
        finally:
            for _, _, process in running.values():
                process.kill()
            for _, _, process in running.values():
                process.join()


def _ending(process: Any) -> str:
    """How a process ended that left no message, in words."""
    code = process.exitcode
    if code == -signal.SIGKILL:
        return "its process was killed (the system does so where memory is short: fewer --workers need less)"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def _work(run: RunTrial, trial: Trial, sender: Connection, gpu: str | None, loaded: list[plugins.Plugin]) -> None:
    """A worker: run one trial and send what happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used
    try:
        plugins.restore(loaded)
        with _writing(trial.run):
            status = run(
                trial=trial,
                on_progress=lambda *now: sender.send(("progress", *now)),
                note=lambda words: sender.send(("note", words)),
            )
        sender.send(("ended", status))
    except Exception as error:  # the disk is full, or a plugin is another one
        sender.send(("raised", error))


def _end_with_parent() -> None:
    """No worker writes on when the process that holds the lock of the run directory is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _writing(run: Path) -> Iterator[None]:
    """Held by a worker as long as it writes into a run directory."""
    path = run / WRITING
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        lock(file.fileno(), shared=True)
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():  # another process may have begun to write here
            os._exit(1)
        yield


def wait_for_workers(run: Path, seconds: float = 30) -> None:
    """Wait for the workers of a process that was killed: they end at once. ValueError for one that does not."""
    if not (run / WRITING).exists():
        return None
    end = time.monotonic() + seconds
    with open(run / WRITING, "a") as file:
        while True:
            try:
                return lock(file.fileno())
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ValueError(f"{run} is being written by a worker of a killed process; end it") from None
                time.sleep(0.05)
