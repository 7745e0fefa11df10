"""How vLLM applies overrides, computes rotations and decides lengths. Versions and files: engines.toml."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

from longitude.errors import UsageError
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.positions.scaling.longrope import LongRoPE
from longitude.serving.config import (
    FACTS,
    LENGTH,
    ORIGINAL,
    ROPE,
    TEXT,
    Config,
    Overrides,
    Served,
    Stops,
    alias,
    merge,
    rope,
)
from longitude.serving.line import Line, json_of, literal, named, tokens

ENGINE = FACTS["vllm"]
LENGTH_FLAG, JSON_FLAG, DRAFT, CUT = (
    "--max-model-len",
    "--hf-overrides",
    "--speculative-config",
    "--disable-sliding-window",
)
REMOVED = ("--rope-scaling", "--rope-theta")
"""Removed with 0.11.1 (vllm#28006)."""
REPLACED = (LENGTH_FLAG, JSON_FLAG, *REMOVED)
FLAGS = (*REPLACED, DRAFT, CUT, "--config")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""vllm/engine/arg_utils.py:404."""
NO_DEFAULT = {"gpt_oss": "gpt_oss.py:116", "granite": "granite.py:106"}
"""Model types for which a dict without a base is a KeyError."""
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k3", "glm5_next")
"""Model types for which every type but default becomes deepseek_yarn (deepseek_v2.py:542-563)."""
FOUR_TIMES = ("qwen2_vl", "qwen2_5_vl")
"""Model types with the default positions_factor 4, by which YaRN's original length is multiplied (mrope.py:348-358)."""
YARNS = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
UNMULTIPLIED = ("su", "longrope", "llama3", *YARNS)
"""Types whose factor does not multiply max_position_embeddings (vllm/config/model.py:2606-2626)."""
YARN_NEEDS = ("factor", ORIGINAL)
NEEDED = {
    "linear": ("factor",), "yarn": YARN_NEEDS, "deepseek_yarn": YARN_NEEDS, "longrope": (ORIGINAL, "short_factor", "long_factor"),
    "llama3": (*YARN_NEEDS, "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""Keys without which get_rope ends with a KeyError."""


def parse(line: Line) -> Overrides:
    """The overrides of a line, as vllm/utils/argparse_utils.py:396-505 reads them."""
    asked, dotted = Overrides(lifted=line.lifts(ENGINE.limit)), dict[str, Any]()
    for flag, value in named(line, FLAGS):
        name, _, path = flag.partition(".")
        with asked.noting(ENGINE):
            if name in REMOVED:
                asked.stops.append(Stops(f"{name} was removed with 0.11.1: unrecognized argument", "vllm#28006"))
                if name == REMOVED[0] and value is not None:
                    asked.keys |= {"rope_scaling": json_of(value, name)}  # what is meant
            elif name == "--config":
                asked.unknown.append(f"flags in {value} are not read here")
            elif name == CUT:
                asked.flags[CUT] = True
            elif name == LENGTH_FLAG:
                fits = literal(value, name) in ("auto", "-1")  # the memory, later
                asked.length = None if fits else tokens(str(value), name, UNITS, "kmg")
            elif name == DRAFT:
                asked.draft = json_of(literal(value, name), name)
            elif path:
                put(dotted, path, literal(value, flag))
            else:
                asked.keys = json_of(literal(value, name), name)
    if dotted:  # they are put together at the end, and the last --hf-overrides wins whole
        asked.keys = dotted
    return asked


def put(target: dict[str, Any], path: str, value: str) -> None:
    """A dotted flag: JSON, else a number with a unit, else text (vllm/utils/argparse_utils.py:464-490)."""
    *outer, last = path.split(".")
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UsageError(JSON_FLAG, f"one value or more keys for {key!r}", "both")
    try:
        target[last] = json.loads(value)
    except (ValueError, RecursionError):
        target[last] = tokens(value, JSON_FLAG, UNITS, "kmg") if re.fullmatch(r"\d+[kmgKMG]", value) else value


def apply(config: Config, asked: Overrides) -> Config:
    """vllm/config/model.py:623-692: plain values are set on the parent first, then dicts replace or, in a sub-config, merge."""
    after, keys = config.copy(), asked.keys
    after.parent.update({alias(key): value for key, value in keys.items() if not isinstance(value, dict)})
    for parameters in after.by_type.values():  # patch_legacy_rope_type, vllm/transformers_utils/config.py:609-687
        if parameters.get("rope_type") == "telechat3-yarn":
            grown = YaRN(parameters["factor"], 2).factors()[0] - 1
            parameters |= {"rope_type": "yarn", "attention_factor": 1 + 0.7 * grown}  # 0.07 ln f + 1
    for key, value in keys.items():
        if isinstance(value, dict):
            if key.endswith("_config") and isinstance(part := after.parent.get(key), dict):
                merge(part, value)
            else:
                after.parent[alias(key)] = copy.deepcopy(value)
    return after


def rotation(parameters: dict[str, Any], config: Config, length: int | None) -> RopeConfig:
    """get_rope (vllm/model_executor/layers/rotary_embedding/__init__.py:34-369) for layers of one type."""
    where, kind = ENGINE.sources["get_rope"], parameters.get("rope_type")
    if kind is None:
        raise Stops("KeyError 'rope_type': the dict has no rope_type", "vllm/config/model.py:2608")
    if "rope_theta" not in parameters and config.kind in NO_DEFAULT:
        raise Stops("KeyError 'rope_theta': the dict has no base", NO_DEFAULT[config.kind])
    if (plain := ENGINE.follow(parameters, config)) is None or (kind == "dynamic" and "alpha" not in parameters):
        # With the default of max_trained_positions dynamic leaves the base what it is.
        return rope({"rope_theta": ENGINE.bases.get(config.kind, 10_000.0)} | parameters, None, rope_type="default")
    needed = (
        *NEEDED.get(kind, ()),
        *(("beta_fast", "beta_slow") if config.kind == "gpt_oss" else ()),
    )  # gpt_oss.py:115
    if missing := [key for key in needed if plain.get(key) is None]:
        raise Stops(f"KeyError {missing[0]!r}: the dict has no {' and no '.join(missing)}", where)
    if kind == "linear" and isinstance(plain["factor"], int):
        raise Stops(f"TypeError: factor {plain['factor']} must be {plain['factor']}.0", "linear_scaling_rope.py:73,86")
    if kind == "longrope":  # attention_factor and factor are not read (phi3_long_rope_scaled_rotary_embedding.py:52-86)
        longer = (config.declared or plain[ORIGINAL]) / plain[ORIGINAL]
        read = rope(plain | {"attention_factor": None, "factor": max(1.0, longer)}, config.declared)
        assert isinstance(read.scaling, LongRoPE)
        return read._replace(scaling=replace(read.scaling, follow="declared", max_length=length or plain[ORIGINAL]))
    if kind in YARNS:
        if config.kind in LATENT or kind != "yarn":
            plain |= {"attention_factor": latent_factor(plain), "truncate": None}
        times = 4 if config.kind in FOUR_TIMES and plain.get("mrope_section") else 1
        return rope(plain | {"rope_type": "yarn", ORIGINAL: times * plain[ORIGINAL]}, config.declared)
    if kind not in ("default", "linear", "llama3", "proportional", "mrope", "dynamic"):
        raise Stops(f"ValueError: unknown rope_type {kind!r}", where)
    return rope(plain, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """_get_and_verify_max_len (vllm/config/model.py:2545-2684)."""
    rows: float = min(config.lengths((LENGTH, "n_positions", "max_seq_len", "seq_length")))
    limit, window, factor = rows, config.text.get("sliding_window"), 1
    if asked.flags.get(CUT) and isinstance(window, int):
        limit = min(limit, window)  # model.py:2563-2568
    kinds = [parameters.get("rope_type") for parameters in config.by_type.values()]
    for kind, parameters in zip(kinds, config.by_type.values(), strict=True):
        number = parameters.get("factor")
        if isinstance(number, int | float) and kind not in UNMULTIPLIED and "gemma3" not in config.kind:
            factor = number
        if config.kind not in ENGINE.unscaled and isinstance(number, int | float):
            original = parameters.get(ORIGINAL)
            if kind in YARNS and isinstance(original, int):  # neither max_position_embeddings nor --max-model-len
                rows = number * original
            elif kind == "linear":
                rows *= number
    limit *= factor
    original = config.text.get(ORIGINAL)
    usual = int(original if "longrope" in kinds and isinstance(original, int) else limit)
    length, refused = asked.length or usual, None
    if length > limit and not asked.lifted and length > (config.text.get("model_max_length") or 0):
        what = f"--max-model-len {length} is greater than the derived length {limit:g}: ValueError"
        refused = Stops(
            f"{what}, unless {ENGINE.limit}=1 or {LENGTH} is raised beside the scaling", ENGINE.sources["length"]
        )
    return Served(length, rows, limit, refused)


def line(config: Config, parameters: dict[str, Any], length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens with these rope parameters."""
    multiplies = Config({}, {ROPE: parameters}).flat.get("rope_type") in ("linear", "dynamic")
    keys: dict[str, Any] = {ROPE: floats(parameters)}
    if not multiplies or "gemma3" in config.kind:  # else the engine multiplies max_position_embeddings itself
        keys[LENGTH] = length
    return {JSON_FLAG: {TEXT: keys} if config.nested else keys, LENGTH_FLAG: str(length)}


def floats(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with every factor a float, which linear scaling needs in vLLM and SGLang."""
    whole: dict[str, Any] = {
        key: floats(value) if isinstance(value, dict) else value for key, value in parameters.items()
    }
    return whole | ({"factor": float(whole["factor"])} if whole.get("factor") is not None else {})


def latent_factor(parameters: dict[str, Any]) -> float:
    """g(mscale or 1) / g(mscale_all_dim or 0), g(m) = 0.1 m ln s + 1: deepseek_yarn in every engine."""
    grown = YaRN(float(parameters["factor"]), 2).factors()[0] - 1
    return (1 + parameters.get("mscale", 1) * grown) / (1 + parameters.get("mscale_all_dim", 0) * grown)
