"""A checkpoint to extend: its folder, its configuration as the file has it, and its model without weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from longitude.checkpoints.config import LENGTH_KEYS, contradictions, declared_length
from longitude.checkpoints.load import config_of, in_one_line, require_shards, require_weights
from longitude.checkpoints.positions import BUCKETS, Kind, kind_of
from longitude.checkpoints.quiet import quiet
from longitude.errors import UsageError
from longitude.runs.files import read_json

BY_CHANCE = 2
"""Tensors of another architecture's files that a model may have by name: embeddings and head."""


@dataclass(frozen=True)
class Source:
    """A checkpoint before it is extended; nothing of its weights is in memory.

    Attributes:
        name: As the caller wrote it.
        folder: Where the files are.
        json: config.json as it is, keys in their order.
        inner: The part of it about the text model; the same dict where there is no other.
        config: That part as transformers reads it.
        skeleton: The model on the meta device.
        causal: Whether it predicts the next token.
    """

    name: str
    folder: Path
    json: dict[str, Any]
    inner: dict[str, Any]
    config: PreTrainedConfig
    skeleton: nn.Module
    causal: bool

    @property
    def length_key(self) -> str:
        """What its config.json calls the length."""
        theirs = self.config.attribute_map.get(LENGTH_KEYS[0], LENGTH_KEYS[0])
        return next((key for key in (theirs, *LENGTH_KEYS) if key in self.inner), theirs)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in its files, as the configuration has it."""
        return getattr(torch, str(self.config.dtype or "float32").removeprefix("torch."))

    @property
    def declared(self) -> int | None:
        """The length that its configuration declares."""
        return declared_length(self.config)

    @property
    def kind(self) -> Kind:
        """How it encodes positions. ValueError for a model in which nothing can be extended."""
        return kind_of(self.name, self.config, self.skeleton)

    @property
    def quantization(self) -> str | None:
        """How its weights are quantized ("gptq", "awq", "fp8", ...); None where they are not."""
        given = self.json.get("quantization_config") or self.inner.get("quantization_config")
        return None if given is None else str(given.get("quant_method", "unknown"))

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def pickled(self) -> bool:
        return not self.shards


def open_source(model: str, allow_pickle: bool = False) -> Source:
    """A checkpoint from a folder or a hub name. ValueError, in one line, for what cannot be read or is no language model."""
    config = config_of(model)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = fetched(model, allow_pickle)
    if getattr(config, "is_encoder_decoder", False):
        more = f"; {BUCKETS}" if hasattr(config, "relative_attention_num_buckets") else ""
        raise ValueError(
            f"{model}: {config.model_type} is an encoder with a decoder; expected one stack of layers{more}"
        )
    json = read_json(folder / "config.json")
    text = config.get_text_config(decoder=True)
    inner = json if text is config else json.get("text_config", json)
    architecture = (json.get("architectures") or [""])[0]
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and "CausalLM" not in architecture
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not (masked and "LMHead" not in architecture)
    if not causal and not masked:
        raise UsageError(model, "a language model, causal or masked", config.model_type)
    try:
        with quiet(), torch.device("meta"), in_one_line(f"{model}: its model cannot be built"):
            skeleton = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_config(config)
    except ValueError as error:
        if (named := _contradiction(json, config)) is not None:
            raise ValueError(f"{model}: config.json: {named}") from error
        raise
    source = Source(model, folder, json, inner, text, skeleton, causal)
    require_files(source, allow_pickle)
    return source


def _contradiction(raw: Any, config: PreTrainedConfig) -> str | None:
    """What is wrong in a config.json by our own reading: a class that fails on a key seldom names it."""
    try:
        return next(contradictions(raw, config), None)
    except ValueError as error:
        return str(error)


def fetched(name: str, allow_pickle: bool) -> Path:
    """A hub name -> its files on this disk."""
    from huggingface_hub import snapshot_download

    unused = ["*.msgpack", "*.h5", "*.onnx", "*.py"]
    with in_one_line(f"{name}: it cannot be fetched from the hub"):
        folder = Path(snapshot_download(name, ignore_patterns=[*unused, "*.bin", "*.pt"]))
        if allow_pickle and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, ignore_patterns=unused))
    return folder


# ---- weights ---------------------------------------------------------------------------------------------------------
def require_files(source: Source, allow_pickle: bool) -> None:
    """ValueError unless every weights file is whole and nothing is missing. Reads headers only."""
    require_weights(source.folder, allow_pickle)
    held = require_shards(source.folder)
    if held and source.quantization is None:  # packed weights have shapes of their own
        require_fit(source.name, source.skeleton, held)


def require_fit(name: str, skeleton: Any, held: dict[str, list[int]]) -> None:
    """ValueError where the tensors of the files are not those that config.json describes: another shape, or one missing.

    transformers loads some checkpoints under other names than the files': where it might, because a part has the model's names
    or names of its class's table of renamings, nothing is called missing.
    """
    state = skeleton.state_dict(keep_vars=True)
    prefix = getattr(skeleton, "base_model_prefix", "")

    def found_as(name: str) -> str:
        return name if name in state else f"{prefix}.{name}"

    found = {found_as(each): shape for each, shape in held.items()}
    for each in sorted(found.keys() & state.keys()):
        if found[each] != [*state[each].shape]:
            raise ValueError(
                f"{name}: {each} is {found[each]} in the weights and {[*state[each].shape]} by config.json; correct config.json"
            )
    ignored = getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or []
    there = {id(state[each]) for each in found if each in state}  # a tied weight is one tensor of many names
    renamed = [each for each in held if found_as(each) not in state and not any(re.search(r, each) for r in ignored)]
    patterns = [x for each in get_model_conversion_mapping(skeleton, add_legacy=False) for x in each.source_patterns]
    known = any(re.search(pattern.replace("*", ".*"), each) for pattern in patterns for each in renamed)
    if renamed and (len(there) > BY_CHANCE or known):
        return
    lost = [each for each, tensor in state.items() if isinstance(tensor, nn.Parameter) and id(tensor) not in there]
    if lost:
        raise ValueError(
            f"{name}: the weights lack {len(lost)} of the model's tensors, such as {min(lost)}; complete the "
            f"checkpoint, or correct config.json"
        )
