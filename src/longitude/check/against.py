"""Comparison of a checkpoint's positions with a GGUF file or a second checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longitude.checkpoints.compare import frequencies_of as of_rope, head_dim_of
from longitude.checkpoints.declared import declared_length, of_full_attention
from longitude.checkpoints.load import Source, open_source, require_shards, ropes_of
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.rotation import convert_layout
from longitude.positions.scaling import DynamicNTK, LongRoPE
from longitude.positions.scaling.base import Follows
from longitude.serving.gguf import GGUF, LONG, SHORT, Divided

Change = Callable[[Tensor], Tensor]

SEPARATE = ("q_proj", "k_proj")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
FUSED_BY_HEAD, FUSED_BY_KIND = "query_key_value", "qkv_proj"
FORMS = {
    "interleaved": "the same, rows reordered from half to interleaved",
    "half": "the same, rows reordered from interleaved to half",
}
"""Description of weights with rows in another rotary layout, by that layout."""
FREQUENCIES_EQUAL = 1e-4
"""Largest relative difference of frequencies that count as equal; lists of factors are float32."""
NOT_ROTATED = 1e-12
"""Largest frequency in radians per position that counts as no rotation: some lists divide such pairs by 1e30."""
ROUNDED, QUANTIZED = 1e-2, 0.2
"""Largest differences from half precision and from quantization, relative to the largest number of a weight."""


@dataclass(frozen=True)
class Fact:
    """A property of both sides, for comparison.

    Args:
        name: Name of the property.
        here: Value of the checkpoint; None if it has none.
        there: Value of the other checkpoint.
        differs: Whether the values contradict each other; a missing value contradicts nothing.
    """

    name: str
    here: Any
    there: Any
    differs: bool


def against(model: str | Path, other: str | Path) -> list[Fact]:
    """Compare a checkpoint's positions with those of a GGUF file or another checkpoint.

    Args:
        model: Folder of a Hugging Face checkpoint, or a name on the hub.
        other: A .gguf file, or another checkpoint.

    Returns:
        A Fact for each property that one of the two has. The last is about the weights of queries and keys: the same, the same
        in the other rotary layout, or others.

    Raises:
        ValueError: for a file that cannot be read.
    """
    source, place = open_source(str(model)), Path(other)
    if place.suffix == ".gguf":
        file = GGUF(place)
        facts, frequencies, weights = file.facts(), file.frequencies(), gguf_layouts(source, file)
    else:
        theirs = open_source(str(other))
        tensors = {name: partial(_read, tensor.shard, name) for name, tensor in require_shards(theirs.folder).items()}
        rounding = 0.0 if source.dtype == theirs.dtype else ROUNDED
        facts, frequencies = facts_of(theirs), frequencies_of(theirs)
        weights = weights_fact(source, tensors, rounding)
    same = frequency_facts(frequencies_of(source), frequencies)
    return [*_with_frequencies(compared(facts_of(source), facts), same), weights]


def facts_of(source: Source) -> dict[str, Any]:
    """Properties of a checkpoint's configuration, by the names of `GGUF.facts`."""
    config = source.config
    heads = getattr(config, "num_attention_heads", None)
    facts: dict[str, Any] = {
        "layers": getattr(config, "num_hidden_layers", None),
        "heads of queries": heads,
        "heads of keys": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim_of(config),
        "declared length": declared_length(config),
        "window": getattr(config, "sliding_window", None),
    }
    if source.kind != "rotary":
        return facts
    read = ropes_of(source)
    rope = of_full_attention(read)
    scaling = rope.scaling
    windows = None if isinstance(read, RopeConfig) else read.get("sliding_attention")
    return facts | {
        "rotated dimensions": rope.rotary_dim(facts["head_dim"]),
        "base": rope.base,
        "scaling": "none" if scaling is None else scaling.name,
        "factor": getattr(scaling, "factor", None),
        "attention factor": 1.0 if scaling is None else scaling.factors()[0],
        "original length": getattr(scaling, "original_max_length", None),
        "beta fast": getattr(scaling, "beta_fast", None),
        "beta slow": getattr(scaling, "beta_slow", None),
        "base of windows": None if windows is None else windows.base,
    }


def frequencies_of(source: Source) -> dict[str, Divided]:
    """Rotary frequencies of layers with full attention, for short and long sequences."""
    if source.kind != "rotary":
        return {}
    rope, head_dim = of_full_attention(ropes_of(source)), head_dim_of(source.config)
    original = rope.scaling.original_max_length if isinstance(rope.scaling, Follows) else None
    lengths = {SHORT: original}
    if isinstance(rope.scaling, LongRoPE):
        lengths[LONG] = rope.scaling.original_max_length + 1
    return {kind: Divided(rope.base, of_rope(rope, head_dim, n).inverse) for kind, n in lengths.items()}


def frequency_facts(here: Mapping[str, Divided], there: Mapping[str, Divided]) -> list[Fact]:
    """The frequencies that both sides end with, pair by pair: the pair that differs most, or how many are the same."""
    facts = []
    for kind in dict.fromkeys([*here, *there]):
        # A side with one list uses it at every length.
        ours, theirs = (side.get(kind, side.get(SHORT)) for side in (here, there))
        if ours is None or theirs is None:
            pairs = [None if side is None else f"{len(side.inverse)} pairs" for side in (ours, theirs)]
            facts.append(Fact(kind, *pairs, differs=False))
        elif len(ours.inverse) == len(theirs.inverse):  # else the rotated dimensions differ, which is a fact of its own
            larger = theirs.inverse.maximum(ours.inverse).clamp(min=NOT_ROTATED)
            off = (theirs.inverse - ours.inverse).abs() / larger
            pair = int(off.argmax())
            if float(off[pair]) <= FREQUENCIES_EQUAL:
                facts.append(Fact(kind, f"{len(off)} pairs", "the same", False))
            else:
                facts.append(Fact(kind, ours.of_pair(pair), theirs.of_pair(pair), True))
    return facts


