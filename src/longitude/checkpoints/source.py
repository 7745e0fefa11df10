"""A checkpoint to extend: its folder, its configuration as it stands in the file, and how its model knows positions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

from longitude.checkpoints.load import PICKLED, config_of, one_line_of
from longitude.runs.folders import read_json

QUIET = 50  # logging.CRITICAL
INDEX = "model.safetensors.index.json"
TABLES = ("wpe", "position_embeddings", "embed_positions", "position_embedding")
"""What models call their learned tables of positions."""
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length")
"""What configurations call the length that a model takes."""


@dataclass(frozen=True)
class Source:
    """folder: where the files are. json: config.json as it stands, keys in their order; inner: the part of it about the text
    model, the same dict where there is no other. config: that part as transformers reads it. skeleton: the model without
    weights. causal: whether it predicts the next token.
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
        theirs = self.config.attribute_map.get(LENGTHS[0], LENGTHS[0])
        return next((key for key in (theirs, *LENGTHS) if key in self.inner), theirs)

    @property
    def declared(self) -> int | None:
        """The length that its configuration declares."""
        length = getattr(self.config, self.length_key, None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def pickled(self) -> bool:
        return not self.shards


def open_source(model: str, allow_pickle: bool = False) -> Source:
    """A checkpoint from a folder or a hub name. ValueError, in one line, for what cannot be read, for truncated or missing
    weights, weights in a pickle unless allowed, an encoder-decoder, a model that is none of language.
    """
    with quiet():
        config = config_of(model)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _fetched(model, allow_pickle)
    if getattr(config, "is_encoder_decoder", False):
        more = ""
        if hasattr(config, "relative_attention_num_buckets"):
            more = (
                "; its positions are learned biases for buckets of distances, the last of which takes all that are far"
            )
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
        raise ValueError(f"{model}: expected a language model, causal or masked, got {config.model_type}")
    with quiet(), torch.device("meta"):
        try:
            skeleton = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_config(config)
        except Exception as error:
            raise ValueError(f"{model}: its model cannot be built ({one_line_of(error)})") from error
    source = Source(model, folder, json, inner, text, skeleton, causal)
    require_weights(source, allow_pickle)
    return source


def _fetched(name: str, allow_pickle: bool) -> Path:
    """A hub name -> its files on this disk."""
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.py", "*.bin", "*.pt"]))
        if allow_pickle and not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.py"]))
        return found
    except Exception as error:  # whatever the hub or the network raises
        raise ValueError(f"{name}: it cannot be fetched from the hub ({one_line_of(error)})") from error


# ---- weights ---------------------------------------------------------------------------------------------------------
def require_weights(source: Source, allow_pickle: bool) -> None:
    """ValueError unless every weights file is whole and nothing is missing. Reads headers only."""
    held: dict[str, list[int]] = {}
    for shard in source.shards:
        held |= shapes_of(shard)
    index = source.folder / INDEX
    if index.is_file():
        named = read_json(index).get("weight_map", {})
        if lost := sorted({file for file in named.values() if not (source.folder / file).is_file()}):
            raise ValueError(f"{index} names {lost[0]}, which is not there; fetch it, or restore the index")
        if lost := sorted(set(named) - held.keys()):
            raise ValueError(f"{index} names the tensor {lost[0]}, which no file holds; restore the files")
    if source.shards:
        require_fit(source, held)
        return
    found = sorted(path.name for path in source.folder.glob(PICKLED))
    if not found:
        raise ValueError(f"{source.folder}: there are no weights; expected model.safetensors")
    if not allow_pickle:
        raise ValueError(
            f"{source.folder}: its weights are a pickle ({found[0]}), which can run code as it is read; say --allow-pickle "
            f"if you trust where they come from, and they are written as safetensors"
        )


def require_fit(source: Source, held: dict[str, list[int]]) -> None:
    """ValueError where the tensors of the files are not those that config.json describes: another shape, or one missing.
    transformers loads some checkpoints under other names than the files': where it would, nothing is called missing.
    """
    if getattr(source.config, "quantization_config", None) is not None:
        return  # packed weights have shapes of their own
    state = source.skeleton.state_dict(keep_vars=True)
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    found = {name if name in state else f"{prefix}.{name}": shape for name, shape in held.items()}
    for name in sorted(found.keys() & state.keys()):
        if found[name] != [*state[name].shape]:
            raise ValueError(
                f"{source.name}: {name} is {found[name]} in the weights and {[*state[name].shape]} by config.json; correct "
                f"config.json"
            )
    ignored = getattr(source.skeleton, "_keys_to_ignore_on_load_unexpected", None) or []
    if any(name not in state and not any(re.search(rule, name) for rule in ignored) for name in found):
        return
    there = {id(state[name]) for name in found if name in state}  # a tied weight is one tensor of many names
    lost = [name for name, tensor in state.items() if isinstance(tensor, nn.Parameter) and id(tensor) not in there]
    if lost:
        raise ValueError(
            f"{source.name}: the weights lack {len(lost)} of the model's tensors, such as {min(lost)}; complete the "
            f"checkpoint, or correct config.json"
        )


def keys_of(shard: Path) -> list[str]:
    """The tensors of a safetensors file. ValueError when it is truncated or broken: its header is held against its size."""
    return [*shapes_of(shard)]


def shapes_of(shard: Path) -> dict[str, list[int]]:
    """The same with their shapes."""
    if not os.access(shard, os.R_OK):
        raise ValueError(f"{shard} cannot be read; you need the permission to")
    try:
        with safe_open(shard, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{shard} is truncated or broken ({one_line_of(error)}); fetch the file again") from error


# ---- how the model knows positions ----------------------------------------------------------------------------------
def rotary_of(skeleton: nn.Module) -> nn.Module | None:
    """The module that holds the model's frequencies, if it turns its queries and keys by parameters of its config."""
    for module in skeleton.modules():
        mine = dict(module.named_buffers(recurse=False))
        if any(name.endswith("inv_freq") for name in mine) and getattr(
            getattr(module, "config", None), "rope_parameters", 0
        ):
            return module
    return None


def table_of(skeleton: nn.Module) -> tuple[str, nn.Embedding] | None:
    """(name, module) of its learned table of positions, if it has one."""
    for name, module in skeleton.named_modules():
        computed = "Sinusoidal" in type(module).__name__
        if isinstance(module, nn.Embedding) and not computed and name.rpartition(".")[2] in TABLES:
            return name, module
    return None


def has_alibi(config: PreTrainedConfig) -> bool:
    inside = getattr(config, "attn_config", None)
    return config.model_type == "bloom" or bool(getattr(config, "alibi", None) or getattr(inside, "alibi", None))


def kind_of(source: Source) -> str:
    """Is it "rotary", "learned" or "alibi"? ValueError for any other model, with what it is where we can tell."""
    if has_alibi(source.config):
        return "alibi"
    if rotary_of(source.skeleton) is not None:
        return "rotary"
    if table_of(source.skeleton) is not None:
        return "learned"
    kind = source.config.model_type
    if hasattr(source.config, "relative_attention_num_buckets"):
        why = "its positions are learned biases for buckets of distances, the last of which takes all that are far"
    elif hasattr(source.config, "rotary_dim") or any(
        "rotary" in type(m).__name__.lower() for m in source.skeleton.modules()
    ):
        why = "it turns its queries and keys, but by a formula that its configuration says nothing about"
    else:
        why = "it has neither rotary parameters nor a learned table of positions, nor ALiBi"
    raise ValueError(f"{source.name}: nothing in a {kind} model can be extended; {why}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers logs and draws on the way: what matters we say ourselves."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(QUIET)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
