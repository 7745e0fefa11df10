"""Which keys of a config its class reads, by a recorded pass; and that each of the others changes what the class computes."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.llama import modeling_llama

from longitude.checkpoints import observed
from longitude.checkpoints.declared import class_of, text_part
from longitude.checkpoints.observed import observe
from longitude.checkpoints.unread import asks, changed, made_of, places, unread_places, value_at
from tests.checkpoints.published import ORIGINAL, PUBLISHED, RELEASED

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "pad_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"type": "yarn", "factor": 2.0, ORIGINAL: 32, "beta_fast": 16, "beta_slow": 2}
NOBODY = {"rope_base": 1e6, "rope_parameters": PLAIN | {"warmth": 0.3}}
SLOPES = {"attn_config": {"alibi": True, "alibi_bias_max": 16}}
LATE = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
BY_LIST = {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}
UNREAD: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # a class, keys of its config, and those that change nothing
    "keys of nobody": ("llama", NOBODY, ["rope_base", "rope_parameters.warmth"]),
    "chunks of another class": ("llama", {"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk_attention_config"]),
    "slopes that MPT's class takes as 8": ("mpt", SLOPES, ["attn_config.alibi", "attn_config.alibi_bias_max"]),
    "a base of a class that adds a table": ("gpt2", {"rope_theta": 1e6}, ["rope_theta"]),
    "a border of another scheme": ("llama", {"rope_parameters": PLAIN | {"beta_fast": 16}}, ["rope_parameters.beta_fast"]),
    "a window of another class": ("gpt_neox", {"window_size": 32}, ["window_size"]),
    "a window that its cache alone reads": ("phi", {"sliding_window": 32}, []),
    "all of yarn": ("llama", {"rope_theta": 1e4, "rope_scaling": YARN}, []),
    "keys that make the list of layers": ("qwen3_next", {"full_attention_interval": 2, "partial_rotary_factor": 0.25}, []),
    "a window for layers that are not there": ("qwen2", LATE, [*LATE]),
    "a number of a window that is off": ("smollm3", {"use_sliding_window": False, "max_window_layers": 1}, []),
    "keys that a flag lets rest": ("qwen2", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, []),
    "a rule beside its list": ("smollm3", BY_LIST, []),
    "keys that a property reads": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, []),
    "a number of dimensions": ("gptj", {"rotary_dim": 8, "n_embd": 64, "n_head": 4}, []),
    "a key by its other name": ("recurrent_gemma", {"attention_window_size": 24, "num_key_value_heads": 1}, []),
}  # fmt: skip


def unread(kind: str, keys: dict[str, Any]) -> list[str]:
    raw = SMALL | {"model_type": kind} | keys
    return unread_places(raw, AutoConfig.for_model(**copy.deepcopy(raw)))


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.filterwarnings("ignore")
def test_keys_that_change_nothing(name):
    kind, keys, want = UNREAD[name]
    assert unread(kind, keys) == want


KEY = {"LlamaAttention": {"rope_warmth": 0.3}, "LlamaRotaryEmbedding": {"rope_parameters": PLAIN | {"warmth": 0.3}}}


@pytest.mark.parametrize("name", KEY)
def test_a_key_that_a_class_reads_is_not_among_them(name, monkeypatch):
    """Llama's, with a line more that reads it; as it is, nothing does."""
    kind = getattr(modeling_llama, name)
    make = kind.__init__

    def made(self, config, *more, **named):
        make(self, config, *more, **named)
        self.warmth = config.rope_parameters.get("warmth"), getattr(config, "rope_warmth", None)

    assert len(unread("llama", KEY[name])) == 1
    monkeypatch.setattr(kind, "__init__", made)
    observed._OBSERVED.clear()
    try:
        assert unread("llama", KEY[name]) == []
    finally:
        observed._OBSERVED.clear()


def test_a_recorded_config_is_as_it_was():
    config = AutoConfig.for_model("llama", **SMALL, rope_parameters=dict(PLAIN))
    before = copy.deepcopy(vars(config))
    observe(config)
    assert vars(config) == before and type(config.rope_parameters) is dict
    assert "__getattribute__" not in vars(type(config))


