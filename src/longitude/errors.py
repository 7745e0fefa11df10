"""Messages for users: what was expected, what came, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, valid: Iterable[str]) -> str | None:
    """The valid name that is most like the given one, if any is."""
    by_lower = {each.lower(): each for each in valid}
    near = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def unknown(kind: str, name: object, valid: Iterable[str], where: str) -> ValueError:
    """The error for a name nobody knows: the nearest valid one, and where the whole list is."""
    valid = sorted(valid)
    near = nearest(name, valid)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(valid)}."
    return ValueError(f"unknown {kind} {name!r}: {hint} {where}")
