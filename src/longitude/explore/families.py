"""What configurations of transformers leave out: the defaults of their classes, for the page that reads them in a browser."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longitude.checkpoints.config import LENGTH_KEYS
from longitude.checkpoints.quiet import quiet
from longitude.positions.config_keys import COMMON, OLD_TYPES, TYPES
from longitude.positions.scaling import SCHEMES

ROTARY = (
    "apertus arcee aria_text bitnet cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 falcon gemma gemma2 gemma3 "
    "gemma3_text glm glm4 gpt_neox gpt_oss granite granitemoe helium hunyuan_v1_dense llama mistral mistral3 mixtral "
    "nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"
).split()
LEARNED = "biogpt gpt2 gpt_bigcode opt".split()
"""Whose positions are a table: only the model knows, not its configuration."""
ALIBI = "bloom mpt".split()
BUCKETS = "t5 mt5".split()
KEYS = (
    "num_hidden_layers hidden_size num_attention_heads head_dim qk_rope_head_dim sliding_window use_sliding_window "
    "max_window_layers attention_chunk_size original_max_position_embeddings alibi relative_attention_num_buckets "
    "relative_attention_max_distance rope_parameters"
).split()
"""That a table about positions is made of."""


def tables() -> dict[str, Any]:
    """Plain data: the families, what their rope parameters are called, and the options of each scheme."""
    with quiet():
        families = {name: _family(name) for name in (*ROTARY, *LEARNED, *ALIBI, *BUCKETS)}
    return {
        "families": families,
        "types": {
            kind: {"scheme": scheme and scheme.name, "needed": needed, "optional": optional}
            for kind, (scheme, needed, optional) in TYPES.items()
        },
        "old_types": OLD_TYPES,
        "common": COMMON,
        "lengths": LENGTH_KEYS,
        "options": {
            name: {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(scheme)}
            for name, scheme in SCHEMES.items()
            if dataclasses.is_dataclass(scheme)
        },
    }


def _family(name: str) -> dict[str, Any]:
    kind = CONFIG_MAPPING[name]
    fresh = kind().get_text_config(decoder=True)
    if fresh.model_type != name:
        return {"text": fresh.model_type}
    found = {key: getattr(fresh, key) for key in (*KEYS, *LENGTH_KEYS) if hasattr(fresh, key)}
    derived = found.get("head_dim") is not None and _derived(kind, found)
    if derived:
        del found["head_dim"]
    return {
        "defaults": {key: value for key, value in found.items() if value is not None},
        "names": {ours: theirs for ours, theirs in fresh.attribute_map.items() if ours in found},
        "base": _base(fresh),
        "derived_head_dim": derived or found.get("head_dim", 0) is None,  # where it is null
        "fixed_head_dim": isinstance(getattr(kind, "head_dim", None), property),
        "kind": "learned" if name in LEARNED else "alibi" if name in ALIBI else None,
        "layer_types": _period(_layer_types(kind)),
        "pattern": _period(_layer_types(kind, sliding_window_pattern=7))
        == [*["sliding_attention"] * 6, "full_attention"],
        "window_layers": _layer_types(kind, use_sliding_window=True, sliding_window=8, max_window_layers=7)
        == [*["full_attention"] * 7, *["sliding_attention"] * 41],
    }


def _base(fresh: PreTrainedConfig) -> Any:
    """What it takes for rope_theta where none is written: a number, or one for each type of layers."""
    theirs = getattr(fresh, "default_theta", None)
    names = {"global": "full_attention", "local": "sliding_attention"}
    return {names[key]: base for key, base in theirs.items()} if isinstance(theirs, dict) else theirs


def _derived(kind: Any, found: dict[str, Any]) -> bool:
    """Whether its head_dim is the width over the heads, where it is not given."""
    size = kind.attribute_map.get("hidden_size", "hidden_size")
    return getattr(kind(**{size: 2 * found["hidden_size"]}), "head_dim", None) == 2 * found["head_dim"]


def _layer_types(kind: Any, **given: Any) -> list[str] | None:
    """Of 48 layers."""
    if "num_hidden_layers" in kind.attribute_map:
        return None
    return getattr(kind(num_hidden_layers=48, **given), "layer_types", None)


def _period(kinds: Sequence[str] | None) -> list[str] | None:
    """The shortest list that gives all of them when it is repeated."""
    if kinds is None:
        return None
    return next([*kinds[:n]] for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
