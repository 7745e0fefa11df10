"""How vLLM applies overrides, computes rotations and decides lengths. Versions, flags and files: engines.toml."""

from __future__ import annotations

from dataclasses import replace as with_changes
from typing import Any

from longitude.positions.config_keys import ORIGINAL
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.positions.scaling.longrope import LongRoPE
from longitude.serving import config as rules
from longitude.serving.config import BASE, LENGTH, ROPE, Config, Overrides, Parameters, Served, Stops, rope
from longitude.serving.line import FACTS

ENGINE = FACTS["vllm"]
CUT = ENGINE.flag("switch")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k3", "glm5_next")
"""Model types for which every type but default becomes deepseek_yarn (deepseek_v2.py:542-563)."""
FOUR_TIMES = ("qwen2_vl", "qwen2_5_vl")
"""Model types with the default positions_factor 4, by which YaRN's original length is multiplied (mrope.py:348-358)."""
YARNS = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
UNMULTIPLIED = ("su", "longrope", "llama3", *YARNS)
"""Types whose factor does not multiply max_position_embeddings (vllm/config/model.py:2606-2626)."""


def apply(config: Config, asked: Overrides) -> Config:
    """vllm/config/model.py:623-692: plain values are set on the parent first, then dicts replace or, in a sub-config, merge."""
    before = config.copy()
    for parameters in before.by_type.values():  # patch_legacy_rope_type, vllm/transformers_utils/config.py:609-687
        if parameters.get("rope_type") == "telechat3-yarn":
            grown = YaRN(parameters["factor"], 2).factors()[0] - 1
            parameters |= {"rope_type": "yarn", "attention_factor": 1 + 0.7 * grown}  # 0.07 ln f + 1
    keys = dict(sorted(asked.keys.items(), key=lambda item: isinstance(item[1], dict)))
    return rules.overridden(before, keys, of_part=rules.merge, of_rope=rules.replace)


def rotation(parameters: Parameters, config: Config, length: int | None) -> RopeConfig:
    """get_rope (vllm/model_executor/layers/rotary_embedding/__init__.py:31-352) for layers of one type."""
    if (kind := parameters.get("rope_type")) is None:
        raise Stops("KeyError 'rope_type': the dict has no rope_type", "vllm/config/model.py:2608")
    plain = rules.followed(parameters, config, ENGINE)
    if plain is None or (kind == "dynamic" and "alpha" not in parameters):
        # With the default of max_trained_positions dynamic leaves the base what it is.
        return rope({BASE: ENGINE.bases.get(config.kind, 10_000.0)} | parameters, None, rope_type="default")
    if kind == "longrope":  # attention_factor and factor are not read (phi3_long_rope_scaled_rope.py:52-86)
        longer = (config.declared or plain[ORIGINAL]) / plain[ORIGINAL]
        read = rope(plain | {"attention_factor": None, "factor": max(1.0, longer)}, config.declared)
        assert isinstance(read.scaling, LongRoPE)
        by_length = {"follow": "declared", "max_length": length or plain[ORIGINAL]}
        return read._replace(scaling=with_changes(read.scaling, **by_length))
    if kind in YARNS:
        if config.kind in LATENT or kind != "yarn":
            plain |= {"attention_factor": latent_factor(plain), "truncate": None}
        times = 4 if config.kind in FOUR_TIMES and plain.get("mrope_section") else 1
        return rope(plain | {"rope_type": "yarn", ORIGINAL: times * plain[ORIGINAL]}, config.declared)
    return rope(plain, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """_get_and_verify_max_len (vllm/config/model.py:2545-2684)."""
    rows: float = min(config.lengths((LENGTH, "n_positions", "max_seq_len", "seq_length")))
    limit, window, factor = rows, config.text.get("sliding_window"), 1
    if asked.flags.get(CUT) and isinstance(window, int):
        limit = min(limit, window)  # model.py:2563-2568
    for parameters in config.by_type.values():
        kind, multiple, original = parameters.get("rope_type"), parameters.get("factor"), parameters.get(ORIGINAL)
        if not isinstance(multiple, int | float):
            continue
        if kind not in UNMULTIPLIED and "gemma3" not in config.kind:
            factor = multiple
        if config.kind not in ENGINE.unscaled:
            if kind in YARNS and isinstance(original, int):  # neither max_position_embeddings nor --max-model-len
                rows = multiple * original
            elif kind == "linear":
                rows *= multiple
    limit *= factor
    longrope = any(parameters.get("rope_type") == "longrope" for parameters in config.by_type.values())
    original = config.text.get(ORIGINAL)
    length = asked.length or int(original if longrope and isinstance(original, int) else limit)
    refused = length > limit and not asked.lifted and length > (config.text.get("model_max_length") or 0)
    return Served(length, rows, limit, rules.too_long(ENGINE, asked, limit) if refused else None)


def line(config: Config, parameters: Parameters, length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens with these rope parameters."""
    multiplies = Config({}, {ROPE: parameters}).flat.get("rope_type") in ("linear", "dynamic")
    return rules.flags_of(config, parameters, length, ENGINE, multiplies and "gemma3" not in config.kind)


def latent_factor(parameters: Parameters) -> float:
    """g(mscale or 1) / g(mscale_all_dim or 0), g(m) = 0.1 m ln s + 1: deepseek_yarn in every engine."""
    grown = YaRN(float(parameters["factor"]), 2).factors()[0] - 1
    return (1 + parameters.get("mscale", 1) * grown) / (1 + parameters.get("mscale_all_dim", 0) * grown)
