"""Checkpoints from a folder or a hub name, loaded or without weights, with their tokenizers, or an error of one line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import longitude.models  # noqa: F401  makes our own models known to the Auto classes
from longitude.checkpoints.compare import read
from longitude.checkpoints.declared import Ropes, declared_length, fault_of, require_numbers, text_part
from longitude.checkpoints.observed import auto_class_of
from longitude.checkpoints.positions import Kind, kind_of
from longitude.errors import OWN_CODE, UsageError, one_line_of, unknown
from longitude.hf.stock import KEY, class_of
from longitude.positions.config_keys import LENGTHS
from longitude.positions.hugging_face import lost_type
from longitude.runs.files import read_json
from longitude.runs.machine import available_memory, require_memory
from longitude.runs.quiet import quiet

DTYPES = ("float32", "bfloat16", "float16", "float64")
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of weights that are not quantized, in the notation of safetensors, with the bytes of a number."""
OF_LAYER = re.compile(r"(?:(?:model|transformer|language_model)\.)*(?:layers|h|blocks)\.(\d+)\.")
"""The name of a tensor in a layer of the text model."""
NO_MEMORY = re.compile("(cannot|can't) allocate memory", re.IGNORECASE)
"""Messages of torch and the operating system in a RuntimeError if there is not enough memory."""
SMALLER = "take a machine with more memory, or a smaller --dtype"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; the model is in eval mode.

    Attributes:
        model: The causal model of transformers.
        tokenizer: The tokenizer; None only if `load` was called with tokenizer=False.
        config: The model's configuration.
        path: The name or path that was passed to `load`.
        unused: Names of weights in the files that the model has no parameter for, except those known to be harmless.
        untied: (tensor, the tensor that config.json ties it to) for tied tensors that the files have with different values.
    """

    model: Any
    tokenizer: Any
    config: PreTrainedConfig
    path: str
    unused: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] = ()


def load(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tokenizer: bool = True,
    images: bool = False,
) -> Checkpoint:
    """Load a causal model and its tokenizer, from a local folder or, by name, from the hub through transformers.

    Code that comes with a checkpoint is never run.

    Args:
        name_or_path: A folder, or a name on the hub.
        dtype: Data type of the weights in memory; None to keep the saved one.
        device: Device of the model.
        tokenizer: Whether to load a tokenizer.
        images: Whether to accept models of images and text.

    Returns:
        The model in eval mode, its tokenizer and its config.

    Raises:
        ValueError: In one line, for: no such folder or name, no or unknown configuration, weights that are missing,
            truncated, incomplete, pickled, not finite or larger than the free memory, a tokenizer that is missing, a dtype or
            device that is not there.
    """
    path = str(name_or_path)
    where = local_folder(path)
    kind, place = dtype_of(dtype), _device(device)
    config = config_of(path)
    its_tokenizer = tokenizer_of(path, config) if tokenizer else None
    held: dict[str, Saved] = {}
    if where is not None:
        held = require_shards(where)
        require_layers(path, held, config)
        for device_type in dict.fromkeys(("cpu", place.type)):  # read on the CPU, then moved
            size = size_of(where, held, kind)
            require_memory(size, available_memory(device_type), f"{path}: its weights take", SMALLER)
    require_causal(path, config, images)
    positions_are_set = getattr(config, KEY, None) is not None
    kinds = class_of(path, config) if positions_are_set else auto_class_of(config)
    problem = "the weights cannot be loaded; copy or download them again"
    if (method := quantization_of(config)) is not None:
        problem = f"its weights are quantized ({method}), and cannot be loaded here"
    how = {"dtype": kind, "attn_implementation": "longitude" if positions_are_set else None}
    try:
        model, info = with_weights(kinds, path, config, problem, trust_remote_code=False, **how)
    except ValueError:
        built_without_weights(path, config)  # raises if config.json is to blame
        raise
    unused, untied = held_against(path, model, info)
    for name, weight in model.named_parameters():
        require_finite(name, weight, held[name].shard if name in held else path)
    model = model.eval().to(place)
    return Checkpoint(model, its_tokenizer, model.config, path, unused, untied)


def require_causal(path: str, config: PreTrainedConfig, images: bool = False) -> None:
    """Raise ValueError for a model that does not predict the next token; images: accept models of images and text, too."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText) if images else (AutoModelForCausalLM,)
    if not any(type(config) in kind._model_mapping for kind in kinds):
        text = config.get_text_config(decoder=True)
        remedy = f"give its text_config ({text.model_type}) in a config.json of its own, with its weights"
        raise UsageError(path, "a causal language model", config.model_type, "" if text is config else remedy)


