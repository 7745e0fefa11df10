"""A checkpoint to extend: its folder, its configuration as the file has it, and its model without weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from longitude.checkpoints.compare import read
from longitude.checkpoints.declared import Ropes, declared_length
from longitude.checkpoints.lint import WRONG_ONE, two_values
from longitude.checkpoints.load import (
    built_without_weights,
    config_of,
    differences,
    held_against,
    in_one_line,
    loaded_on_meta,
    local_folder,
    quantization_of,
    require_causal,
    require_shards,
)
from longitude.checkpoints.positions import BUCKETS, Kind, kind_of
from longitude.positions.config_keys import LENGTHS
from longitude.positions.hugging_face import NotUnderstood
from longitude.runs.files import read_json


@dataclass(frozen=True)
class Source:
    """A checkpoint before it is extended; no weights are in memory.

    Attributes:
        name: Name or path that the caller passed.
        folder: Folder of the files.
        json: Content of config.json, keys in their order.
        inner: The part of `json` about the text model; `json` itself if there are no other parts.
        config: The text configuration as transformers reads it.
        skeleton: The model on the meta device.
        unread: Names of tensors in its files that the model does not read, except those known to be harmless.
    """

    name: str
    folder: Path
    json: dict[str, Any]
    inner: dict[str, Any]
    config: PreTrainedConfig
    skeleton: nn.Module
    unread: tuple[str, ...] = ()

    @property
    def length_key(self) -> str:
        """Key of the maximum length in its config.json."""
        theirs = self.config.attribute_map.get(LENGTHS[0], LENGTHS[0])
        return next((key for key in (theirs, *LENGTHS) if key in self.inner), theirs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights in its files, according to the configuration."""
        return getattr(torch, str(self.config.dtype or "float32").removeprefix("torch."))

    @property
    def declared(self) -> int | None:
        """The length that its configuration declares."""
        return declared_length(self.config)

    @property
    def kind(self) -> Kind:
        """Kind of positions of the model. ValueError for a model that cannot be extended."""
        return kind_of(self.name, self.config, self.skeleton)

    @property
    def quantization(self) -> str | None:
        """Quantization method of the weights ("gptq", "awq", "fp8", ...); None if they are not quantized."""
        return quantization_of(self.skeleton.config)

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def open_source(model: str) -> Source:
    """A checkpoint from a folder or a hub name. ValueError, in one line, for what cannot be read or is no language model."""
    config = config_of(model)
    folder = local_folder(model) or fetched(model)
    if getattr(config, "is_encoder_decoder", False):
        more = f"; {BUCKETS}" if hasattr(config, "relative_attention_num_buckets") else ""
        raise ValueError(
            f"{model}: {config.model_type} is an encoder with a decoder; expected one stack of layers{more}"
        )
    json = read_json(folder / "config.json", links=True)
    require_causal(model, config)
    text = config.get_text_config(decoder=True)
    inner = json if text is config else json.get("text_config", json)
    skeleton = built_without_weights(model, AutoModelForCausalLM.from_config, config)
    source = Source(model, folder, json, inner, text, skeleton)
    require_shards(folder)
    # Packed weights have names and shapes of their own.
    return source if source.quantization else replace(source, unread=require_fit(model, folder, skeleton))


def fetched(name: str) -> Path:
    """Download the files of a hub name; returns their folder."""
    from huggingface_hub import snapshot_download

    with in_one_line(f"{name}: it cannot be fetched from the hub"):
        return Path(snapshot_download(name, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.py", "*.bin", "*.pt"]))


# ---- rotation ---------------------------------------------------------------------------------------------------------
def ropes_of(source: Source) -> Ropes:
    """Rotary parameters of a checkpoint as its class rotates.

    Raises:
        ValueError: if a key is given twice, with two values.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    file = source.folder / "config.json"
    for contradiction in two_values(source.inner):
        raise ValueError(f"{file}: {contradiction}; {WRONG_ONE}")
    try:
        return read(source.config).ropes
    except NotUnderstood as error:
        raise NotUnderstood(f"{file}: {error}", error.keys) from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


# ---- weights ---------------------------------------------------------------------------------------------------------
def require_fit(name: str, folder: Path, skeleton: Any) -> tuple[str, ...]:
    """Check the files against the model; return the names of tensors that the model does not read.

    ValueError if the files do not match config.json: a missing tensor or one of another shape, more layers, or a head that is
    tied in one of them only.
    """
    model, info = loaded_on_meta(str(folder), skeleton)
    unread, untied = held_against(name, model, info)
    if wrong := differences(model, unread, untied)[0]:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
    return unread
