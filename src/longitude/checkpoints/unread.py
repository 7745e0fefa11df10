"""Keys of a config.json that change nothing: the class reads neither them nor what follows from them, in a recorded pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from longitude.checkpoints.declared import decoded, keys_of, text_part
from longitude.checkpoints.observed import observe, parts_of
from longitude.positions.config_keys import (
    ABOUT_POSITION,
    BY_LAYER,
    INSIDE,
    LENGTHS,
    NOTHING,
    OF_CLASSES,
    SCHEMAS,
    UNDERSTOOD,
    WIDTH,
    is_foreign,
)
from longitude.positions.hugging_face import NotUnderstood
from longitude.runs.quiet import quiet

ROTARY = ("rope", "rotary", "theta", "position")
"""Parts of the names of keys about positions, beside ABOUT_POSITION."""
USUAL = (None, False, "default", "mrope")
"""Values that ask for no more than attention and rotation without options; 0 equals False."""
Place = tuple[str, ...]
"""A key, after the keys of the dicts that it stands in."""


def unread_places(raw: Mapping[str, Any], config: Any) -> list[str]:
    """Keys about positions that ask for something and change nothing that the class of a config reads.

    A key that the class would read if a flag were changed, or a list removed, is not among them.

    Args:
        raw: Keys as they are written.
        config: As transformers reads them.

    Returns:
        The places of the keys, such as rope_scaling.factor.

    Raises:
        NotUnderstood: The class does not run without weights.
    """
    raw, kind = text_part(raw), type(config)
    unread = [place for place in places(raw) if asks(raw, place) and not reaches(raw, place, kind)]
    for key, value in raw.items() if unread else ():
        if isinstance(value, bool | list) and (key in BY_LAYER or is_about((key,))):
            other = changed(raw, (key,), not value if isinstance(value, bool) else None)
            unread = [place for place in unread if place == (key,) or not reaches(other, place, kind)]
    return [".".join(place) for place in unread]


def nothing_reads(keys: Sequence[str], config: Any) -> str:
    """A sentence about unread keys; empty without them."""
    return f"nothing in transformers' {config.model_type} reads {', '.join(keys)}" if keys else ""


def unread_sentence(raw: Mapping[str, Any], config: Any) -> str:
    """`nothing_reads` of the unread keys that Longitude does not know either; empty if the class cannot be tried."""
    with suppress(NotUnderstood):
        return nothing_reads([key for key in unread_places(raw, config) if is_strange(key, config)], config)
    return ""


def is_strange(place: str, config: Any) -> bool:
    """Whether neither Longitude nor the config of a class has a key."""
    *above, key = place.split(".")
    if above and above[0] in SCHEMAS:
        return is_foreign(key)
    return key.lstrip("_") not in {
        *UNDERSTOOD,
        *OF_CLASSES,
        *NOTHING,
        WIDTH,
        *keys_of(getattr(config, above[0]) if above else config),
    }


def is_read(raw: Mapping[str, Any], key: str, config: Any) -> bool:
    """Whether the class of a config reads a key, or what follows from it; False for a class that does not run without weights."""
    with suppress(NotUnderstood):
        return reaches(raw, tuple(key.split(".")), type(config))
    return False


def places(raw: Mapping[str, Any], above: Place = ()) -> Iterator[Place]:
    """The places of all values, in the dicts of rope parameters and of attention, too."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and (above or key in (*SCHEMAS, INSIDE)):
            yield from places(value, (*above, key))
        elif isinstance(key, str):  # other keys are labels of classes
            yield *above, key


def asks(raw: Mapping[str, Any], place: Place) -> bool:
    """Whether a key is about positions, and asks for something."""
    # Published files of Qwen keep the numbers of a window that this flag turns off.
    off = "window" in place[0] and raw.get("use_sliding_window") is False
    return is_about(place) and not off and value_at(raw, place) not in USUAL


def is_about(place: Place) -> bool:
    """Whether a key is about positions, other than a length."""
    named = any(ABOUT_POSITION.search(key) or any(part in key for part in (*ROTARY, "window")) for key in place)
    return place[0] not in LENGTHS and (named or place[0] in SCHEMAS)


def value_at(values: Any, place: Place) -> Any:
    for key in place:
        values = values[key]
    return values


def changed(raw: Mapping[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """Keys with another value at a place; None: without it."""
    key, *below = place
    if below:
        value = changed(raw[key], (*below,), value)
    return {name: entry for name, entry in raw.items() if name != key} | ({} if value is None else {key: value})


def reaches(raw: Mapping[str, Any], place: Place, kind: Any) -> bool:
    """Whether a class reads a key, or what its config makes of it."""
    try:
        made = made_of(raw, kind)
    except Exception:
        return (
            True  # it refuses the keys that its own to_dict() has, as Bamba's: nothing is known, so nothing is blamed
        )
    read, before = observe(made).read, attributes(made)
    if ".".join((kind.attribute_map.get(place[0], place[0]), *place[1:])) in read:
        return True
    value = value_at(raw, place)
    others = [None, 2 * value] if isinstance(value, int | float) and value is not True else [None]
    for other in others:
        try:
            after = attributes(made_of(changed(raw, place, other), kind))
        except Exception:  # the class requires the key, or refuses another value
            return True
        if any(before.get(name) != after.get(name) for name in read):
            return True
    return False


def made_of(raw: Mapping[str, Any], kind: Any) -> Any:
    with quiet():
        return kind(**{key: value for key, value in decoded(raw).items() if key != "model_type"})


def attributes(config: Any) -> dict[str, Any]:
    """What a config has, by the names of `observe`: its attributes, those of configs in it, and its rope parameters."""
    parts = parts_of(config)
    values = {f"{above}{name}": value for above, part in parts.items() for name, value in vars(part).items()}
    values = {name: value for name, value in values.items() if f"{name}." not in parts}
    parameters = {name: value for name in SCHEMAS if isinstance(value := values.pop(name, None), Mapping)}
    return values | {".".join(place): value_at(parameters, place) for place in places(parameters)}