# ---- every key of a published config matters -------------------------------------------------------------------------
WIDTH = "with another width a pass fails"
SHORT = "its class keeps short_factor at every length: a remark of check has both numbers"
EXCUSED = {
    ("arcee", "rope_scaling.mscale"): "it counts beside mscale_all_dim alone",
    ("deepseek_v3", "rope_parameters.type"): "rope_type beside it decides",
    ("ministral3", "rope_parameters.type"): "rope_type beside it decides",
    ("mimo_v2_flash", "sliding_window"): "sliding_window_size beside it decides",
    ("smollm3", "no_rope_layer_interval"): "no_rope_layers beside it decides",
    ("dbrx", "attn_config.rope_theta"): "its attention keeps it, and rotates by another base: check has both numbers",
    ("hunyuan_v1_dense", "rope_scaling.factor"): "alpha beside it decides",
    ("hunyuan_v1_moe", "rope_scaling.factor"): "alpha beside it decides",
    ("ministral3", "rope_parameters.llama_4_scaling_beta"): "a pass shows that queries have a temperature, not which",
    ("phi3", "partial_rotary_factor"): "its lists of factors have one length, and its class refuses others",
    ("glm4_moe_lite", "partial_rotary_factor"): WIDTH,
    ("glm4v_moe_text", "partial_rotary_factor"): WIDTH,
    ("minicpm3", "qk_rope_head_dim"): WIDTH,
    ("phimoe", "original_max_position_embeddings"): SHORT,
    ("phimoe", "rope_scaling.original_max_position_embeddings"): SHORT,
    ("phimoe", "rope_scaling.long_factor"): SHORT,
}
"""A class and a key that changes nothing that a pass shows, in any published file -> why."""


def computed(config: Any) -> list[Any]:
    """What a class makes of positions: of each layer its rotation in short and long texts, windows, width, scale and class."""
    length = 4 * (getattr(config, "max_position_embeddings", None) or 512)
    made: dict[Any, Any] = {}
    for layer in observe(config).layers:
        for table in layer.tables:
            if (key := (id(table.module), table.label)) not in made:
                made[key] = [table.width, table.axis_of_pair(table.width // 2) if table.axes else None]
                made[key] += [table.at(0, 1, last)[part].tolist() for last in (2, length) for part in (0, 1)]
    return [
        (
            [made[id(table.module), table.label] for table in layer.tables],
            [layer.window(tokens) for tokens in (3, 40, 9000, 300_000)],
            (layer.width, layer.scale, layer.warm, layer.kind, [*layer.unlike]),
        )
        for layer in observe(config).layers
    ]


def others(key: str, value: Any) -> list[Any]:
    """Other values of a key; None is none of it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [type(value)(2 * value), type(value)(value / 2), None]
    if isinstance(value, list):
        return (
            [[2 * number for number in value]] if isinstance(value[0], float) else [value[::-1], value[1:] + value[:1]]
        )
    return [None, "rope" if key == "position_embedding_type" else "default"]


def differs(raw: Any, place: Any, other: Any, kind: Any, before: Any) -> bool:
    """Whether another value changes what a class computes. One that the class refuses shows nothing."""
    try:
        config = made_of(changed(raw, place, other), kind)
        observe(config)
    except Exception:
        return False
    return computed(config) != before


FILES = [text_part(raw) for raw in (*PUBLISHED.values(), *RELEASED.values())]
KINDS = sorted({raw["model_type"] for raw in FILES if raw.get("model_type") in CONFIG_MAPPING})


def tried(kind: str) -> dict[str, bool]:
    """Key -> whether another value of it changes what a class computes, in one of its published files at least."""
    matters: dict[str, bool] = {}
    for raw in (raw for raw in FILES if raw.get("model_type") == kind):
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            try:
                config = class_of(raw)
                before, unread = computed(config), unread_places(raw, config)
            except (ValueError, AttributeError):  # refused, or tables that are buffers of attention (GPT-J)
                continue
            for place in places(raw):
                key = ".".join(place)
                if asks(raw, place) and key not in unread and not matters.get(key):
                    values = others(place[-1], value_at(raw, place))
                    matters[key] = any(differs(raw, place, other, type(config), before) for other in values)
    return matters


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_changes_what_the_class_computes(kind):
    assert [key for key, matters in tried(kind).items() if not matters and (kind, key) not in EXCUSED] == []
