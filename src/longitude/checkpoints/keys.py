"""Rotary keys of a config.json for transformers 4 and 5: read if they agree, and written with other parameters.

transformers 5 writes and reads `rope_parameters`. If all layers have equal parameters, the older keys `rope_theta` and
`rope_scaling` (`rotary_emb_base` in GPT-NeoX) are written beside it with equal content, so that transformers 4 rotates equally.
Parameters per layer type stay in the schema of the file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from longitude.checkpoints.agreement import Ropes
from longitude.checkpoints.config import two_values
from longitude.checkpoints.reading import read, require_kept
from longitude.checkpoints.source import Source
from longitude.errors import UsageError
from longitude.positions.config_keys import BASES, LENGTHS, SHARES, WINDOWED, is_foreign, names_any
from longitude.positions.hugging_face import NotUnderstood, RopeConfig, read_ropes, to_hugging_face


class Absent(str):
    """Stands for the value of a key that is not there."""


ABSENT = Absent("-")


# ---- reading ---------------------------------------------------------------------------------------------------------
def ropes_of(source: Source) -> Ropes:
    """Rotary parameters of a checkpoint as its class rotates, which must match its config.json.

    Raises:
        ValueError: if keys contradict each other.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    file = source.folder / "config.json"
    try:
        for contradiction in two_values(source.inner):
            raise ValueError(contradiction)
        found = read(source.config).ropes
        if isinstance(found, RopeConfig):
            require_kept(read_ropes(with_defaults(source, found)), found, shares=True)
    except NotUnderstood as error:
        raise NotUnderstood(f"{file}: {error}", error.keys) from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return found


def of_full_attention(ropes: RopeConfig | Mapping[str, RopeConfig | None]) -> RopeConfig:
    """The rotation of layers with full attention. ValueError if none rotates, or if they have different schemes."""
    if isinstance(ropes, RopeConfig):
        return ropes
    full = {layer: rope for layer, rope in ropes.items() if rope is not None and layer not in WINDOWED}
    if not full:
        raise UsageError(
            "rope_parameters",
            "layers of full attention that rotate their keys",
            f"rotations of {' and '.join(layer for layer, rope in ropes.items() if rope is not None) or 'none'} alone",
            "distances within a window do not grow with the text: leave the rotation as it is, and raise "
            "max_position_embeddings in config.json",
        )
    if len({rope.scaling for rope in full.values()}) > 1:
        raise UsageError("", "one scheme for the layers of full attention", f"several: {', '.join(full)}")
    return next(iter(full.values()))


def with_defaults(source: Source, read: RopeConfig) -> dict[str, Any]:
    """The file's keys, with those that transformers' class adds if they are missing."""
    inner = source.inner
    added: dict[str, Any] = {} if names_any(inner, BASES) else {BASES[0]: read.base}
    share = read.proportion if read.proportion != 1 else read.partial_rotary_factor
    if not names_any(inner, SHARES) and share != 1:
        added[SHARES[0]] = share
    if LENGTHS[0] not in inner:
        added[LENGTHS[0]] = next((inner[other] for other in LENGTHS[1:] if other in inner), None)
    return dict(inner) | added


# ---- writing ---------------------------------------------------------------------------------------------------------
def with_ropes(source: Source, ropes: Ropes, head_dim: int) -> dict[str, Any]:
    """The text part of config.json, its keys in their order, with other rotary parameters."""
    inner = copy.deepcopy(source.inner)
    neox = source.config.model_type.startswith("gpt_neox")
    base = "rotary_emb_base" if neox else next((key for key in BASES if key in inner), BASES[0])
    if not isinstance(ropes, RopeConfig):
        if "rope_parameters" in inner or "rope_scaling" not in inner and not names_any(inner, BASES):
            return inner | _entries(source, ropes, head_dim)
        full = ropes["full_attention"]
        assert full is not None
        entries = to_hugging_face(full, head_dim, style="rope_scaling")
        return inner | {base: entries.pop("rope_theta")} | entries
    inner |= _entries(source, ropes, head_dim)
    parameters = inner["rope_parameters"]
    if parameters["rope_type"] == "proportional":
        return inner  # transformers 4 does not have it
    inner[base] = parameters["rope_theta"]
    if ropes.partial_rotary_factor != 1:
        inner["rotary_pct" if neox else SHARES[0]] = ropes.partial_rotary_factor
    if parameters["rope_type"] != "default":
        inner["rope_scaling"] = copy.deepcopy(parameters)
    elif "rope_scaling" in inner:
        inner["rope_scaling"] = None
    return inner


def _entries(source: Source, ropes: Ropes, head_dim: int) -> dict[str, Any]:
    """Entries of a config, with the rope parameters of its file that nothing here reads."""
    entries = to_hugging_face(ropes, head_dim)
    if "no_rope_layers" not in source.config.to_dict():  # its layer_types decide which layers rotate
        entries.pop("no_rope_layers", None)
    before = source.inner.get("rope_parameters") or source.inner.get("rope_scaling") or {}
    after = entries["rope_parameters"]
    pairs = [(before.get(layer), one) for layer, one in after.items() if isinstance(one, dict)] or [(before, after)]
    for old, new in pairs:
        new |= {key: value for key, value in (old or {}).items() if is_foreign(key)}
    return entries


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, after) for every key that changes, nested ones as a.b; ABSENT for one that is not there."""
    rows = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(new, Mapping) and (isinstance(old, Mapping) or old in (None, ABSENT)):
            rows += [(f"{key}.{name}", a, b) for name, a, b in difference(old if isinstance(old, Mapping) else {}, new)]
        elif old != new or type(old) is not type(new):
            rows.append((key, old, new))
    return rows
