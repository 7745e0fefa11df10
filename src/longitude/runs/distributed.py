"""The processes of `torchrun` or `accelerate launch`: the first one leads, the others do what it sends them.

Importing this does not load torch.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

WAIT = timedelta(hours=24)
"""How long processes wait for the first one, which may search and measure before; where that one fails, they end at once."""
GRACE = 10.0
"""Seconds for which the first process, when it failed, waits for the others to fail, too."""
Result = TypeVar("Result")


def launched() -> bool:
    """Whether a launcher started this process, perhaps with others."""
    return int(os.environ.get("LOCAL_RANK", "-1")) >= 0


def processes() -> int:
    """How many the launcher started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1


def rank() -> int:
    """Of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_first_process() -> bool:
    """Whether this process writes: the only one, or the first of those that a launcher started."""
    return rank() == 0


def lead(run: Callable[[], int]) -> int:
    """Call `run` in the first process; the others do what it sends `everywhere`, and end with it.

    Returns:
        The exit code: that of `run`; 0 in the others.
    """
    global _group
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    _group = _Group()
    if not is_first_process():
        _group.follow()
        return 0
    code = run()
    if not _group.working:  # else they wait for each other in training, and end with this process
        _group.send(None)
    return code


def everywhere(here: Callable[[], Result], others: Callable[[], object]) -> Result:
    """Call `here`, and at the same time `others` in every other process of the launcher, if there are any.

    An exception is raised where all of them fail; where some do, the others may wait for them for ever, and all end.

    Args:
        here: Its result is returned.
        others: Can be pickled. Operators of torch have the threads of this process.

    Raises:
        ValueError: In processes that nothing leads.
    """
    if not launched():
        return here()
    if _group is None:
        raise ValueError(
            "several processes train one model under `torchrun -m longitude study`, not under your own script"
        )
    return _group.run(here, others)


def mean(value: "Tensor") -> "Tensor":
    """Of a tensor that every process of the launcher has, over them."""
    if processes() == 1:
        return value
    import torch.distributed as dist

    total = value.clone()
    dist.all_reduce(total)
    return total / processes()


def wait_for_others() -> None:
    """Until every process of the launcher is here."""
    if processes() > 1:
        import torch

        torch.distributed.all_reduce(torch.zeros(1))


class _Group:
    """The processes of the launcher. They meet when the first one needs the others, since options of torch are set before."""

    def __init__(self) -> None:
        self.store: Any = None
        self.works = 0
        self.working = False

    def exchange(self, work: Any = None) -> Any:
        """In the first process send, in the others receive."""
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        if self.store is None:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            self.store, *_ = next(rendezvous("env://", timeout=WAIT))
            dist.init_process_group(backend, store=self.store, rank=rank(), world_size=processes(), timeout=WAIT)
        sent = [work]
        dist.broadcast_object_list(sent, device=torch.device("cpu"))
        self.works += 1
        if sent == [None]:
            dist.destroy_process_group()
        return sent[0]

    def send(self, work: Any) -> None:
        try:
            self.exchange(work)
        except RuntimeError as error:
            raise SystemExit(f"longitude: a process of the launcher is gone ({_words(error)}); {AGAIN}") from error

    def run(self, here: Callable[[], Result], others: Callable[[], object]) -> Result:
        import torch

        self.send((others, torch.get_num_threads()))
        self.working = True
        try:
            result = here()
        except Exception as error:
            if not self.all_failed():
                raise SystemExit(self.alone(error)) from error
            self.working = False
            raise
        self.working = False
        return result

    def follow(self) -> None:
        """Do what the first process sends."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the first process's to answer
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        try:
            while (sent := self.exchange()) is not None:
                work, threads = sent
                torch.set_num_threads(threads)
                try:
                    work()
                except Exception as error:
                    if not self.all_failed():
                        print(self.alone(error), file=sys.stderr, flush=True)
                        os._exit(1)
        except RuntimeError:  # the first process is gone
            os._exit(1)

    def all_failed(self) -> bool:
        """Whether all processes fail in this work; called by each that does."""
        failed = f"longitude {self.works} failed"
        own = f"{failed} {rank()}"
        try:
            self.store.set(own, "")
            if not is_first_process():
                together = self.wait_for([failed], 2 * GRACE)
            elif together := self.wait_for([f"{failed} {other}" for other in range(1, processes())], GRACE):
                self.store.set(failed, "")
            if not together:
                self.store.delete_key(own)
        except RuntimeError:  # the launcher is gone
            return False
        return together

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Whether the store has them in time. Its own wait says more than one line when they are not."""
        end = time.monotonic() + seconds
        while not all(self.store.check([key]) for key in keys):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def alone(self, error: Exception) -> str:
        """That this process failed, and others did not."""
        return f"longitude: process {rank() + 1} of {processes()} failed, and not all others: {_words(error)}; {AGAIN}"


_group: _Group | None = None
AGAIN = "the same command continues from the newest checkpoint"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _end_with_launcher(launcher: int) -> None:
    """No process trains on when the launcher is killed."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)
