"""Blind controls: models that see a small part of a training window. Their change with the length is the zero of the scale.

A loss that stays level shows nothing by itself: that of a model which never sees far stays level, too.
"""

from collections.abc import Sequence

from longitude.labels import CONV, Part, layers_in

SHARE = 4
"""A blind model's window is at most this part of the training length."""


def window_of(label: str) -> int | None:
    """The size of the window that every layer of a label X+window:size=W has, and no other mixer; else None."""
    from longitude.attention.mixer import MIXERS

    def of_layer(parts: list[Part]) -> int | None:
        *encodings, last = parts
        name, _, size = ",".join(last.options).partition("=")
        others = any(part.name in MIXERS or part.name == CONV for part in encodings)
        return int(size) if (last.name, name) == ("window", "size") and size.isdigit() and not others else None

    sizes = [of_layer(parts) for parts in layers_in(label)]
    return None if None in sizes else max(size for size in sizes if size is not None)


def is_blind(label: str, trained: int) -> bool:
    """Whether a label is a blind control at a training length."""
    size = window_of(label)
    return size is not None and SHARE * size <= trained


def seen(label: str, layers: int) -> int:
    """Bytes that a blind model of this many layers predicts from: each layer looks size - 1 further back."""
    return 1 + layers * ((window_of(label) or 1) - 1)


def control_of(label: str, labels: Sequence[str], trained: int) -> str | None:
    """The blind control of a label among others: the label with a window, else the first; None for one that is blind."""
    blind = [other for other in labels if is_blind(other, trained)]
    if label in blind:
        return None
    return next((other for other in blind if other.startswith(f"{label}+window:")), next(iter(blind), None))


def control_for(trained: int) -> str:
    """A label to add as the blind control of a study that has none."""
    return f"alibi+window:size={max(1, trained // SHARE)}"
