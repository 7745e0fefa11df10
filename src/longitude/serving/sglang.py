"""How SGLang applies overrides, computes rotations and decides lengths. Versions, flags and files: engines.toml."""

from __future__ import annotations

import copy
import math
from typing import Any

from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.serving import config as rules
from longitude.serving.config import BASE, LENGTH, ORIGINAL, Config, Overrides, Parameters, Served, Stops, rope
from longitude.serving.line import FACTS
from longitude.serving.vllm import LATENT, YARNS, latent_factor

ENGINE = FACTS["sglang"]
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", LENGTH)
"""The first of these is the length (common.py:668)."""


def apply(config: Config, asked: Overrides) -> Config:
    """sglang/srt/utils/hf_transformers/config.py:186-194 and 405-426, since sglang#41227 and sglang#33351."""
    before = config.copy()
    if before.nested:  # attributes of the text config that the parent lacks are copied to it
        before.parent |= {key: copy.deepcopy(v) for key, v in before.text.items() if key not in before.parent}
    return rules.overridden(before, asked.keys, of_part=dict.update, of_rope=dict.update)


def rotation(parameters: Parameters, config: Config, length: int | None) -> RopeConfig:
    """get_rope_config (common.py:501-517) and get_rope (layers/rotary_embedding/factory.py) for layers of one type."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    based = {BASE: config.text.get(BASE) or ENGINE.bases.get(config.kind, 10_000.0)} | parameters
    if (plain := rules.followed(based, config, ENGINE)) is None:
        return rope(based, None, rope_type="default")
    plain |= {"rope_type": kind}
    if config.kind == "qwen3_5" and config.share is not None:
        plain["partial_rotary_factor"] = config.share  # qwen3_5.py:1307 reads the attribute, not the dict
    factor = plain.get("factor", 1.0)
    if kind in YARNS:
        pair = {key: plain[key] for key in ("mscale", "mscale_all_dim") if plain.get(key) is not None}
        if pair and plain.get("mrope_section"):
            raise Stops(
                "TypeError: mscale with mrope_section",
                ENGINE.sources["mscale"],
            )
        plain |= {"factor": factor, ORIGINAL: plain.get(ORIGINAL, config.declared)}
        if config.kind in LATENT or kind != "yarn":
            grown = latent_factor(plain)
        else:
            grown = YaRN(float(factor), 2, **(pair if len(pair) == 2 else {})).factors()[0]
        grown *= plain.get("attn_factor", 1)
        return rope(plain | {"rope_type": "yarn", "attention_factor": grown}, config.declared)
    if kind == "dynamic" and "alpha" not in plain:  # static, as for a text of factor times the length
        plain["alpha"] = factor * factor - (factor - 1)
    unread = {"attention_factor": None} if kind == "longrope" else {}
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return rope(usual | plain | unread, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """get_context_length (common.py:668-694) and configs/model_config.py:1291; tables grow to the length."""
    parameters = config.parameters
    factor = parameters.get("factor", 1)
    if ORIGINAL in parameters or parameters.get("rope_type") == "llama3" or not isinstance(factor, int | float):
        factor = 1
    limit = int(factor * config.lengths(LENGTHS)[0])
    refused = asked.length is not None and asked.length > limit and not asked.lifted
    return Served(asked.length or limit, math.inf, limit, rules.too_long(ENGINE, asked, limit) if refused else None)


def line(config: Config, parameters: Parameters, length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens with these rope parameters."""
    multiplies = parameters.get("rope_type") in ("linear", "dynamic")
    return rules.flags_of(config, _with_attn_factor(parameters), length, ENGINE, multiplies)


def _with_attn_factor(parameters: Parameters) -> Parameters:
    """Rope parameters with attn_factor for attention_factor, which is not read."""
    typed = {key: _with_attn_factor(value) for key, value in parameters.items() if isinstance(value, dict)}
    if parameters.get("rope_type") == "yarn" and (factor := parameters.get("attention_factor")) is not None:
        return parameters | {"attn_factor": factor / YaRN(float(parameters["factor"]), 2).factors()[0]}
    return parameters | typed
