"""Messages for users: what was expected, what came, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: object, valid: Iterable[str], where: str) -> ValueError:
    """The error for a name nobody knows: the nearest valid one, and where the whole list is."""
    valid = sorted(valid)
    near = get_close_matches(str(name), valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(valid)}."
    return ValueError(f"unknown {kind} {name!r}: {hint} {where}")
