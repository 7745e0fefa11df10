"""How the installed transformers applies overrides: its own classes are run, so nothing here is read alone."""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, __version__

from longitude.checkpoints.declared import decoded
from longitude.errors import one_line_of
from longitude.positions.config_keys import LENGTHS
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling.base import ROPE_TYPES
from longitude.runs.quiet import quiet
from longitude.serving.config import BASE, ROPE, TEXT, Config, NotKnown, Overrides, Parameters, Served, Stops, rope
from longitude.serving.line import FACTS

ENGINE = FACTS["transformers"]
ENGINE.version = __version__


def apply(config: Config, asked: Overrides) -> Config:
    """PreTrainedConfig.from_dict of the model's own class, run here. Stops for what it raises."""
    kind = config.raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise NotKnown(f"transformers {__version__} has no class for model_type {kind!r}")
    try:
        with quiet():
            made = CONFIG_MAPPING[kind].from_dict(decoded(config.raw), **copy.deepcopy(asked.keys))
            text = made.get_text_config(decoder=True)
            whole, inner = made.to_dict(), text.to_dict()
    except Exception as error:
        raise Stops(f"{type(error).__name__}: {one_line_of(error)}", ENGINE.sources["base"]) from error
    return Config(inner if text is made else {**whole, TEXT: inner}, inner, config.share, config.raw)


def rotation(parameters: Parameters, config: Config, length: int | None) -> RopeConfig:
    """ROPE_INIT_FUNCTIONS of transformers, whose schemes are those of longitude.positions.scaling."""
    if parameters.get(BASE) is None:
        raise Stops("TypeError: rope_theta is None, and no table can be computed", ENGINE.sources["base"])
    if (kind := parameters.get("rope_type", "default")) not in ROPE_TYPES:
        raise Stops(f"KeyError {kind!r}: transformers has no such type", ENGINE.sources["get_rope"])
    return rope(parameters, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """No limit: generate() stops at max_position_embeddings if max_length is not set."""
    return Served(config.declared or 0)


def line(config: Config, parameters: Parameters, length: int) -> dict[str, Any]:
    """Arguments of from_pretrained, in Python."""
    dynamic = Config({}, {ROPE: parameters}).flat.get("rope_type") == "dynamic"  # which counts from the declared length
    keys: dict[str, Any] = {ROPE: parameters} | ({} if dynamic else {LENGTHS[0]: length})
    return {f"--{key.replace('_', '-')}": value for key, value in ({TEXT: keys} if config.nested else keys).items()}
