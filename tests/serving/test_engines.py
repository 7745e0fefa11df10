"""The functions by which vLLM and SGLang apply overrides, run on random configs and overrides, beside ours.

They are taken from the installed package. With LONGITUDE_VLLM or LONGITUDE_SGLANG they are taken out of the folder of an unpacked
one, of which nothing is imported. Run on 2026-11-29 with vLLM 0.33.0 and SGLang 0.5.23.
"""

import ast
import copy
import json
import os
import random
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from longitude.serving import sglang, vllm
from longitude.serving.config import Config, Overrides

ROUNDS = 200
FLAT: dict[str, list[Any]] = {
    "rope_type": ["yarn", "linear", "default"], "type": ["yarn"], "factor": [2.0, 4.0], "rope_theta": [1e4, 1e6],
    "original_max_position_embeddings": [2048, 4096], "mrope_section": [[11, 11, 10]], "partial_rotary_factor": [0.25],
}  # fmt: skip


class Pinned(PreTrainedConfig):
    """With the setter of transformers 5.19 and 5.20, which both engines pin: it assigns, and completes nothing."""

    @property
    def rope_scaling(self) -> Any:
        return getattr(self, "rope_parameters", None)

    @rope_scaling.setter
    def rope_scaling(self, value: Any) -> None:
        self.rope_parameters = value


class Text(Pinned):
    model_type = "drawn_text"

    def __init__(self, **keys: Any) -> None:
        super().__init__()
        self.rope_parameters = keys.pop("rope_parameters", {"rope_type": "default", "rope_theta": 1e7})
        self.max_position_embeddings = keys.pop("max_position_embeddings", 4096)


class Both(Pinned):
    model_type = "drawn"
    sub_configs = {"text_config": Text}

    def __init__(self, text_config: Any = None, **keys: Any) -> None:
        super().__init__()
        self.text_config = Text(**(text_config or {}))


def source_of(package: str, variable: str, file: str) -> str:
    """The text of a file of an engine. Skips the test if it is not here."""
    folder = os.environ.get(variable)
    if folder is None:
        if (spec := find_spec(package)) is None or spec.origin is None:
            pytest.skip(f"{package} is not installed, and {variable} names no folder of it")
        folder = str(Path(spec.origin).parent)
    return (Path(folder) / file).read_text()


def functions_of_vllm() -> Any:
    tree = ast.parse(source_of("vllm", "LONGITUDE_VLLM", "config/model.py"))
    names = ("_update_nested", "_apply_dict_overrides")
    kept = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(kept) == 2
    room: dict[str, Any] = {"PreTrainedConfig": PreTrainedConfig, "Any": Any}
    code = "class Model:\n" + textwrap.indent("\n".join(map(ast.unparse, kept)), "    ")
    exec(compile(code, "vllm", "exec"), room)
    return room["Model"]()


def loop_of_sglang() -> Any:
    text = source_of("sglang", "LONGITUDE_SGLANG", "srt/utils/hf_transformers/config.py")
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For)]
    [loop] = [node for node in loops if "model_override_args" in ast.unparse(node.iter)]
    code = "def apply(config, model_override_args):\n" + textwrap.indent(ast.unparse(loop), "    ")
    room: dict[str, Any] = {"PretrainedConfig": PreTrainedConfig}
    exec(compile(code, "sglang", "exec"), room)
    return room["apply"]


def drawn_flat(draw: random.Random) -> dict[str, Any]:
    return {key: draw.choice(values) for key, values in FLAT.items() if draw.random() < 0.5}


def drawn_rope(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {label: drawn_flat(draw) for label in ("full_attention", "sliding_attention")}
    return drawn_flat(draw)


def drawn(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A config, with or without a text_config, and overrides."""
    text = {"rope_parameters": drawn_rope(draw), "max_position_embeddings": 4096}
    config = Both(text_config=text) if draw.random() < 0.5 else Text(**text)
    keys: dict[str, Any] = {}
    for target in (keys, keys.setdefault("text_config", {})):
        if draw.random() < 0.7:
            target[draw.choice(["rope_scaling", "rope_parameters"])] = drawn_rope(draw)
        if draw.random() < 0.5:
            target["max_position_embeddings"] = 8192
        if draw.random() < 0.3:
            target["other"] = {"a": {"b": 1}}
    if not keys["text_config"] or isinstance(config, Text):
        del keys["text_config"]
    return config, keys


def ours(config: Any) -> Config:
    """The same config in our form."""

    def attributes(part: Any) -> dict[str, Any]:
        names = [name for name in ("rope_parameters", "max_position_embeddings") if hasattr(part, name)]
        return {name: copy.deepcopy(getattr(part, name)) for name in names}

    if isinstance(config, Text):
        return Config(text := attributes(config), text)
    text = attributes(config.text_config)
    return Config({**attributes(config), "text_config": text}, text)


def compared(theirs: Any, mine: Config) -> None:
    parts = [(theirs, mine.parent)] + ([(theirs.text_config, mine.text)] if mine.nested else [])
    for part, dictionary in parts:
        for key in ("rope_parameters", "max_position_embeddings", "other"):
            assert json.dumps(getattr(part, key, None)) == json.dumps(dictionary.get(key)), key


def test_vllm() -> None:
    engine, draw = functions_of_vllm(), random.Random(0)
    for _ in range(ROUNDS):
        config, keys = drawn(draw)
        mine = vllm.apply(ours(config), Overrides(keys))
        config.update({key: value for key, value in keys.items() if not isinstance(value, dict)})
        nested = {key: value for key, value in keys.items() if isinstance(value, dict)}
        engine._apply_dict_overrides(config, copy.deepcopy(nested))
        compared(config, mine)


def test_sglang() -> None:
    apply, draw = loop_of_sglang(), random.Random(0)
    for _ in range(ROUNDS):
        config, keys = drawn(draw)
        mine = sglang.apply(ours(config), Overrides(keys))
        if isinstance(config, Both):  # config.py:186-194
            for key in ("rope_parameters", "max_position_embeddings"):
                setattr(config, key, copy.deepcopy(getattr(config.text_config, key)))
        apply(config, copy.deepcopy(keys))
        compared(config, mine)
