"""The engine of all laws: a Law is tried on a subject and gives a Result; a Battery is the laws of one kind of subject."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from inspect import getdoc, unwrap
from pathlib import Path
from pkgutil import iter_modules
from subprocess import SubprocessError
from traceback import walk_tb
from typing import Any, Literal, TypeVar, get_args

from longitude.errors import unknown

Status = Literal["passed", "failed", "not applicable", "unknown"]
STATUSES: tuple[Status, ...] = get_args(Status)
Test = TypeVar("Test", bound=Callable[..., Any])
OnLaw = Callable[[str, int, int], None]
"""Called with the name of a law, the number of laws before it, and the number of all laws."""


class DoesNotApply(Exception):
    """Raised by a law that claims nothing about its subject, with the reason."""


class Unknown(Exception):
    """Raised by a law that cannot judge its subject, with the reason: something of it is not understood."""


class LawBroken(AssertionError):
    """Error of a law that fails.

    Args:
        message: Place and size of the deviation.
        measurement: The measured number and its threshold, if there is one.
    """

    def __init__(self, message: str, measurement: Measurement | None = None):
        super().__init__(message)
        self.measurement = measurement


@dataclass(frozen=True)
class Measurement:
    """A number that a law measured, and the largest that it allows.

    Args:
        measured: The number, in the law's unit; for most laws the largest error relative to the largest number.
        threshold: The law passes if `measured` is at most this.
        note: A remark for a law that passes.
        cause: For a law that fails: the defect, its cause as far as an experiment shows it, and where it starts.
        position: The first position at which the threshold is exceeded, if there is one.
        whose: What causes a failure, if the law can tell; see Result.
    """

    measured: float
    threshold: float
    note: str = ""
    cause: str = ""
    position: int | None = None
    whose: str = ""

    @property
    def holds(self) -> bool:
        return self.measured <= self.threshold < float("inf")  # and not NaN


@dataclass(frozen=True)
class Result:
    """Result of a law for a subject.

    Args:
        law: The name of the law.
        claim: The claim of the law, in a sentence.
        status: "passed", "failed", "not applicable" or "unknown".
        measured: The number nearest to its threshold; None if nothing was measured, or no finite number.
        threshold: The largest number that the law allows.
        reason: Why it failed, does not apply or could not be judged; remarks if it passed.
        position: The first position at which the threshold is exceeded, if there is one.
        whose: What causes a failure, if known. For a checkpoint: "the file", "the class ..." or "the rule".
        waits_for: The failed law that this one rests on, and that must be corrected first; "" if there is none.
    """

    law: str
    claim: str
    status: Status
    measured: float | None = None
    threshold: float | None = None
    reason: str = ""
    position: int | None = None
    whose: str = ""
    waits_for: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def require(self, subject: str = "the subject") -> Result:
        """Return the result, or raise if the law failed or could not be judged.

        Args:
            subject: Name of the subject, for the message.

        Returns:
            The result.

        Raises:
            LawBroken: If the law failed.
            RuntimeError: If it could not be judged.
        """
        if self.status == "unknown":
            raise RuntimeError(f"{subject}: the law {self.law!r} could not be judged: {self.reason}")
        if self.status == "failed":
            raise LawBroken(f"{subject} breaks the law {self.law!r}: {self.reason}")
        return self


@dataclass(frozen=True)
class Law:
    """An invariant test for all subjects of a kind, with its tolerance.

    Args:
        name: Name by which the law is printed and selected.
        claim: The claim of the law, in a sentence.
        test: A function of the subject. It compares with `close` or `measure`, or returns a Measurement. It raises LawBroken
            if the law is broken and DoesNotApply if the law does not apply.
        threshold: Largest number that `close` and `measure` allow in it; None if it compares no numbers, or returns its
            threshold.
        needs: Packages that the test requires.
        rests_on: Laws that this law presupposes: if one of them failed, a failure of this law is not reported.
    """

    name: str
    claim: str
    test: Callable[..., Measurement | None]
    threshold: float | None = None
    needs: tuple[str, ...] = ()
    rests_on: tuple[str, ...] = ()

    def __call__(self, subject: Any, **options: Any) -> Result:
        """Try it.

        Args:
            subject: Argument of the test, such as an Example.
            options: Options of the test, such as lengths.

        Returns:
            The Result; a failure raises no error here.
        """
        for package in self.needs:
            try:
                import_module(package)
            except ImportError:
                return self._result("not applicable", reason=f"it needs {package}: pip install 'longitude[models]'")
        trial = _Trial(self.threshold)
        token = _trial.set(trial)
        try:
            measurement = self.test(subject, **options) or trial.nearest
        except DoesNotApply as reason:
            return self._result("not applicable", reason=str(reason))
        except Unknown as reason:
            return self._result("unknown", reason=str(reason))
        except Exception as error:
            if (outside := from_outside(error, self.test, subject)) is not None:
                return self._result("unknown", reason=outside)
            if isinstance(error, LawBroken):
                return self._result("failed", error.measurement, one_line(error))
            return self._result("failed", reason=f"it raised {in_words(error)}")
        finally:
            _trial.reset(token)
        if measurement is None or measurement.holds:
            return self._result("passed", measurement, "" if measurement is None else measurement.note)
        return self._result("failed", measurement, measurement.cause)

    def _result(self, status: Status, measurement: Measurement | None = None, reason: str = "") -> Result:
        if measurement is None:
            return Result(self.name, self.claim, status, reason=reason)
        position, whose = (measurement.position, measurement.whose) if status == "failed" else (None, "")
        numbers = finite(measurement.measured), finite(measurement.threshold)
        return Result(self.name, self.claim, status, *numbers, reason, position, whose)


def counted(results: Mapping[str, Result]) -> dict[Status, int]:
    """How many laws have each status, in the order of STATUSES."""
    numbers = Counter(result.status for result in results.values())
    return {status: numbers[status] for status in STATUSES}


# ---- measuring -------------------------------------------------------------------------------------------------------
@dataclass
class _Trial:
    """A law that is being tried: its threshold, and the number nearest to it so far."""

    threshold: float | None
    nearest: Measurement | None = None


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)


def measure(what: str, measured: float, threshold: float | None = None) -> None:
    """Compare a number with the threshold of the running law.

    Args:
        what: Name of the measured quantity, for the message.
        measured: The number.
        threshold: Threshold, if it differs from the law's.

    Raises:
        LawBroken: If the number is above the threshold.
    """
    trial = _trial.get() or _Trial(None)
    threshold = trial.threshold if threshold is None else threshold
    assert threshold is not None, f"{what}: the law has no threshold"
    measurement = Measurement(measured, threshold)
    if not measurement.holds:
        raise LawBroken(f"{what}: differs by {measured:.2e}, more than {threshold:.0e}", measurement)
    if trial.nearest is None or _share(measurement) > _share(trial.nearest):
        trial.nearest = measurement


def _share(measurement: Measurement) -> float:
    return measurement.measured / max(measurement.threshold, 1e-300)


def finite(number: float) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return number if abs(number) < float("inf") else None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)[:300]}"


# ---- whose an error is -----------------------------------------------------------------------------------------------
OUTSIDE = (OSError, UnicodeError, ImportError, SubprocessError)
"""Errors caused by the machine and its settings: files, the locale, packages, other programs."""
NO_TOOL = re.compile(r"find C compiler|working C\+\+ compiler|active drivers")
NO_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory")
"""Messages of errors that have no class in torch and Triton, or only a class of their compiler."""
STANDARD = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
PACKAGES = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]


def from_outside(error: BaseException, test: Callable[..., Any], subject: Any) -> str | None:
    """Words for an error of this machine that kept a law from running; None if the subject itself raised the error.

    The innermost frame outside of Python's library decides. In the code of the subject any error is a finding. In an installed
    package, an error of OUTSIDE shows nothing about the subject. Running out of memory never does.
    """
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, MemoryError) or NO_MEMORY.search(str(at)):
            return in_words(at)
        frames = [frame for frame, _ in walk_tb(at.__traceback__) if not _is_standard(frame.f_code.co_filename)]
        if frames and frames[-1].f_code is not unwrap(test).__code__ and _is_of(subject, frames[-1].f_code.co_filename):
            return None
        if isinstance(at, OUTSIDE) or NO_TOOL.search(str(at)):
            return in_words(at) + (f" (in {frames[-1].f_code.co_filename})" if frames else "")
        at = at.__cause__ or at.__context__
    return None


def _is_standard(file: str) -> bool:
    return file.startswith("<") or (_within(file, STANDARD) and not _within(file, PACKAGES))


def _is_of(subject: Any, file: str) -> bool:
    """Whether code is the subject's: of the module of its class, or of no package that is installed."""
    kind = getattr(subject, "factory", None) or type(getattr(subject, "model", subject))
    file_of_class = getattr(sys.modules.get(kind.__module__), "__file__", None)
    installed = [*PACKAGES, *(Path(sys.modules[name].__file__ or "").parent for name in ("longitude", "torch"))]
    return file == file_of_class or not _within(file, installed)


