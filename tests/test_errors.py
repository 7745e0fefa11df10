"""Errors as data: the one sentence of every kind, which no other test pins; and the checks that raise them."""

import pickle
from typing import Literal

import pytest

from longitude import errors
from longitude.errors import UsageError
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
        (errors.check_sizes, 1, 0),
        (errors.check_positive, 0.5, float("nan")),
        (lambda who, **options: errors.check_choice(who, Size, **options), "small", "big"),
    ],
)
def test_what_a_check_says(check, good, bad) -> None:
    check("alibi", width=good)
    with refused("width", what="alibi", got=repr(bad)) as caught:
        check("alibi", fine=good, width=bad)
    assert "width" in caught.value.expected and "fine" not in caught.value.expected


def test_prose_is_refused_by_the_helper() -> None:
    with pytest.raises(AssertionError, match="prose"), refused("expected two slopes"):
        raise UsageError("alibi", "two slopes", 3)
    with pytest.raises(AssertionError, match="width"), refused("width"):  # a part of a word is none
        raise UsageError("alibi", "widths", 3)
    with pytest.raises(AssertionError, match="got"), refused(got="4"):
        raise UsageError("alibi", "widths", 3)
