"""How mlx-lm reads rope parameters; it has no flag for positions. Versions and files: engines.toml."""

from __future__ import annotations

import copy
from typing import Any

from longitude.errors import UsageError
from longitude.positions.config_keys import SCHEMAS
from longitude.positions.hugging_face import RopeConfig
from longitude.serving.config import (
    FACTS,
    LENGTH,
    ORIGINAL,
    TEXT,
    Config,
    NotKnown,
    Overrides,
    Served,
    Stops,
    alias,
    rope,
)
from longitude.serving.line import Line, json_of, literal, named
from longitude.serving.vllm import latent_factor

ENGINE = FACTS["mlx"]
CUT, KEYS, LENGTH_FLAG = "--max-kv-size", "--model-config", ""
FLAGS, REPLACED = (CUT, KEYS), (KEYS,)


def parse(line: Line) -> Overrides:
    """The flags, or the arguments of load()."""
    asked = Overrides()
    for flag, value in named(line, FLAGS):
        if flag == KEYS:
            asked.keys = json_of(literal(value, flag), flag)
        elif literal(value, flag).isdecimal():
            asked.flags[flag] = int(str(value))
        else:
            raise UsageError(flag, "a whole number", value)
    return asked


def apply(config: Config, asked: Overrides) -> Config:
    """config.update(model_config) (mlx_lm/utils.py:446-447): every top-level key is replaced whole."""
    after = config.copy()
    for key, value in copy.deepcopy(asked.keys).items():
        if after.nested and key == TEXT and isinstance(value, dict):
            after.text.clear()
            after.text.update({alias(inner): new for inner, new in value.items()})
        else:
            after.parent[alias(key)] = value
    return after


def rotation(parameters: dict[str, Any], config: Config, length: int | None) -> RopeConfig:
    """initialize_rope (mlx_lm/models/rope_utils.py:291-383): type is read before rope_type."""
    kind = parameters.get("type") or parameters.get("rope_type", "default")
    if (base := parameters.get("rope_theta") or config.text.get("rope_theta")) is None:
        raise NotKnown("the base that its class takes for a dict without one was not read")
    plain = ENGINE.follow({**parameters, "rope_theta": base, "rope_type": kind}, config)
    if plain is None or kind in ("default", "mrope"):
        return rope({**parameters, "rope_theta": base}, None, rope_type="default")
    if kind in ("yarn", "deepseek_yarn", "telechat3-yarn"):
        changes = {"rope_type": "yarn", "attention_factor": latent_factor(plain), "truncate": None}
        return rope({ORIGINAL: 4096} | plain | changes, None)
    if kind in ("linear", "llama3", "longrope", "dynamic", "proportional"):
        return rope(plain | {"attention_factor": None}, config.declared)
    raise Stops(f"ValueError: unknown type {kind!r}", ENGINE.sources["get_rope"])


def served(config: Config, asked: Overrides) -> Served:
    """No limit, except of a cache that forgets."""
    return Served(asked.flags.get(CUT) or config.declared, None, asked.flags.get(CUT))


def line(config: Config, parameters: dict[str, Any], length: int) -> dict[str, Any]:
    """The argument of load(), in Python. Stops if there is none."""
    if config.nested or "rope_type" not in parameters:
        why = "load(model_config=...) replaces a nested dict whole; write config.json with `longitude extend`"
        raise Stops(why, ENGINE.sources["lost"])
    scheme = {**parameters, "type": parameters["rope_type"]}
    return {KEYS: {SCHEMAS[1]: scheme, "rope_theta": parameters["rope_theta"], LENGTH: length}}
