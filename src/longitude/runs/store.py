"""Store of units with content addresses: a result is found again by all inputs that determine its numbers.

```text
RUN/question.json            the last question
RUN/units/KIND-LABEL-KEY/    a finished unit: what it made and unit.json (its inputs, checksums); renamed into place when whole
RUN/units/.KIND-KEY/         a unit in progress, locked by the process that works on it
```
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from longitude.errors import UsageError
from longitude.runs.files import (
    LOCK,
    TEMPORARY,
    UNIT,
    changed_file,
    checksums,
    empty,
    lock,
    make_folder,
    naming,
    place,
    read_json,
    regular,
    require_folder,
    require_plain,
    write_json,
)
from longitude.runs.machine import provenance

QUESTION, UNITS, RESULT = "question.json", "units", "result.json"
FORMAT = 1
"""Version of the files of a unit; raise it with a change that an older release would read wrongly."""
POLL_SECONDS = 0.2
"""Seconds between two checks of units that another process computes."""
KEY_DIGITS = 12
"""Hexadecimal digits of a key: 48 bits, so that a million units collide once in 500 runs."""


@dataclass(frozen=True)
class Unit:
    """A computation, identified by all inputs that determine its numbers.

    Args:
        kind: Kind of computation, such as "perplexity".
        label: Part of the folder's name for readers, without effect.
        inputs: JSON values: options, hashes of text, weights and plugins, keys of the units that it needs.
        version: Version of the computation; another version makes other units.
    """

    kind: str
    label: str = field(compare=False)
    inputs: Mapping[str, Any] = field(hash=False)
    version: int = 1

    @cached_property
    def key(self) -> str:
        """The hash of kind, version and inputs as canonical JSON."""
        return key_of({"kind": self.kind, "version": self.version, "inputs": self.inputs})

    @property
    def name(self) -> str:
        """The name of its finished folder."""
        readable = "".join(c if c.isalnum() or c in "._=" else "-" for c in self.label)[:80]
        return f"{self.kind}-{readable}-{self.key}"


def key_of(value: Any) -> str:
    """The key of a JSON value, the same on every machine."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_DIGITS]


def _remedy(folder: Path) -> str:
    return f"move {folder} away, and the same command computes it again"


class BusyError(Exception):
    """Another process works on the unit."""


Job = TypeVar("Job")
Result = TypeVar("Result")
Ends = Iterator[tuple[Job, Result | BusyError]]
"""Each job as soon as it ends, with its result, or with the BusyError that it raised."""


def one_by_one(run: Callable[[Job], Result], jobs: Sequence[Job]) -> Ends[Job, Result]:
    """The executor that runs one job after the other in this process."""
    for job in jobs:
        try:
            yield job, run(job)
        except BusyError as busy:
            yield job, busy


