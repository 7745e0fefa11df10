"""The two batteries of this package, laws of encodings and laws of mixers; a law may be in both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from longitude.attention.mixer import list_mixers
from longitude.positions.base import list_encodings
from longitude.testing.engine import Battery, Law, Measurement, Result, Test
from longitude.testing.examples import Example, example, mixer_example


class PartBattery(Battery):
    """The laws of encodings, or of mixers, and how they are tried on one that is registered, a class or a function."""

    def __init__(self, noun: str, example: Callable[..., Example], registered: Callable[[], list[str]]):
        super().__init__(noun, "longitude.testing.battery")
        self.example, self.registered = example, registered

    def examine(self, law: str | Law, part: Any, **options: Any) -> Result:
        """Try a law on an encoding or mixer.

        Args:
            law: A Law, or its name.
            part: A registered name, a class, or a function that builds a fresh one at the toy size, SHAPES.
            options: Options to build it with.

        Returns:
            The Result: it passed, or does not apply.

        Raises:
            LawBroken: If the law is broken, or an unexpected error is raised.
            ValueError: For an unknown law, name or option.
        """
        law = self[law] if isinstance(law, str) else law
        build = self.example(part, **options)
        build()
        return law(build).require(build.name)

    def check(self, part: Any, *, without: Iterable[str] = (), **options: Any) -> dict[str, Result]:
        """Try every law on one encoding or mixer.

        Args:
            part: A registered name, a class, or a function that builds a fresh one at the toy size, SHAPES.
            without: Names of laws to leave out, such as "compile".
            options: Options to build it with.

        Returns:
            The Result of each law by its name: status, measured number, threshold, reason.

        Raises:
            LawBroken: For the first law that is broken, an AssertionError with the law and the measured number.
            ValueError: For an unknown law, name or option.
        """
        return {law.name: self.examine(law, part, **options) for law in self.chosen(without=without)}

    def cases(self) -> list[tuple[str, str]]:
        """(name, law) for everything registered, to parametrize a test with.

        Returns:
            Every pair of a registered name and a law's name.
        """
        return [(name, law) for name in self.registered() for law in self.laws()]


ENCODING_LAWS = PartBattery("encoding", example, list_encodings)
MIXER_LAWS = PartBattery("mixer", mixer_example, list_mixers)


def shared_law(**options: Any) -> Callable[[Test], Test]:
    """Decorator: a law of mixers that is one of encodings, too, which are tried in attention. options: those of Battery.law."""

    def add(test: Test) -> Test:
        @wraps(test)
        def in_attention(build: Example, **how: Any) -> Measurement | None:
            return test(build.in_attention(), **how)

        ENCODING_LAWS.law(**options)(in_attention)
        return MIXER_LAWS.law(**options)(test)

    return add