def config_of(name_or_path: str | Path) -> PreTrainedConfig:
    """The configuration of a checkpoint or of a config.json, without weights. ValueError, in one line, if there is none."""
    path, raw = str(name_or_path), None
    if path.endswith(".json"):
        raw = require_config(Path(path).expanduser())
    elif (where := local_folder(path)) is not None:
        raw = require_config(where)
    problem = "its configuration cannot be read" if raw else "there is no such folder, and no such name on the hub"
    try:
        with quiet(), in_one_line(f"{path}: {problem}"):
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        if raw and (fault := fault_of(raw)) is not None:
            raise ValueError(f"{error}; {fault}") from error
        raise


def tokenizer_of(name_or_path: str | Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; bytes for a model of a study, which has none. ValueError when it is missing."""
    path = str(name_or_path)
    where = local_folder(path)
    if where is not None and not any((where / name).exists() for name in TOKENIZERS):
        if config.model_type == "longitude" and config.vocab_size == 256:  # as `longitude study` trains them
            return byte_tokenizer()
        raise ValueError(
            f"{path}: there is no tokenizer (expected {TOKENIZERS[0]} or another of its kinds); copy the tokenizer's files "
            f"of the model it comes from into this folder, or for a model of bytes save transformers' ByT5Tokenizer there"
        )
    return read_tokenizer(path, f"{path}: its tokenizer cannot be loaded")


def read_tokenizer(name: str, problem: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub name, or of a tokenizer.json. ValueError with the problem, in one line."""
    with quiet(), in_one_line(problem):
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of UTF-8 bytes: ids are byte values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, clean_up_tokenization_spaces=False)


# ---- without weights --------------------------------------------------------------------------------------------------
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
    json = read_json(folder / "config.json", links=True)
    require_causal(model, config, images=True)
    text = config.get_text_config(decoder=True)
    inner = json if text is config else json.get("text_config", json)
    skeleton = built_without_weights(model, config)
    source = Source(model, folder, json, inner, text, skeleton)
    require_layers(model, require_shards(folder), config)
    # Packed weights have names and shapes of their own.
    return source if source.quantization else replace(source, unread=require_fit(model, folder, skeleton))


def fetched(name: str) -> Path:
    """Download the files of a hub name; returns their folder."""
    from huggingface_hub import snapshot_download

    with in_one_line(f"{name}: it cannot be fetched from the hub"):
        return Path(snapshot_download(name, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.py", "*.bin", "*.pt"]))


def ropes_of(source: Source) -> Ropes:
    """Rotary parameters of a checkpoint as its class rotates. ValueError, with the file, if its keys do not explain them."""
    try:
        return read(source.config).ropes
    except ValueError as error:
        raise ValueError(f"{source.folder / 'config.json'}: {error}") from error


# ---- tensors of the files, and of the model -----------------------------------------------------------------------------
Untied = tuple[tuple[str, str], ...]


def held_against(path: str, model: Any, info: dict[str, Any]) -> tuple[tuple[str, ...], Untied]:
    """`unused` and `untied` of a Checkpoint, from transformers' loading info.

    ValueError for tensors whose shapes in the files and by config.json differ, and for any that are missing.
    """
    for name, saved, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{path}: {name} is {list(saved)} in the weights and {list(expected)} by config.json; correct config.json"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path}: the weights lack {len(missing)} of the model's tensors, such as {missing[0]}; they would be random "
            "numbers; complete the checkpoint, or correct config.json"
        )
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)  # by config.json
    untied = tuple(sorted(pair for pair in declared.items() if pair[0] not in model.all_tied_weights_keys))
    return tuple(name for name in sorted(info["unexpected_keys"]) if not _is_harmless(name, model)), untied


def _is_harmless(name: str, model: Any) -> bool:
    """Whether a tensor may be left out: the model computes it, or it is of layers that config.json counts separately."""
    if name.endswith(".masked_bias"):  # -1e9, in files of older releases of transformers
        return True
    if any(f".{buffer}".endswith(f".{name}") for buffer, _ in model.named_buffers()):
        return True
    text = model.config.get_text_config()
    layers, more = getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", 0) or 0
    numbered = re.search(r"(?:^|\.)layers\.(\d+)\.", name)  # layers that predict tokens further on follow the last
    return numbered is not None and layers <= int(numbered[1]) < layers + more


def with_weights(kind: Any, path: str, config: Any, problem: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) of a class or an Auto class. ValueError with the problem, in one line."""
    options |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with quiet(), in_one_line(f"{path}: {problem}"):
        return kind.from_pretrained(path, config=config, **options)


def loaded_on_meta(path: str, skeleton: Any) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) from headers alone: only tied tensors are read."""
    tied = skeleton.get_expanded_tied_weights_keys(all_submodels=True)
    places = {"": "meta"} | {name.rpartition(".")[0]: "cpu" for pair in tied.items() for name in pair}
    problem = "its weights do not fit its config.json"
    return with_weights(type(skeleton), path, skeleton.config, problem, device_map=places)


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


