"""Trials as tasks of Ray, on this machine or a cluster.

Workers write to the run directory, so that after a kill a trial continues from its newest checkpoint. Machines of a cluster
must share the folder.
"""

import importlib.util
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from longitude import plugins
from longitude.runs.provenance import versions
from longitude.runs.store import QUESTION, Store
from longitude.study.executors import ATTEMPTS, Ended, attempted
from longitude.study.run_trial import TrialRunner
from longitude.study.units import TrialUnits

ANSWER = 10
"""Seconds that an address has to answer as Ray."""
PAUSE = 0.5
"""Seconds between two reads of the workers' reports."""


@dataclass(frozen=True)
class RayCluster:
    """Trials as Ray tasks. If a worker is killed, Ray retries its trial on any free machine.

    Attributes:
        address: Address of a cluster: "HOST:6379" or "auto"; None for RAY_ADDRESS, or Ray on this machine alone.
        cpus: CPUs for each trial.
        gpus: GPUs for each trial; fractions are allowed.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0

    def check(self) -> None:
        """Raise ValueError if Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--executor ray needs the package ray; install it with pip install 'longitude[ray]'")

    def map(self, runner, trials, on_progress, note):
        with _connected(self.address) as ray:
            reports = ray.remote(num_cpus=0)(_Reports).remote()
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(_work)
            shared, loaded, here = ray.put(runner), plugins.loaded(), _versions()
            asked = _question(runner.store)
            pending = {task.remote(shared, units, asked, reports, loaded, here): units for units in trials}
            while pending:
                ready, _ = ray.wait(list(pending), timeout=PAUSE)
                latest, notes = ray.get(reports.take.remote())
                for words in notes:
                    note(words)
                for units in pending.values():
                    if (now := latest.get(units.trial.title)) is not None:
                        on_progress(units, *now)
                for reference in ready:
                    units = pending.pop(reference)
                    try:
                        ended = ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        if isinstance(error.cause, ValueError):  # versions, plugins or folder differ there
                            raise error.cause from None
                        yield units, f"on its worker: {error.cause}"
                    except ray.exceptions.RayError as error:
                        words = str(error).strip().partition("\n")[0]
                        yield units, f"Ray gave it up ({type(error).__name__}: {words})"
                    else:
                        yield units, ended


# ---- on a worker -----------------------------------------------------------------------------------------------------
class _Reports:
    """An actor that keeps the reports of workers until `take`."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.notes: list[str] = []

    def put(self, title: str, kind: str, content: Any) -> None:
        if kind == "note":
            self.notes.append(content)
        else:
            self.latest[title] = content

    def take(self) -> tuple[dict[str, Any], list[str]]:
        latest, notes = self.latest, self.notes
        self.latest, self.notes = {}, []
        return latest, notes


def _work(
    runner: TrialRunner, units: TrialUnits, asked: bytes, reports: Any, loaded: list, expected: dict[str, str | None]
) -> Ended:
    """A task: run one trial. ValueError if this machine has other versions, or does not see the run directory."""
    if (here := _versions()) != expected:
        different = [f"{name} {here[name]}, not {expected[name]}" for name in here if here[name] != expected[name]]
        raise ValueError(f"--executor ray: {platform.node()} has {', '.join(different)}; install the same everywhere")
    if _question(runner.store) != asked:
        remedy = "put --out on a folder that all machines share"
        raise ValueError(f"--executor ray: {platform.node()} does not see {runner.store.run}; {remedy}")
    plugins.restore(loaded)
    title, last = units.trial.title, 0.0

    def on_progress(share: float, words: str) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            reports.put.remote(title, "progress", (share, words))

    return attempted(runner, units, on_progress, lambda words: reports.put.remote(title, "note", words))


def _question(store: Store) -> bytes:
    """Content of question.json in the run directory; empty if it is not visible."""
    path = store.run / QUESTION
    return path.read_bytes() if path.exists() else b""


def _versions() -> dict[str, str | None]:
    return {name: versions()[name] for name in ("longitude", "python", "torch", "transformers")}


# ---- the cluster -----------------------------------------------------------------------------------------------------
@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected. ValueError if the address does not answer as Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    ray: Any = importlib.import_module("ray")  # an extra, which type checkers may lack
    address = address or os.environ.get("RAY_ADDRESS") or None
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:  # in this thread: what Ray starts on this machine ends with the thread that started it
        ray.init("local", include_dashboard=False, **options)
    else:
        _within(ANSWER, lambda: ray.init(address, **options), address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _within(seconds: float, call: Callable[[], Any], address: str) -> None:
    """Call a function. ValueError if it raises, or does not return in time."""
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        remedy = "name the port of its head, or start one with `ray start --head`"
        raise ValueError(f"--ray-address {address}: no answer as Ray within {seconds:.0f} seconds; {remedy}")
    if errors:
        raise ValueError(f"--ray-address {address}: {str(errors[0]).strip().partition(chr(10))[0]}") from errors[0]
