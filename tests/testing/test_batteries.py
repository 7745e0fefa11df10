"""The public face of both batteries, and the engine: names, options, results, laws of the user's own."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longitude as lg
from longitude import testing
from longitude.testing import LawBroken, mixers
from longitude.testing.engine import Battery, Measurement, try_laws
from longitude.testing.fixtures import learned_of
from tests.support import refused_calls
from tests.testing.broken_mixers import Decay


def test_check_takes_names_classes_functions_and_options() -> None:
    laws = {"causality", "state_dict"}
    encodings = "alibi", lg.ALiBi, lambda: lg.ALiBi(4), testing.example("alibi")
    for kind in (*encodings, "attention", Decay, lambda dim: Decay(dim), mixers.example(Decay, mode="parallel")):
        battery = testing if kind in encodings else mixers
        results = battery.check(kind, without=set(battery.laws()) - laws)
        assert set(results) == laws and {result.status for result in results.values()} == {"passed"}
    assert testing.example("rope", layout="half")().layout == "half"
    assert testing.example(lg.Rotary, layout="half", base=5.0)(base=7.0).base == 7.0
    assert mixers.example(Decay, chunk_size=3)(mode="recurrent").chunk_size == 3
    result = mixers.examine("forms", lambda dim: Decay(dim))
    assert result.status == "not applicable" and result.reason.startswith("it has one form")


test_check_refuses_what_it_cannot_mean = refused_calls([
    (lambda: testing.check("alibbi"), "'alibbi'", "'alibi'"),
    (lambda: testing.check("alibi", slope=1), "'slope'", "'slopes'"),
    (lambda: testing.check("alibi", without=("compiled",)), "'compiled'", "'compile'"),
    (lambda: testing.check(lg.ALiBi(4)), "name", "encoding"),
    (lambda: testing.check(lambda: nn.Linear(2, 2)), "Encoding", "Linear"),
    (lambda: mixers.check(lambda: nn.Linear(2, 2)), "Mixer", "Linear"),
])  # fmt: skip


def test_parameters_are_filled_and_fillings_differ_by_seed() -> None:
    for battery, names in ((testing, lg.list_encodings()), (mixers, lg.list_mixers())):
        for name in names:
            one, again, other = (learned_of(battery.example(name)(seed)) for seed in (0, 0, 1))
            for p in one:
                assert bool(one[p].ne(0).all()), (name, p)
                assert torch.equal(one[p], again[p]) and not torch.equal(one[p], other[p])


# ---- the engine ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def battery() -> Battery:
    battery = Battery("number")

    @battery.law(threshold=0.5)
    def small(subject):
        """The number is small, and its half too.

        Compared by `measure`.
        """
        testing.measure("its half", subject / 2)
        testing.measure("the number", subject)

    @battery.law(rests_on=("small",))
    def tiny(subject):
        """The number is tiny."""
        return Measurement(subject, 0.1, "it was given", "it is large", position=3)

    @battery.law()
    def whole(subject):
        """The number is whole."""
        if not isinstance(subject, int):
            raise testing.DoesNotApply("it is no integer")

    @battery.law(needs=("no_such_package",))
    def never(subject):
        """Never tried."""

    return battery


def test_a_result_has_the_number_nearest_to_its_threshold_and_the_reason(battery: Battery) -> None:
    results = try_laws(battery.chosen(), 0.05)
    assert [(r.status, r.measured, r.threshold, r.reason) for r in results.values()] == [
        ("passed", 0.05, 0.5, ""),
        ("passed", 0.05, 0.1, "it was given"),
        ("not applicable", None, None, "it is no integer"),
        ("not applicable", None, None, "it needs no_such_package: pip install 'longitude[models]'"),
    ]
    assert results["small"].claim == "The number is small, and its half too"
    broken = battery["tiny"](0.3)
    assert (broken.status, broken.reason, broken.position) == ("failed", "it is large", 3)
    with pytest.raises(LawBroken, match=r"0\.3 breaks the law 'tiny': it is large"):
        broken.require("0.3")


def test_a_law_that_rests_on_a_broken_one_does_not_apply(battery: Battery) -> None:
    called: list[tuple[str, int, int]] = []
    small, tiny, *_ = try_laws(battery.chosen(), 0.8, lambda *args: called.append(args)).values()
    assert (small.status, small.measured, small.threshold) == ("failed", 0.8, 0.5)
    assert small.reason == "the number: differs by 8.00e-01, more than 5e-01"
    assert (tiny.status, tiny.measured) == ("not applicable", 0.8) and "rests on 'small'" in tiny.reason
    assert called == [("small", 0, 4), ("tiny", 1, 4), ("whole", 2, 4), ("never", 3, 4)]


def test_what_is_raised_breaks_a_law_and_what_is_not_finite_is_none(battery: Battery) -> None:
    raised = battery["small"]("a word")
    assert raised.status == "failed" and raised.reason.startswith("it raised TypeError: unsupported operand")
    lost = battery["tiny"](float("nan"))
    assert lost.status == "failed" and lost.as_dict()["measured"] is None
    assert not Measurement(1.0, float("inf")).holds


class RaisesItself(lg.NoPosition):
    """What its own code raises is a finding, whatever it is, and whatever it calls of Python's library."""

    def __init__(self, how: str = "its own"):
        super().__init__()
        self.how = how

    def terms(self, context: Any) -> Any:
        if self.how == "its own":
            raise UnicodeError("raised here")
        if self.how == "of a file":
            return Path("/no/such/file").read_text()
        if self.how == "while it handles another":
            try:
                import no_such_package  # type: ignore[import-not-found]  # noqa: F401
            except ImportError:
                raise TypeError("raised here") from None
        if self.how == "of a package":
            return torch.load("/no/such/file")
        raise MemoryError


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("its own", "failed"),
        ("of a file", "failed"),
        ("while it handles another", "failed"),
        ("of a package", "unknown"),
        ("of memory", "unknown"),
    ],
)
def test_only_what_its_own_code_raises_is_a_finding(how: str, status: str) -> None:
    """causality calls the encoding, random_calls makes a LawBroken of whatever is raised."""
    for law in ("causality", "random_calls"):
        assert testing.laws()[law](testing.example(RaisesItself, how=how)).status == status


