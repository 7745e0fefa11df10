"""Numbers and names in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any


def named(label: str) -> str:
    """A label inside a sentence. `none` there would read as a count: it is NoPE, as papers call it."""
    return "NoPE" if label in ("none", "nope") else label


def and_(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def percent(ratio: float | None, unit: str = "%") -> str:
    """0.421 -> +42%, -0.0123 -> −1.2%: signed, one digit after the point where it matters; empty for None."""
    if ratio is None:
        return ""
    number = 100 * ratio
    text = f"{number:+.1f}" if abs(number) < 9.95 else f"{number:+.0f}"
    return text.replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0") + unit


def count(number: int, thing: str) -> str:
    """1 seed, 2 seeds."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def far(longest: int, train_length: int) -> str:
    """How a length compares with the training length."""
    if longest <= train_length:
        return f"after training on {train_length}"
    times, rest = divmod(longest, train_length)
    return f"after training on {train_length}" if rest else f"{times} times the training length"


def legible(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A protocol for readers: {"batch_size": 8, "seeds": [0, 1]} -> [("batch size", "8"), ("seeds", "0, 1")]."""

    def words(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        if isinstance(value, Mapping):
            return ", ".join(f"{name}: {each}" for name, each in value.items())
        return "none" if value is None else f"{value:,}" if type(value) is int and value >= 10_000 else str(value)

    return [(name.replace("_", " "), words(value)) for name, value in values.items()]