def _within(file: str, folders: Iterable[Path]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


# ---- batteries -------------------------------------------------------------------------------------------------------
class Battery:
    """The laws of one kind of subject, by name, in their order.

    Args:
        noun: Name of the kind of subject in messages.
        modules: Names of modules that add laws when imported. For a package, all modules in it: each file there is a law.
    """

    def __init__(self, noun: str, *modules: str):
        self.noun, self.modules = noun, list(modules)
        self.added: dict[str, Law] = {}

    def law(self, name: str | None = None, **options: Any) -> Callable[[Test], Test]:
        """Decorator: adds a test to the battery; the first line of its docstring is the claim.

        Args:
            name: The law's name; by default the test's.
            options: `threshold`, `needs` and `rests_on` of the Law.

        Returns:
            A decorator that returns the test unchanged.
        """

        def add(test: Test) -> Test:
            called = name or test.__name__
            claim = (getdoc(test) or "").partition("\n")[0].rstrip(".")
            self.added[called] = Law(called, claim, test, **options)
            return test

        return add

    def laws(self) -> dict[str, Law]:
        """All laws of the battery, your own included.

        Returns:
            Each Law by its name, in order.
        """
        while self.modules:
            module = import_module(self.modules.pop(0))
            for inner in iter_modules(getattr(module, "__path__", ())):
                import_module(f"{module.__name__}.{inner.name}")
        return dict(self.added)

    def __getitem__(self, name: str) -> Law:
        """The law of this name; ValueError with the nearest name if there is none."""
        known = self.laws()
        if name not in known:
            raise unknown("law", name, known, f"all: {', '.join(known)}.")
        return known[name]

    def chosen(self, names: Iterable[str] | None = None, without: Iterable[str] = ()) -> list[Law]:
        """The laws with these names (None: all), except those in `without`, in the battery's order."""
        names, left_out = (set(names) if names else None), {self[name].name for name in without}
        for name in names or ():
            self[name]
        return [law for name, law in self.laws().items() if (names is None or name in names) and name not in left_out]


def try_laws(
    laws: Iterable[Law],
    subject: Any,
    on_law: OnLaw = lambda name, done, total: None,
    results: dict[str, Result] | None = None,
    total: int | None = None,
) -> dict[str, Result]:
    """Try laws on a subject, in order: results by name.

    results: results of earlier laws, on which these may rest. total: number of all laws, earlier ones included.
    """
    laws, results = list(laws), {} if results is None else results
    for law in laws:
        on_law(law.name, len(results), total or len(laws))
        result = law(subject)
        failed = [name for name in law.rests_on if name in results and results[name].status == "failed"]
        if result.status == "failed" and failed:
            reason = f"it rests on {failed[0]!r}, which failed; correct that first"
            more = {"reason": reason, "position": None, "whose": "", "waits_for": failed[0]}
            result = replace(result, status="not applicable", **more)
        results[law.name] = result
    return results
