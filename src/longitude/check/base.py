"""What a law of a checkpoint is, how laws rest on each other, and how all of them are tried on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from longitude.check.subject import Subject
from longitude.errors import unknown

Outcome = Literal["pass", "fail", "not applicable"]


class NotApplicable(Exception):
    """Raised by a law that says nothing about this model, with the reason."""


@dataclass(frozen=True)
class Finding:
    """What a law measured: it holds where `measured` is at most `threshold`.

    said: what a reader should know in either case. hint: what usually causes a failure, and where it begins. position:
    the first position at which the threshold is exceeded, where there is one.
    """

    measured: float
    threshold: float
    said: str = ""
    hint: str = ""
    position: int | None = None

    @property
    def holds(self) -> bool:
        return self.measured <= self.threshold < float("inf")  # and not NaN


@dataclass(frozen=True)
class Verdict:
    """What one law said of one model or encoding.

    measured, threshold: in the unit that `compares` names; None where nothing was measured, or where it is no finite
    number. reason: why it does not apply, or what else was seen. hint: only of a failure.
    """

    law: str
    compares: str
    outcome: Outcome
    measured: float | None = None
    threshold: float | None = None
    reason: str = ""
    hint: str = ""
    position: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Law:
    """name; compares: what is measured against what; rests_on: laws without which this one cannot hold: where one of them
    fails, a failure here is no finding of its own.
    """

    name: str
    compares: str
    examine: Callable[[Subject], Finding]
    rests_on: tuple[str, ...] = ()


def try_all(
    laws: Sequence[Law],
    wanted: Sequence[Law],
    subject: Subject,
    watch: Callable[[str, int, int], None],
    before: Sequence[Verdict] = (),
) -> list[Verdict]:
    """These of the wanted laws, in order, behind what the ones `before` said -> what all said so far. watch(law, done, all)
    is told of each before it is tried.
    """
    verdicts = {verdict.law: verdict for verdict in before}
    for law in laws:
        watch(law.name, len(verdicts), len(wanted))
        verdict = try_one(law, subject)
        broken = [name for name in law.rests_on if name in verdicts and verdicts[name].outcome == "fail"]
        if verdict.outcome == "fail" and broken:
            why = f"it rests on {broken[0]!r}, which fails; correct that first"
            verdict = Verdict(law.name, law.compares, "not applicable", verdict.measured, verdict.threshold, why)
        verdicts[law.name] = verdict
    return list(verdicts.values())


def try_one(law: Law, subject: Subject) -> Verdict:
    """One law, whatever others say. A model that raises breaks the law."""
    try:
        found = law.examine(subject)
    except NotApplicable as reason:
        return Verdict(law.name, law.compares, "not applicable", reason=str(reason))
    except MemoryError:
        raise
    except Exception as error:
        said = f"the model raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Verdict(law.name, law.compares, "fail", hint=said)
    numbers = finite(found.measured), finite(found.threshold)
    if found.holds:
        return Verdict(law.name, law.compares, "pass", *numbers, found.said)
    return Verdict(law.name, law.compares, "fail", *numbers, found.said, found.hint, found.position)


def finite(number: float | None) -> float | None:
    """None for what JSON has no number for."""
    return number if number is not None and abs(number) < float("inf") else None


def chosen(laws: Sequence[Law], names: Sequence[str] | None) -> list[Law]:
    """The laws of these names, in their order; all for None. ValueError for a name that no law has."""
    known = [law.name for law in laws]
    for name in names or ():
        if name not in known:
            raise unknown("law", name, known, f"all: {', '.join(known)}.")
    return [law for law in laws if names is None or law.name in names]
