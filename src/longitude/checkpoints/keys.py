"""The keys of a config.json: what they say of positions, whether they agree, and how they say something else.

`rope_parameters` is what transformers 5 writes and reads. For parameters that are the same in all layers its older keys stand
beside it with the same content, `rope_theta` and `rope_scaling` (`rotary_emb_base` in GPT-NeoX), so that transformers 4 turns
the same way. Parameters per layer type stay in the schema that the file had.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from longitude.checkpoints.source import LENGTHS, Source
from longitude.positions.hugging_face import RopeConfig, from_hugging_face, to_hugging_face

Ropes = RopeConfig | dict[str, RopeConfig | None]

BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
SHARES = ("partial_rotary_factor", "rotary_pct")


# ---- reading ---------------------------------------------------------------------------------------------------------
def ropes_of(source: Source) -> Ropes:
    """What transformers reads in the configuration, which must be what its file says. ValueError where keys contradict."""
    try:
        read = from_hugging_face(source.config)
        require_agreement(source.inner)
        said = from_hugging_face(filled(source.inner, read)) if isinstance(read, RopeConfig) else read
    except ValueError as error:
        raise ValueError(f"{source.folder / 'config.json'}: {error}") from error
    if said != read:
        raise ValueError(
            f"{source.folder / 'config.json'}: its keys say {said}, but transformers reads {read}; correct the names of its keys"
        )
    return read


def require_agreement(inner: Mapping[str, Any]) -> None:
    """ValueError where a key outside of rope_parameters or rope_scaling says another number than the same key inside."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = inner.get(name) or {}
        nested = parameters.get("full_attention")
        full = nested if isinstance(nested, Mapping) else parameters
        for keys in (BASES, SHARES):
            outside = next(((key, inner[key]) for key in keys if inner.get(key) is not None), None)
            inside = full.get(keys[0])
            if outside is not None and inside is not None and outside[1] != inside:
                raise ValueError(
                    f"{outside[0]} is {outside[1]}, but {keys[0]} in {name} is {inside}; remove the wrong one"
                )
        if {"type", "rope_type"} <= full.keys() and full["type"] != full["rope_type"]:
            raise ValueError(
                f"{name} has type {full['type']!r} and rope_type {full['rope_type']!r}; remove the wrong one"
            )


def filled(inner: Mapping[str, Any], read: RopeConfig) -> dict[str, Any]:
    """The file's keys, with what transformers' class adds where they are silent."""
    inside = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    added: dict[str, Any] = {}
    if not names_base(inner):
        added["rope_theta"] = read.base
    share = read.proportion if read.proportion != 1 else read.partial_rotary_factor
    if not any(inner.get(key) is not None for key in SHARES) and inside.get(SHARES[0]) is None and share != 1:
        added[SHARES[0]] = share
    if LENGTHS[0] not in inner:
        added[LENGTHS[0]] = next((inner[other] for other in LENGTHS[1:] if other in inner), None)
    return dict(inner) | added


def names_base(inner: Mapping[str, Any]) -> bool:
    """Whether the file itself says the base of its frequencies."""
    inside = [inner.get("rope_parameters") or {}, inner.get("rope_scaling") or {}]
    inside += [value for each in inside for value in each.values() if isinstance(value, Mapping)]
    return any(each.get(key) is not None for each in (inner, *inside) for key in BASES)


# ---- writing ---------------------------------------------------------------------------------------------------------
def with_ropes(source: Source, ropes: Ropes, head_dim: int) -> dict[str, Any]:
    """The text part of config.json, its keys in their order, with other rotary parameters."""
    inner = copy.deepcopy(source.inner)
    if not isinstance(ropes, RopeConfig):
        if "rope_parameters" in inner or "rope_scaling" not in inner and not names_base(inner):
            return inner | to_hugging_face(ropes, head_dim)
        full = ropes["full_attention"]
        assert full is not None
        said = to_hugging_face(full, head_dim, style="rope_scaling")
        base = next((key for key in BASES if key in inner), BASES[0])
        return inner | {base: said.pop("rope_theta")} | said
    said = to_hugging_face(ropes, head_dim)
    parameters = said["rope_parameters"]
    inner |= said
    if parameters["rope_type"] == "proportional":
        return inner  # transformers 4 never knew it
    neox = source.config.model_type.startswith("gpt_neox")
    inner["rotary_emb_base" if neox else next((key for key in BASES if key in inner), BASES[0])] = parameters[
        "rope_theta"
    ]
    if ropes.partial_rotary_factor != 1:
        inner["rotary_pct" if neox else SHARES[0]] = ropes.partial_rotary_factor
    if parameters["rope_type"] != "default":
        inner["rope_scaling"] = copy.deepcopy(parameters)
    elif "rope_scaling" in inner:
        inner["rope_scaling"] = None
    return inner


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) for every key that changes, nested ones as a.b; ABSENT for one that is not there."""
    rows = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(new, Mapping) and (isinstance(old, Mapping) or old is None or old is ABSENT):
            rows += [(f"{key}.{name}", a, b) for name, a, b in difference(old or {}, new)]
        elif old != new or type(old) is not type(new):
            rows.append((key, old, new))
    return rows


class _Absent:
    def __repr__(self) -> str:
        return "-"

    def __bool__(self) -> bool:
        return False


ABSENT = _Absent()