def differences(model: Any, unused: Sequence[str], untied: Untied = ()) -> tuple[list[str], list[str]]:
    """(contradictions between config.json and the files, other tensors that nothing reads), in words with names."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", math.inf)
    beyond = [name for name in unused if (number := re.search(r"\.(\d+)\.", name)) and int(number[1]) >= layers]
    others = [name for name in unused if name not in beyond]
    wrong = [
        f"the files have {source} and another {target}, and config.json ties the two: some readers take one tensor for "
        f'both; write "tie_word_embeddings": false, or remove {target}'
        for target, source in untied
    ]
    if beyond:
        wrong.append(f"the files have more layers than num_hidden_layers = {layers}: nothing reads {listed(beyond)}")
    return wrong, [f"{type(model).__name__} reads none of {listed(others)}"] if others else []


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names of tensors, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def quantization_of(config: Any) -> str | None:
    """Quantization method that config.json declares ("gptq", "awq", "fp8", ...); None if it declares none."""
    for part in (config, config.get_text_config()):
        if options := getattr(part, "quantization_config", None):
            method = (options if isinstance(options, dict) else options.to_dict()).get("quant_method", "unknown")
            return str(getattr(method, "value", method))
    return None


def require_layers(path: str, held: Mapping[str, Saved], config: Any) -> None:
    """ValueError for quantized weights of another number of layers; their names and shapes depend on the method."""
    numbers = {int(match[1]) for name in held if (match := OF_LAYER.match(name))}
    if quantization_of(config) is None or not numbers:
        return
    text = config.get_text_config()
    more = getattr(text, "num_nextn_predict_layers", 0) or 0  # layers that predict tokens further on follow the last
    if not text.num_hidden_layers <= max(numbers) + 1 <= text.num_hidden_layers + more:
        got = f"{max(numbers) + 1} in the files"
        raise UsageError(path, f"{text.num_hidden_layers} layers, by config.json", got, "correct num_hidden_layers")


# ---- checks -----------------------------------------------------------------------------------------------------------
def local_folder(path: str) -> Path | None:
    """The local folder, or None for a name of the hub: "model" or "owner/model", if there is no such folder."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        require_own_files(folder)
        if (folder / "adapter_config.json").exists():  # transformers would load its base, whatever that is
            expected = "the weights of a model; merge the adapter into its base with peft's merge_and_unload"
            raise UsageError(str(folder), expected, "an adapter (adapter_config.json)")
        return folder
    if folder.exists():
        raise ValueError(f"{path} is a file; expected the folder of a checkpoint, with config.json")
    if not path or path[0] in "./~" or path.count("/") > 1 or "\\" in path or ("/" in path and folder.parent.is_dir()):
        raise ValueError(
            f"{path}: there is no such folder; expected a checkpoint with config.json, or a name on the hub"
        )
    return None


def require_own_files(folder: Path) -> None:
    """Raise ValueError for a link that leaves the folder, and for entries that are neither file nor folder.

    Links to blobs of the hub's cache are allowed, because the cache stores files as such links.
    """
    root = folder.resolve()
    blobs = [root.parent.parent / "blobs", *Path(os.path.expanduser(HF_HUB_CACHE)).resolve().glob("*/blobs")]
    for path in sorted((*folder.iterdir(), *folder.glob("*/*"))):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # nothing reads them
        target = Path(os.path.realpath(path))  # resolve() has a traceback for a link that leads to itself
        if path.is_symlink() and not any(target.is_relative_to(place) for place in (root, *blobs)):
            raise ValueError(
                f"{path} is a link to {target}, outside of the checkpoint's folder, and is not followed; put a copy in its place"
            )
        if not path.is_file() and not path.is_dir():
            what = "a link to nothing" if path.is_symlink() else "no regular file (a pipe, socket or device)"
            raise ValueError(f"{path} is {what}; remove it, or put the file in its place")