@pytest.mark.parametrize("subject", [torch.load, open])
def test_what_a_compiler_or_the_law_itself_raises_is_no_finding(battery: Battery, subject: Any) -> None:
    """torch's compiler raises its own error, with the one that caused it behind it (as of sources in an ASCII locale)."""

    @battery.law()
    def compiles(read):
        """It compiles."""
        if read is open:
            Path("/no/such/file").read_text()
        torch.compile(torch.sin, backend=lambda graph, inputs: read("/no/such/file"))(torch.ones(1))

    found = battery["compiles"](subject)
    assert found.status == "unknown" and "/no/such/file" in found.reason
    with pytest.raises(RuntimeError, match="could not be judged"):
        found.require()


def test_a_law_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing.examples.ENCODING_LAWS, "added", testing.laws())

    @testing.law(threshold=1e-12)
    def symmetric(build):
        """A bias of the past is that of the future."""
        offset = torch.arange(-5, 6)
        for term in build().terms({}):
            testing.close("both directions", term.at(offset), term.at(-offset))

    assert testing.examine("symmetric", "alibi").status == "passed"
    with pytest.raises(LawBroken, match="clipped breaks the law 'symmetric': both directions: differs by"):
        testing.examine("symmetric", "clipped")
    assert ("alibi", "symmetric") in testing.cases()


@pytest.mark.slow
def test_the_laws_of_encodings_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = testing.examine("chunks", "alibi")
    assert result.status == "not applicable" and result.reason.startswith("it needs transformers")
    assert testing.examine("shift", "alibi").status == "passed"
