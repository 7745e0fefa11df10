"""How SGLang applies overrides, computes rotations and decides lengths. Versions and files: engines.toml."""

from __future__ import annotations

import copy
from typing import Any

from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.serving.config import FACTS, LENGTH, ORIGINAL, ROPE, TEXT, Config, Overrides, Served, Stops, alias, rope
from longitude.serving.line import Line, json_of, literal, named, tokens
from longitude.serving.vllm import LATENT, YARNS, floats, latent_factor

ENGINE = FACTS["sglang"]
LENGTH_FLAG, JSON_FLAG, DRAFT = "--context-length", "--json-model-override-args", "--speculative-draft-model-path"
REPLACED = (LENGTH_FLAG, JSON_FLAG)
FLAGS = (*REPLACED, DRAFT, "--config")
UNITS = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
"""sglang/srt/utils/common.py:3394."""
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", LENGTH)
"""The first of these is the length (common.py:668)."""


def parse(line: Line) -> Overrides:
    """The overrides of a line."""
    asked = Overrides(lifted=line.lifts(ENGINE.limit))
    for flag, value in named(line, FLAGS):
        with asked.noting(ENGINE):
            if flag == "--config":
                asked.unknown.append(f"flags in {value} are not read here")
            elif flag == LENGTH_FLAG:
                asked.length = tokens(literal(value, flag), flag, UNITS, "kM")
            elif flag == DRAFT:
                asked.draft = {"model": value}
            else:
                asked.keys = json_of(literal(value, flag), flag)
    return asked


def apply(config: Config, asked: Overrides) -> Config:
    """sglang/srt/utils/hf_transformers/config.py:186-194 and 405-426, since sglang#41227 and sglang#33351."""
    after = config.copy()
    parent = after.parent
    if after.nested:  # attributes of the text config that the parent lacks are copied to it
        parent |= {key: copy.deepcopy(value) for key, value in after.text.items() if key not in parent}
    for key, value in copy.deepcopy(asked.keys).items():
        current = parent.get(alias(key))
        if isinstance(value, dict) and key.endswith("_config") and isinstance(current, dict):
            current.update({alias(inner): new for inner, new in value.items()})
        elif isinstance(value, dict) and alias(key) == ROPE and isinstance(current, dict):
            parent[ROPE] = {**current, **value}
        else:
            parent[alias(key)] = value
    return after


def rotation(parameters: dict[str, Any], config: Config, length: int | None) -> RopeConfig:
    """get_rope_config (common.py:501-517) and get_rope (layers/rotary_embedding/factory.py) for layers of one type."""
    where, kind = ENGINE.sources["get_rope"], parameters.get("rope_type", parameters.get("type", "default"))
    base = config.text.get("rope_theta") or ENGINE.bases.get(config.kind, 10_000.0)
    if (plain := ENGINE.follow({"rope_theta": base} | parameters, config)) is None:
        return rope({"rope_theta": base} | parameters, None, rope_type="default")
    plain |= {"rope_type": kind}
    if config.kind == "qwen3_5" and config.share is not None:
        plain["partial_rotary_factor"] = config.share  # qwen3_5.py:1307 reads the attribute, not the dict
    factor = plain.get("factor", 1.0)
    if kind in YARNS:
        pair = {key: plain[key] for key in ("mscale", "mscale_all_dim") if plain.get(key) is not None}
        if pair and plain.get("mrope_section"):
            raise Stops("TypeError: mscale with mrope_section", "factory.py:332-369; sglang#22711")
        plain |= {"factor": factor, ORIGINAL: plain.get(ORIGINAL, config.declared)}
        if config.kind in LATENT or kind != "yarn":
            grown = latent_factor(plain)
        else:
            grown = YaRN(float(factor), 2, **(pair if len(pair) == 2 else {})).factors()[0]
        return rope(
            plain | {"rope_type": "yarn", "attention_factor": grown * plain.get("attn_factor", 1)}, config.declared
        )
    if kind == "linear" and isinstance(plain.get("factor"), int):
        raise Stops(f"TypeError: factor {factor} must be {factor}.0", "layers/rotary_embedding/base.py:640")
    if kind == "dynamic" and "alpha" not in plain:  # static, as for a text of factor times the length
        plain["alpha"] = factor * factor - (factor - 1)
    if kind not in ("default", "linear", "dynamic", "longrope", "llama3", "proportional"):
        raise Stops(f"ValueError: unknown rope_type {kind!r}", where)
    unread = {"attention_factor": None} if kind == "longrope" else {}
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return rope(usual | plain | unread, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """get_context_length (common.py:668-694) and configs/model_config.py:1291; tables grow to the length."""
    parameters = config.parameters
    factor = parameters.get("factor", 1)
    if ORIGINAL in parameters or parameters.get("rope_type") == "llama3" or not isinstance(factor, int | float):
        factor = 1
    limit, refused = int(factor * config.lengths(LENGTHS)[0]), None
    if asked.length is not None and asked.length > limit and not asked.lifted:
        what = f"--context-length {asked.length} is greater than the derived length {limit}: ValueError"
        refused = Stops(
            f"{what}, unless {ENGINE.limit}=1 or {LENGTH} is raised beside the scaling", ENGINE.sources["length"]
        )
    return Served(asked.length or limit, None, limit, refused)


def line(config: Config, parameters: dict[str, Any], length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens with these rope parameters."""
    keys: dict[str, Any] = {ROPE: floats(_with_attn_factor(parameters))}
    if parameters.get("rope_type") not in ("linear", "dynamic"):  # it multiplies by these itself
        keys[LENGTH] = length
    return {JSON_FLAG: {TEXT: keys} if config.nested else keys, LENGTH_FLAG: str(length)}


def _with_attn_factor(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with attn_factor for attention_factor, which is not read."""
    typed = {key: _with_attn_factor(value) for key, value in parameters.items() if isinstance(value, dict)}
    if parameters.get("rope_type") == "yarn" and (factor := parameters.get("attention_factor")) is not None:
        return parameters | {"attn_factor": factor / YaRN(float(parameters["factor"]), 2).factors()[0]}
    return parameters | typed
