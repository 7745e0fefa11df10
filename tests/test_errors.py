"""Errors as data: the one sentence of every kind, which no other test pins; and the checks that raise them."""

import math
import pickle
import re
from inspect import signature
from typing import Literal

import pytest

import longitude as lg
from longitude import errors
from longitude.cli import main
from longitude.errors import FORMER, Positive, UsageError
from longitude.labels import parse_label
from tests.support import refused


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("alibi", "2 slopes", 3), "alibi: expected 2 slopes, got 3"),
        (UsageError("", "2 slopes", 3), "expected 2 slopes, got 3"),
        (UsageError("alibi", "2 slopes", 3, "pass num_heads="), "alibi: expected 2 slopes, got 3; pass num_heads="),
        (
            errors.unknown("bias", "alibbi", ["alibi", "t5"], "See list."),
            "unknown bias 'alibbi': did you mean 'alibi'? See list.",
        ),
        (errors.unknown("bias", 7, ["t5", "alibi"], "See list."), "unknown bias 7: there are: alibi, t5. See list."),
    ],
    ids=["plain", "nobody", "remedy", "near", "far"],
)
def test_the_sentence(error: UsageError, message: str) -> None:
    assert str(error) == message
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), vars(copy), str(copy)) == (UsageError, vars(error), message)
    assert isinstance(error, ValueError)


Size = Literal["small", "large"]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (errors.check_sizes, (1, 7), (0, -1, 1.0, True, "2", None)),
        (errors.check_positive, (1, 0.5), (0, -0.5, float("inf"), float("nan"), True, "2", None)),
        (errors.check_flags, (True, False), ("no", 0, 1, None)),
        (lambda who, **options: errors.check_choice(who, Size, **options), ("small", "large"), ("big", None, 1)),
    ],
    ids=["sizes", "positive", "flags", "choice"],
)
def test_what_a_check_says(check, good, bad) -> None:
    for value in good:
        check("alibi", width=value)
    for value in bad:
        with refused("width", what="alibi", got=repr(value)) as caught:
            check("alibi", fine=good[0], width=value)
        assert "width" in caught.value.expected and "fine" not in caught.value.expected


def test_a_choice_names_all() -> None:
    with refused("small", "large"):
        errors.check_choice("alibi", Size, width="big")


def test_prose_is_refused_by_the_helper() -> None:
    with pytest.raises(AssertionError, match="prose"), refused("expected two slopes"):
        raise UsageError("alibi", "two slopes", 3)
    with pytest.raises(AssertionError, match="width"), refused("width"):  # a part of a word is none
        raise UsageError("alibi", "widths", 3)
    with pytest.raises(AssertionError, match="got"), refused(got="4"):
        raise UsageError("alibi", "widths", 3)


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_says_what_to_use(name, capsys):
    """Attributes of every module that had some, mixers, and options of the command line."""
    if name.startswith("--"):
        assert main(["list", name]) == 2 and FORMER[name] in capsys.readouterr().err
        return
    for module in (lg, lg.attention, lg.hf, lg.models, lg.recurrent):
        with pytest.raises(AttributeError, match=re.escape(FORMER[name])):
            getattr(module, name)
    for build in (lg.mixer, lg.encoding):
        with pytest.raises(ValueError, match=re.escape(FORMER[name])):
            build(name)


def test_a_former_mixer_in_a_model_says_what_to_use():
    with pytest.raises(ValueError, match=re.escape(FORMER["nsa"])):
        lg.LongitudeConfig(mixer="nsa")
    with pytest.raises(ValueError, match=re.escape(FORMER["nsa"])):
        parse_label("rope+nsa:block=8")


def test_declared_types_are_bounds():
    """In annotations as text or as objects; what has another type, or is not passed, is not read."""

    def build(size: int, flag: "bool | None" = None, scale: "float | None" = None, eps: "Positive" = 1.0, name=0): ...

    declared = signature(build)
    errors.check_declared("build", declared, (3,), {"flag": None, "scale": -1.0, "eps": 0.5, "name": -1})
    errors.check_declared("build", declared, (), {"sise": 0})  # a TypeError of the call
    for given in (
        {"size": 0},
        {"size": None},
        {"size": 1, "flag": 0},
        {"scale": math.nan},
        {"scale": "1"},
        {"eps": 0.0},
    ):
        with refused("build", next(name for name, value in given.items() if value != 1)):
            errors.check_declared("build", declared, (), given)
