"""Trials as tasks of Ray, on this machine or a cluster. The process that waits owns the run directory.

A worker trains in a folder of its own and sends it back as bytes when the trial ends; with a storage that all machines see, it
trains there, so that a trial whose worker is killed continues from its newest checkpoint.
"""

import hashlib
import importlib.util
import io
import os
import platform
import shutil
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longitude import plugins
from longitude.runs.files import read_json
from longitude.runs.provenance import versions
from longitude.study.executors import ATTEMPTS, RunTrial
from longitude.study.trial import Status, Trial

ANSWER = 10
"""Seconds that an address has to answer at all, and then as Ray."""
PAUSE = 0.5
"""Seconds between two looks at what workers report."""


@dataclass(frozen=True)
class RayCluster:
    """Trials as Ray tasks. One whose worker is killed is tried again by Ray, on whatever machine is free.

    Attributes:
        address: Of a cluster: "HOST:6379" or "auto"; None: RAY_ADDRESS, or Ray on this machine alone.
        cpus: Of each trial.
        gpus: Of each trial, in fractions too.
        storage: A folder that all machines see.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    storage: Path | None = None

    def check(self) -> None:
        """ValueError where Ray is not installed, or the address does not answer."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--executor ray needs the package ray; install it with pip install 'longitude[ray]'")
        if (address := self.address or os.environ.get("RAY_ADDRESS")) and address != "auto":
            _require_answer(address)

    def map(self, run, trials, on_progress, note):
        self.check()
        with _connected(self.address) as ray:
            reports = ray.remote(num_cpus=0)(_Reports).remote()
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(_work)
            shared, loaded, here = ray.put(run), plugins.loaded(), _versions()
            pending: dict[Any, Trial] = {}
            for trial in trials:
                place = self._place(trial)
                packed = _pack(trial.folder)
                pending[task.remote(shared, trial, packed, place, reports, loaded, here)] = trial
            while pending:
                ready, _ = ray.wait(list(pending), timeout=PAUSE)
                latest, notes = ray.get(reports.take.remote())
                for words in notes:
                    note(words)
                for trial in pending.values():
                    if (now := latest.get(trial.name)) is not None:
                        on_progress(trial, *now)
                for reference in ready:
                    trial = pending.pop(reference)
                    try:
                        status, packed = ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        if isinstance(error.cause, ValueError):  # another version, or plugin, there
                            raise error.cause from None
                        yield trial, f"on its worker: {error.cause}"
                    except ray.exceptions.RayError as error:
                        words = str(error).strip().partition("\n")[0]
                        yield trial, f"Ray gave it up ({type(error).__name__}: {words})"
                    else:
                        yield trial, _install(trial, status, packed, self._place(trial))

    def _place(self, trial: Trial) -> Path | None:
        """The run directory in the storage; another one for every study."""
        if self.storage is None:
            return None
        run = trial.run.absolute()
        study = f"{platform.node()} {run} {(read_json(run / 'study.json') or {}).get('begun')}"
        return self.storage.absolute() / f"{run.name}-{hashlib.sha256(study.encode()).hexdigest()[:12]}"


# ---- on a worker -----------------------------------------------------------------------------------------------------
class _Reports:
    """An actor: what workers report, until it is taken."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.notes: list[str] = []

    def put(self, trial: Trial, kind: str, content: Any) -> None:
        if kind == "note":
            self.notes.append(content)
        else:
            self.latest[trial.name] = content

    def take(self) -> tuple[dict[str, Any], list[str]]:
        latest, notes = self.latest, self.notes
        self.latest, self.notes = {}, []
        return latest, notes


def _work(
    run: RunTrial, trial: Trial, packed: bytes, place: Path | None, reports: Any, loaded: list, expected: dict
) -> tuple[Status, bytes]:
    """A task: run one trial. Returns its folder as bytes, too; none where it is in the storage."""
    if (here := _versions()) != expected:
        different = [f"{name} {here[name]}, not {expected[name]}" for name in here if here[name] != expected[name]]
        raise ValueError(f"--executor ray: {platform.node()} has {', '.join(different)}; install the same everywhere")
    plugins.restore(loaded)
    with tempfile.TemporaryDirectory() as temporary:
        working = replace(trial, run=place or Path(temporary))
        if not working.folder.exists():
            _unpack(packed, working.folder)
        last = 0.0

        def on_progress(share: float, words: str) -> None:
            nonlocal last
            if time.monotonic() - last > PAUSE:
                last = time.monotonic()
                reports.put.remote(trial, "progress", (share, words))

        status = run(
            trial=working, on_progress=on_progress, note=lambda words: reports.put.remote(trial, "note", words)
        )
        return status, _pack(working.folder) if place is None else b""


def _versions() -> dict[str, str | None]:
    return {name: versions()[name] for name in ("longitude", "python", "torch", "transformers")}


# ---- folders as bytes ------------------------------------------------------------------------------------------------
def _pack(folder: Path) -> bytes:
    """The files of a folder, if there is one."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            archive.add(path, path.name)
    return content.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    """A folder, whole or not at all."""
    with _new(folder) as unfinished, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(unfinished, filter="data")


def _install(trial: Trial, status: Status, packed: bytes, place: Path | None) -> Status:
    """What a worker made, into the run directory."""
    if place is None:
        _unpack(packed, trial.folder)
        return status
    there = replace(trial, run=place).folder
    with _new(trial.folder) as unfinished:
        shutil.copytree(there, unfinished, dirs_exist_ok=True)
    shutil.rmtree(there, ignore_errors=True)
    return status


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `folder`."""
    unfinished = folder.with_name(f".{folder.name}.{platform.node()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# ---- the cluster -----------------------------------------------------------------------------------------------------
@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected. ValueError where the address does not answer as Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
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


def _require_answer(address: str) -> None:
    """ValueError unless something listens at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"--ray-address: expected HOST:PORT, ray://HOST:PORT or auto, got {address!r}")
    end, error = time.monotonic() + ANSWER, None
    while (left := end - time.monotonic()) > 0:
        try:
            return socket.create_connection((host, int(port)), timeout=left).close()
        except OSError as refused:
            error = refused
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
    raise ValueError(
        f"--ray-address {address}: no answer within {ANSWER} seconds ({error}); start one with `ray start --head`"
    )


def _within(seconds: float, call: Callable[[], Any], address: str) -> None:
    """Call it. ValueError where it raises, or does not return in time."""
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
        raise ValueError(
            f"--ray-address {address}: no answer as Ray within {seconds:.0f} seconds; is it the port of its head?"
        )
    if errors:
        raise ValueError(f"--ray-address {address}: {str(errors[0]).strip().partition(chr(10))[0]}") from errors[0]