def _with_frequencies(facts: list[Fact], frequencies: list[Fact]) -> list[Fact]:
    """All facts. If frequencies are equal, different scalings do not contradict, except DynamicNTK: it follows the length."""
    same = bool(frequencies) and all(fact.there == "the same" for fact in frequencies)
    named = [
        replace(fact, differs=False)
        if same and fact.name == "scaling" and DynamicNTK.name not in (fact.here, fact.there)
        else fact
        for fact in facts
    ]
    return [*named, *frequencies]


def compared(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Fact]:
    """A Fact for each name with a value on one side."""
    names = dict.fromkeys([*here, *there])
    facts = [(name, here.get(name), there.get(name)) for name in names]
    return [Fact(name, a, b, _contradict(a, b)) for name, a, b in facts if (a, b) != (None, None)]


def _contradict(here: Any, there: Any) -> bool:
    if here is None or there is None:
        return False
    if isinstance(here, int | float) and isinstance(there, int | float):
        return abs(here - there) > 1e-5 * max(abs(here), abs(there))
    return here != there


# ---- weights ---------------------------------------------------------------------------------------------------------
def _read(shard: Path, name: str) -> Tensor:
    with safe_open(shard, framework="pt") as file:
        return file.get_tensor(name)


def weights_fact(source: Source, theirs: Mapping[str, Callable[[], Tensor]], rounding: float) -> Fact:
    """Whether the other's weights of queries and keys are those of the checkpoint, up to the rotary layout."""
    dim = head_dim_of(source.config)
    rotated = facts_of(source).get("rotated dimensions", dim)
    tensors = require_shards(source.folder)
    changes = {to: layout_changes(tensors, source.config, dim, rotated, to) for to in FORMS}
    common = [name for name in tensors if name in theirs and name in changes["half"]]
    if not common:
        return Fact("queries and keys", None, None, False)
    kinds: set[str] = set()
    for name in common:
        ours, other = _read(tensors[name].shard, name).float(), theirs[name]().float()
        forms = {"the same": ours} | {FORMS[to]: change[name](ours) for to, change in changes.items()}
        allowed = rounding * float(ours.abs().max())
        near = [
            form for form, x in forms.items() if x.shape == other.shape and float((x - other).abs().max()) <= allowed
        ]
        kinds.add(near[0] if near else "other weights")
    differs = kinds != {"the same"}
    return Fact("queries and keys", "expected the same" if differs else None, ", ".join(sorted(kinds)), differs)


def gguf_layouts(source: Source, file: GGUF) -> Fact:
    """Weights of a GGUF file, in the layout that llama.cpp rotates for its architecture."""
    tensors = {name: (lambda tensor=tensor: tensor) for name, tensor in file.rotation_weights()}
    fact = weights_fact(source, tensors, ROUNDED if file.exact else QUANTIZED)
    pairs = file.facts()["pairs"]
    if fact.there is None or pairs is None:
        return fact
    right = FORMS["interleaved"] if pairs == "interleaved" else "the same"
    differs = fact.there != right
    return Fact(fact.name, f"expected {right}" if differs else None, fact.there, differs)


# ---- the tensors that make queries and keys, in another rotary layout ------------------------------------------------
def layout_changes(names: Iterable[str], config: Any, head_dim: int, rotary_dim: int, to: str) -> dict[str, Change]:
    """Conversions by tensor name; empty if the weights of queries and keys are unknown.

    names: names of all tensors. rotary_dim: number of leading dimensions of each head that rotate.
    """
    change = partial(convert_layout, head_dim=head_dim, to=to, rotary_dim=rotary_dim)
    parts = {name: name.split(".") for name in names}
    if any("kv_a_proj" in name for name in parts):  # latent attention
        return {}

    def all_of(kinds: tuple[str, ...], change: Change) -> dict[str, Change]:
        return {name: change for name, path in parts.items() if path[-2:-1] and path[-2] in kinds}

    if changes := all_of(SEPARATE, change):
        return changes | {name: change for name, path in parts.items() if set(path) & {*NORMS}}
    if config.model_type.startswith("gpt_neox"):
        return all_of((FUSED_BY_HEAD,), partial(_by_head, head_dim=head_dim, change=change))
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    rows = head_dim * (config.num_attention_heads + key_heads)
    return all_of((FUSED_BY_KIND,), partial(_by_kind, rows=rows, change=change))


def _by_head(weight: Tensor, head_dim: int, change: Change) -> Tensor:
    """[heads * 3 * head_dim, ...]: queries, keys and values of one head, then of the next."""
    heads = weight.unflatten(0, (-1, 3, head_dim))
    rotated = change(heads[:, :2].flatten(0, 2)).unflatten(0, (-1, 2, head_dim))
    return torch.cat([rotated, heads[:, 2:]], 1).flatten(0, 2)


def _by_kind(weight: Tensor, rows: int, change: Change) -> Tensor:
    """[all queries, all keys, all values]; rows: number of rows of queries and keys."""
    return torch.cat([change(weight[:rows]), weight[rows:]])
