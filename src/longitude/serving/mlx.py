"""How mlx-lm reads rope parameters; it has no flag for positions. Versions, flags and files: engines.toml."""

from __future__ import annotations

from typing import Any

from longitude.positions.config_keys import ORIGINAL, SCHEMAS
from longitude.positions.hugging_face import RopeConfig
from longitude.serving import config as rules
from longitude.serving.config import BASE, LENGTH, Config, NotKnown, Overrides, Parameters, Served, Stops, rope
from longitude.serving.line import FACTS
from longitude.serving.vllm import latent_factor

ENGINE = FACTS["mlx"]
CUT = ENGINE.flag("whole")


def apply(config: Config, asked: Overrides) -> Config:
    """config.update(model_config) (mlx_lm/utils.py:446-447): every top-level key is replaced whole."""
    return rules.overridden(config, asked.keys, of_part=rules.replace, of_rope=rules.replace)


def rotation(parameters: Parameters, config: Config, length: int | None) -> RopeConfig:
    """initialize_rope (mlx_lm/models/rope_utils.py:291-373): type is read before rope_type."""
    kind = parameters.get("type") or parameters.get("rope_type", "default")
    if (base := parameters.get(BASE) or config.text.get(BASE)) is None:
        raise NotKnown("the base that its class takes for a dict without one was not read")
    plain = rules.followed({**parameters, BASE: base, "rope_type": kind}, config, ENGINE)
    if plain is None or kind in ("default", "mrope"):
        return rope({**parameters, BASE: base}, None, rope_type="default")
    if kind in ("yarn", "deepseek_yarn", "telechat3-yarn"):
        changes = {"rope_type": "yarn", "attention_factor": latent_factor(plain), "truncate": None}
        return rope({ORIGINAL: 4096} | plain | changes, None)
    return rope(plain | {"attention_factor": None}, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """No limit, except of a cache that forgets."""
    return Served(asked.flags.get(CUT) or config.declared or 0, limit=asked.flags.get(CUT, 0))


def line(config: Config, parameters: Parameters, length: int) -> dict[str, Any]:
    """The argument of load(), in Python. Stops if there is none."""
    if config.nested or "rope_type" not in parameters:
        why = "load(model_config=...) replaces a nested dict whole; write config.json with `longitude extend`"
        raise Stops(why, ENGINE.sources["lost"])
    scheme = {**parameters, "type": parameters["rope_type"]}
    return {ENGINE.flag("keys"): {SCHEMAS[1]: scheme, BASE: parameters[BASE], LENGTH: length}}
