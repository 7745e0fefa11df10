"""Executors of the trials of a study: in this process, or in parallel processes on this machine.

An executor maps trials to statuses. It decides where and when a trial runs, but not its result: a trial fixes its seed and
number of threads, so all executors give equal rows on machines of the same type. Importing this does not load torch.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from longitude import plugins
from longitude.errors import UsageError
from longitude.runs.machine import cores
from longitude.runs.store import BusyError, Ends, one_by_one
from longitude.study.config import StudyConfig
from longitude.study.trial import Status

if TYPE_CHECKING:
    from longitude.study.run_trial import Note, TrialRunner
    from longitude.study.units import TrialUnits

ATTEMPTS = 3
"""Maximum starts of a trial in a call if its process is killed, for example for lack of memory."""
Executor = Callable[
    ["TrialRunner", "Sequence[TrialUnits]", "Callable[[TrialUnits, float, str], None]", "Note"],
    "Ends[TrialUnits, Status | str]",
]
"""Runs each of these trials once, and yields it with its status as soon as it ends; calls back with the share of a trial that is
done and words, and with sentences."""


def in_process(runner, trials, on_progress, note):
    """One trial after the other, in this process."""
    return one_by_one(lambda units: runner.run(units, partial(on_progress, units), note), trials)


def executor_of(config: StudyConfig, trials: int, workers: int | None = None) -> Executor:
    """The executor for this many trials; by default a worker for each GPU, or as many as the cores allow. UsageError below 1."""
    if workers is not None and workers < 1:
        raise UsageError("--workers", "at least 1", workers)
    gpus = _gpus() if config.device == "cuda" else ()
    if workers is None:
        workers = len(gpus) or (max(1, cores() // config.threads) if config.device == "cpu" else 1)
    workers = min(workers, trials)
    return Workers(workers, gpus) if workers > 1 else in_process


def _gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",") if visible else map(str, range(torch.cuda.device_count())))


# ---- side by side on this machine ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Workers:
    """Parallel trials on this machine, each in a separate process that ends with the trial.

    If a process is killed, its trial continues from the newest checkpoint in another. No process outlives this one.

    Attributes:
        workers: Number of parallel processes.
        gpus: Devices in the format of CUDA_VISIBLE_DEVICES; each worker has one of them. Empty if trials run on the CPU.
    """

    workers: int
    gpus: tuple[str, ...] = ()

    def __call__(self, runner, trials, on_progress, note):
        # fork would copy threads of torch that have already begun
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["longitude.study.run_trial"])
        waiting, attempts, running = list(trials), dict.fromkeys(trials, 0), {}
        slots = list(range(self.workers))
        try:
            while waiting or running:
                while waiting and slots:
                    units, slot = waiting.pop(0), slots.pop(0)
                    attempts[units] += 1
                    gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
                    receiver, sender = context.Pipe(duplex=False)
                    arguments = runner, units, sender, gpu, plugins.loaded()
                    process = context.Process(target=_work, args=arguments, daemon=True)
                    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                    try:  # a worker inherits the mask: Ctrl-C is of the parent alone, also while modules are loaded
                        process.start()
                    finally:
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    sender.close()  # the worker's end: the pipe ends with the worker
                    running[receiver] = (units, slot, process)
                ready: list[Any] = wait(list(running))
                for receiver in ready:
                    units, slot, process = running[receiver]
                    try:
                        kind, *content = receiver.recv()
                    except EOFError:
                        kind, content = "killed", []
                    if kind == "progress":
                        on_progress(units, *content)
                    elif kind == "note":
                        note(*content)
                    else:
                        del running[receiver]
                        slots.append(slot)
                        process.join()
                        if kind == "raised":
                            raise content[0]
                        if kind == "ended":
                            yield units, content[0]
                        elif attempts[units] < ATTEMPTS:
                            note(f"{units.trial.title}: {_ending(process)}; it begins again")
                            waiting.insert(0, units)
                        else:
                            yield units, f"{_ending(process)}, {ATTEMPTS} times"
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


def _work(
    runner: "TrialRunner", units: "TrialUnits", sender: Connection, gpu: str | None, loaded: list[plugins.Plugin]
) -> None:
    """A worker: run one trial and send what happens."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used
    try:
        plugins.restore(loaded)
        send = lambda kind: lambda *content: sender.send((kind, *content))  # noqa: E731
        sender.send(("ended", runner.run(units, send("progress"), send("note"))))
    except BusyError as busy:
        sender.send(("ended", busy))
    except Exception as error:  # the disk is full, or a plugin differs
        sender.send(("raised", error))


def _end_with_parent() -> None:
    """End this worker when its parent process ends, also if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