def require_config(place: Path) -> dict[str, Any]:
    """The content of a config.json, or of that in a folder. ValueError unless it is one of an architecture in transformers."""
    file = place / "config.json" if place.is_dir() else place
    if (raw := read_json(file, links=True)) is None:
        raise ValueError(f"{place}: there is no config.json; expected the folder of a Hugging Face checkpoint")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        expected = f"a model_type that transformers {transformers.__version__} has"
        newer = f"if a newer one has it, upgrade; code that comes with a checkpoint is never run; {OWN_CODE}"
        raise UsageError(str(file), expected, repr(kind), newer)
    try:
        require_numbers(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return raw


def require_shards(folder: Path) -> dict[str, Saved]:
    """Every tensor of a folder's safetensors by name. ValueError for none, a truncated file, or a missing one of the index."""
    held = {
        name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in tensors_of(shard).items()
    }
    index, named = folder / INDEX, weight_map(folder)
    if lost := sorted({file for file in named.values() if not (folder / file).is_file()}):
        raise ValueError(f"{index} names {lost[0]}, which is not there; fetch it, or restore the index")
    if lost := sorted(set(named) - held.keys()):
        raise ValueError(f"{index} names the tensor {lost[0]}, which no file has; restore the files")
    if not held:
        pickled = "; a pickle (pytorch_model.bin) can run code as it is read" * any(folder.glob("*.bin"))
        raise UsageError(str(folder), "weights as safetensors", "none", f"save them with save_pretrained{pickled}")
    return held


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file, by the index of a folder's safetensors; empty without one. ValueError for one that names no such files."""
    named = (read_json(folder / INDEX, links=True) or {}).get("weight_map", {})
    files = [*named.values()] if isinstance(named, dict) else [named]
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise UsageError(
                str(folder / INDEX), "weight_map: tensors and the file of each, in this folder", repr(file)[:80]
            )
    return named


def size_of(folder: Path, held: Mapping[str, Saved], dtype: torch.dtype | str) -> int:
    """Bytes of a folder's tensors in memory, in a dtype or as they are saved ("auto"), from their headers.

    Quantized numbers stay as they are saved. Files that the index does not name are not read.
    """
    read = {*weight_map(folder).values()} or {"model.safetensors"}
    tensors = [tensor for tensor in held.values() if tensor.shard.name in read]
    total = sum(shard.stat().st_size for shard in {tensor.shard for tensor in tensors})
    if isinstance(dtype, torch.dtype):
        floats = [tensor for tensor in tensors if tensor.kind in FLOATS]
        total += sum(math.prod(tensor.shape) * (dtype.itemsize - FLOATS[tensor.kind]) for tensor in floats)
    return total


def require_finite(name: str, weight: Tensor, file: Path | str) -> None:
    """ValueError for a weight of this file with NaN or infinity."""
    if weight.is_floating_point() and weight.dtype.itemsize > 1 and not bool(weight.isfinite().all()):
        raise ValueError(f"{file}: {name} has numbers that are not finite; copy or download the weights again")


class Saved(NamedTuple):
    """A tensor in a safetensors file, by its header.

    Attributes:
        shard: The file.
        kind: The kind of its numbers ("F32", "I8").
        shape: Its shape.
    """

    shard: Path
    kind: str
    shape: list[int]


def tensors_of(shard: Path) -> dict[str, Saved]:
    """Every tensor of a safetensors file by name, from its header. ValueError when it is truncated or broken."""
    if not os.access(shard, os.R_OK):
        raise ValueError(f"{shard} cannot be read; you need the permission to")
    try:
        with safe_open(shard, framework="np") as file:  # "pt" reserves memory for the whole file
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            return {name: Saved(shard, str(part.get_dtype()), part.get_shape()) for name, part in slices.items()}
    except Exception as error:
        raise ValueError(
            f"{shard}: the weights are truncated or broken; copy or download them again ({one_line_of(error)})"
        ) from error


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None:
        return "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES, "It is the type of the weights in memory.")
    return getattr(torch, name)


def _device(device: str | torch.device) -> torch.device:
    with in_one_line(f"device {device}: this machine has none that torch {torch.__version__} can use; try cpu"):
        torch.empty(1, device=device)
        return torch.device(device)


# ---- errors in one line -----------------------------------------------------------------------------------------------
@contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    """Turn any error of transformers, safetensors, tokenizers or torch about a user's files into one ValueError."""
    try:
        yield
    except Exception as error:
        subject = problem.partition(": ")[0]
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error)):
            problem = f"{subject}: there is not enough memory; {SMALLER}"  # the files may be right
        raise ValueError(f"{problem} ({one_line_of(error)})") from error


def maker_of(config: Any) -> Callable[[Any], Any]:
    """The function that makes a model of a config: of an Auto class, or of the class with the encodings of `set_positions`."""
    positions_are_set = getattr(config, KEY, None) is not None
    return class_of(config.name_or_path, config) if positions_are_set else auto_class_of(config).from_config


def built_without_weights(path: str, config: Any) -> Any:
    """A model on the meta device. ValueError, in one line, with the wrong rotary key, if that is known."""
    make = maker_of(config)
    try:
        with quiet(), torch.device("meta"):
            return make(config)
    except Exception as error:
        why = fault_of(config) or lost_type(text_part(config), error) or one_line_of(error)
        raise ValueError(f"{path}: config.json: no model can be built of it ({why})") from error