class Store:
    """The units of a run directory, for any number of processes at once.

    Args:
        run: The directory. Nothing is written before the first unit or question.
    """

    def __init__(self, run: Path):
        self.run, self.units = run, run / UNITS
        require_folder(self.units)
        self._sound: dict[tuple[str, str], Path] = {}  # finished units whose files were compared with their checksums

    def folder(self, unit: Unit) -> Path:
        """Folder of a finished unit."""
        return self.units / unit.name

    def unfinished(self, kind: str, key: str) -> Path:
        """Folder of a unit in progress: equal for all labels, so that no two processes compute the same unit.

        ValueError if a link stands in its place.
        """
        path = self.units / f".{kind}-{key}"
        require_folder(path)
        return path

    def find(self, kind: str, key: str) -> Path | None:
        """The folder of a finished unit, whatever its label is; None if it is not finished.

        Raises:
            ValueError: The folder is damaged (the inputs in it do not have the key in its name, or a file does not have its
                checksum), or a newer release wrote it.
        """
        if (folder := self._sound.get((kind, key))) is not None and folder.exists():
            return folder
        folder = next(iter(sorted(self.units.glob(f"{kind}-*-{key}"))), None)
        if folder is None:
            return None
        remedy = _remedy(folder)
        require_folder(folder)
        saved = read_json(folder / UNIT, remedy)
        if saved is None or key_of({name: saved.get(name) for name in ("kind", "version", "inputs")}) != key:
            raise ValueError(f"{folder} is damaged: its {UNIT} is missing, or of another unit; {remedy}")
        if (form := saved.get("format", 1)) != FORMAT:
            expected = f"a unit of format {FORMAT}, which this release reads"
            raise UsageError(str(folder), expected, f"format {form}", f"install a newer longitude, or {remedy}")
        if (name := changed_file(folder, saved.get("files"))) is not None:
            raise ValueError(f"{folder} is damaged: {name} is not as it was when the unit was finished; {remedy}")
        self._sound[kind, key] = folder
        return folder

    def holds(self, unit: Unit) -> bool:
        """Whether a unit is finished. ValueError if its folder is damaged."""
        return self.find(unit.kind, unit.key) is not None

    def is_busy(self, unit: Unit) -> bool:
        """Whether another process works on a unit now."""
        try:
            with self._held(unit, self.unfinished(unit.kind, unit.key)):
                return False
        except BusyError:
            return (self.unfinished(unit.kind, unit.key)).is_dir()

    @contextmanager
    def making(self, unit: Unit) -> Iterator[Path]:
        """The folder of a unit in progress, locked by this process; on leaving it is finished, on an error it is kept.

        Raises:
            BusyError: Another process works on the unit, or has just finished it.
        """
        unfinished = self.unfinished(unit.kind, unit.key)
        make_folder(self.units)
        make_folder(unfinished)
        with self._held(unit, unfinished):
            if self.holds(unit):
                shutil.rmtree(unfinished)
                raise BusyError(unit.name)
            require_plain(unfinished)  # a link would lead what is written or removed elsewhere
            empty(unfinished, TEMPORARY)
            yield unfinished
            with naming(self.folder(unit)):
                about = {"format": FORMAT, "kind": unit.kind, "version": unit.version, "inputs": unit.inputs}
                made = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **provenance()}
                write_json(unfinished / UNIT, about | {"files": checksums(unfinished), "made": made})
                place(unfinished, self.folder(unit))

    def map(
        self,
        jobs: Mapping[Job, Sequence[Unit]],
        run: Any,
        executor: Callable[[Any, Sequence[Job]], Ends[Job, Result]] = one_by_one,
    ) -> Iterator[tuple[Job, Result]]:
        """Run jobs that no process works on; wait for those of other processes, or take them over if these processes die.

        Args:
            jobs: The units that each job finds or makes. Jobs are independent of each other.
            run: What the executor runs for a job. It raises BusyError if another process works on a unit of the job.
            executor: executor(run, jobs) runs the jobs in an order, and on processes and machines, of its choice.

        Yields:
            Each job as soon as it ended here, with its result.
        """
        waiting = dict(jobs)
        while waiting:
            free = [job for job, units in waiting.items() if not any(map(self.is_busy, units))]
            if not free:
                sleep(POLL_SECONDS)
            for job, result in executor(run, free):
                if not isinstance(result, BusyError):
                    del waiting[job]
                    yield job, result

    def results(
        self,
        units: Sequence[Unit],
        run: Callable[[int, Path], Any],
        kind: Any,
        on_result: Callable[[int, Any], object] = lambda i, result: None,
    ) -> list[Any]:
        """The result of each unit, of which those that are not finished are computed.

        Args:
            units: Independent of each other.
            run: run(i, folder) computes unit i in its unfinished folder, which has the files of an interrupted attempt.
            kind: The type of the results, a dataclass of JSON values.
            on_result: Called with i and a result as soon as it is known.

        Raises:
            ValueError: A unit is damaged, or its result is of another type.
        """
        import msgspec  # `longitude report` of a run directory does not need it

        def folder_of(i: int) -> Path:
            if (folder := self.find(units[i].kind, units[i].key)) is not None:
                return folder
            with self.making(units[i]) as unfinished:
                write_json(unfinished / RESULT, msgspec.to_builtins(run(i, unfinished)))
            return self.folder(units[i])

        results: dict[int, Any] = {}
        for i, folder in self.map({i: [unit] for i, unit in enumerate(units)}, folder_of):
            try:
                results[i] = msgspec.convert(read_json(folder / RESULT, _remedy(folder), object), kind, str_keys=True)
            except msgspec.ValidationError as error:
                raise ValueError(f"{folder / RESULT}, as $: {error}; {_remedy(folder)}") from None
            on_result(i, results[i])
        return [results[i] for i in range(len(units))]

    @contextmanager
    def _held(self, unit: Unit, unfinished: Path) -> Iterator[None]:
        """Hold the lock of the unfinished folder. BusyError if another process holds it, or renamed the folder into place."""
        path = unfinished / LOCK
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(regular(path, os.O_RDWR | os.O_CREAT, "remove it"))
                lock(descriptor)
            except (FileNotFoundError, BlockingIOError):
                raise BusyError(unit.name) from None
            # Another process may have finished the unit between our opening the lock and holding it.
            if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
                raise BusyError(unit.name)
            yield

    # ---- the question ---------------------------------------------------------------------------------------------
    def ask(self, verb: str, question: Mapping[str, Any]) -> None:
        """Write the question of a command, whole or not at all. ValueError if the directory has something else."""
        self.require_place(verb)
        self.run.mkdir(parents=True, exist_ok=True)
        write_json(self.run / QUESTION, {"verb": verb, **question})

    def question(self) -> Any:
        """The last question; None if there is none."""
        return read_json(self.run / QUESTION, "remove it, and give the command again with its options")

    def require_place(self, verb: str) -> None:
        """ValueError unless the directory is new, empty, or has earlier results of this command."""
        out = self.run
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: there is a file of this name; choose another --out")
        # Another process may be writing the question, or was killed there.
        others = out.is_dir() and any(QUESTION not in path.name for path in out.iterdir())
        if others and not (out / QUESTION).exists() and not self.units.is_dir():
            raise ValueError(f"--out {out}: the directory has other files and no results; choose another --out")
        asked = self.question()
        if asked is not None and (before := asked.get("verb")) != verb:
            of = f"what `longitude {before}` wrote" if before else f"a {QUESTION} of another program"
            raise ValueError(f"--out {out}: the directory has {of}; choose another --out")

    def remove(self, units: Iterable[Unit]) -> None:
        """Remove these units, finished or not. ValueError if another process works on one."""
        for unit in units:
            if (folder := self.find(unit.kind, unit.key)) is not None:
                shutil.rmtree(folder)
            if (unfinished := self.unfinished(unit.kind, unit.key)).is_dir():
                try:
                    with self._held(unit, unfinished):
                        shutil.rmtree(unfinished)
                except BusyError:
                    raise ValueError(f"{unfinished} is being written by another process; wait for it") from None
