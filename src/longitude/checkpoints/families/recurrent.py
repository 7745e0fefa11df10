"""Published recurrent models as ours: Mamba, Falcon-Mamba, Mamba-2, RWKV-4 and RWKV-6, with the same logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import load_state_dict

from longitude.checkpoints.config import raw_config
from longitude.checkpoints.families import mamba, rwkv
from longitude.checkpoints.families.names import inverse, renamed
from longitude.checkpoints.load import (
    PICKLED,
    dtype_of,
    in_one_line,
    local_folder,
    refusing_code,
    require_finite,
    require_shards,
    require_tensors,
    require_weights,
    shapes_of,
)
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import fetched
from longitude.errors import UsageError
from longitude.models.causal import LongitudeForCausalLM
from longitude.models.configuration import LongitudeConfig
from longitude.runs.files import read_json


@dataclass(frozen=True)
class Family:
    """A family that transformers has a class for: our config of theirs, theirs of ours, and the names of tensors."""

    config_of: Callable[[str, PreTrainedConfig, Mapping[str, Any]], LongitudeConfig]
    options_of: Callable[[LongitudeConfig, str], dict[str, Any]]
    names: Mapping[str, str]


OF_MAMBA = Family(mamba.config_of, mamba.options_of, mamba.NAMES)
FAMILIES = {
    "mamba": OF_MAMBA,
    "falcon_mamba": OF_MAMBA,
    "mamba2": OF_MAMBA,
    "rwkv": Family(rwkv.config_of, rwkv.options_of, rwkv.NAMES),
}
"""Families by model_type."""
WITHOUT_CLASS = "rwkv6"
SUFFIXES = (".pth", ".safetensors")
"""Suffixes of single-file checkpoints, as published by the authors of RWKV."""


def from_recurrent(
    checkpoint: PreTrainedModel | str | Path, *, dtype: str | torch.dtype | None = None, allow_pickle: bool = False
) -> LongitudeForCausalLM:
    """Load a published Mamba, Falcon-Mamba, Mamba-2, RWKV-4 or RWKV-6 as a LongitudeForCausalLM with equal logits.

    Blocks of the Mambas have no MLP; those of RWKV have its channel mix. save_pretrained saves the model in our format.

    Args:
        checkpoint: A folder with config.json and weights in the format of transformers, of RWKV-6's published code, or of
            mamba_ssm; a name on the hub; a single file by the authors of RWKV (.pth, .safetensors); or a Transformers model,
            from which weights are copied.
        dtype: Data type of the weights; None: that of config.json, else that of the saved embedding.
        allow_pickle: Read pickled weights (pytorch_model.bin, .pth) if there are no safetensors, with torch's restricted
            reader.

    Returns:
        Our model in eval mode.

    Raises:
        ValueError: In one line, for another family, a key of config.json that is not understood, with its value, weights that
            are missing, left over, of another shape, not finite, or a pickle that was not allowed.
    """
    if isinstance(checkpoint, PreTrainedModel):
        return of_model(checkpoint, dtype)
    if not isinstance(checkpoint, str | Path):
        raise UsageError("from_recurrent", "a path or a model of transformers", type(checkpoint).__name__)
    where = str(checkpoint)
    if (file := Path(where).expanduser()).is_file() and file.suffix in SUFFIXES:
        state = renamed(tensors_of_file(file, allow_pickle), rwkv.AUTHORS)
        return loaded(where, rwkv.config_of_tensors(where, state, {}), state, rwkv.NAMES, dtype_of(dtype))
    folder = local_folder(where) or fetched(where, allow_pickle)
    require_weights(folder, allow_pickle)
    plain = config_json(folder)
    kind = plain.get("model_type")
    if kind is None and "ssm_cfg" in plain:
        plain = mamba.of_mamba_ssm(where, plain)
        kind = plain["model_type"]
    if kind not in FAMILIES and kind != WITHOUT_CLASS:
        raise UsageError(
            where,
            f"a model of type {', '.join(FAMILIES)} or {WITHOUT_CLASS}, or a config.json of mamba_ssm",
            repr(kind),
        )
    if kind in FAMILIES:
        with quiet(), in_one_line(f"{folder / 'config.json'}: no configuration of {kind}"):
            theirs = CONFIG_MAPPING[kind].from_dict(plain)
        config, names = FAMILIES[kind].config_of(where, theirs, plain), FAMILIES[kind].names
        state = renamed(tensors_of(folder), mamba.OLD_NAMES)
    else:
        state, names = tensors_of(folder), rwkv.NAMES
        config = rwkv.config_of_tensors(where, state, plain)
    saved = plain.get("dtype", plain.get("torch_dtype"))
    model = loaded(where, config, state, names, dtype_of(saved if dtype is None else dtype))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def to_transformers(model: LongitudeForCausalLM) -> PreTrainedModel:
    """Convert our Mamba, Falcon-Mamba, Mamba-2 or RWKV-4 to a model of transformers with equal logits.

    Its save_pretrained writes the family's own format.

    Args:
        model: A model as `from_recurrent` makes it, perhaps trained further; its weights are copied.

    Returns:
        The model of transformers, in the dtype and on the device of ours.

    Raises:
        ValueError: For a model that the family's config cannot describe, with the option.
    """
    config: Any = model.config if isinstance(model, LongitudeForCausalLM) else None
    if config is None or (kind := kind_of(config)) is None:
        what = type(model).__name__ if config is None else f"one of {', '.join(mixers_of(config))}"
        raise UsageError(
            "to_transformers", "a model of mamba, mamba2 or rwkv4 in all layers", what, "transformers has no other"
        )
    family = FAMILIES[kind]
    ids = {name: getattr(config, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    with in_one_line(f"to_transformers: {kind} cannot describe this model"):
        theirs = CONFIG_MAPPING[kind](**family.options_of(config, kind), **ids)
    again = family.config_of("to_transformers", theirs, theirs.to_dict())
    for name, value in comparable(config).items():
        if (kept := comparable(again)[name]) != value:
            raise ValueError(
                f"to_transformers: a {kind} of transformers would have {name} = {kept!r}, this model has {value!r}"
            )
    with quiet():
        made = AutoModelForCausalLM.from_config(theirs)
    made.to(device=model.device, dtype=model.dtype)
    made.load_state_dict(renamed(model.state_dict(), inverse(family.names)))
    made.generation_config = model.generation_config
    return made.train(model.training)


# ---- reading -------------------------------------------------------------------------------------------------------------
def of_model(model: PreTrainedModel, dtype: str | torch.dtype | None) -> LongitudeForCausalLM:
    """A model of transformers as ours."""
    kind, where = model.config.model_type, f"from_recurrent({type(model).__name__})"
    if kind not in FAMILIES:
        raise UsageError("from_recurrent", f"a model of type {', '.join(FAMILIES)}", repr(kind))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if getattr(model.base_model, "layers_are_rescaled", False):
        undo_rescaling(state, model.config.rescale_every)
    config = FAMILIES[kind].config_of(where, model.config, model.config.to_dict())
    ours = loaded(where, config, state, FAMILIES[kind].names, dtype_of(model.dtype if dtype is None else dtype))
    ours.generation_config = model.generation_config
    return ours.train(model.training)


def undo_rescaling(state: dict[str, Tensor], every: int) -> None:
    """Restore the weights of an RWKV that was run in eval mode, where its forward divides them in place."""
    if every > 0:
        for name in state:
            if name.endswith((".attention.output.weight", ".feed_forward.value.weight")):
                state[name].mul_(2 ** (int(name.split(".")[2]) // every))


def config_json(folder: Path) -> dict[str, Any]:
    """Content of config.json. ValueError if there is none, or one that cannot be read."""
    if read_json(folder / "config.json") is None:
        raise ValueError(f"{folder}: there is no config.json that can be read; expected the folder of a checkpoint")
    return raw_config(folder)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weights, from safetensors, or from allowed pickles."""
    if require_shards(folder):
        return {
            name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }
    files = sorted(folder.glob(PICKLED))
    return {name: tensor for file in files for name, tensor in tensors_of_file(file, True).items()}


def tensors_of_file(file: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """The tensors of one file."""
    if file.suffix == ".safetensors":
        shapes_of(file)  # ValueError for a truncated file
        return load_file(file)
    if not allow_pickle:
        raise ValueError(
            f"{file}: its weights are a pickle, which can run code as it is read; convert them to safetensors, or pass "
            "allow_pickle=True if you trust where they come from"
        )
    with refusing_code(str(file)), in_one_line(f"{file}: the weights cannot be loaded; copy or download them again"):
        held = load_state_dict(str(file), map_location="cpu", weights_only=True)
    if not isinstance(held, dict) or not all(isinstance(each, Tensor) for each in held.values()):
        raise ValueError(f"{file}: expected a dict of tensors by their names")
    return held


def loaded(
    where: str, config: LongitudeConfig, state: dict[str, Tensor], names: Mapping[str, str], dtype: torch.dtype | str
) -> LongitudeForCausalLM:
    """Build our model of a config and load the checked, renamed tensors; dtype "auto": the dtype of the embedding."""
    with torch.device("meta"):
        model = LongitudeForCausalLM(config)
    state = renamed(state, names)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if (embeddings := state.get(embedding)) is None:
        raise ValueError(f"{where}: the weights lack the embedding, {next(iter(inverse(names).values()))}weight")
    kind = embeddings.dtype if isinstance(dtype, str) else dtype
    state = {name: tensor.to(kind) for name, tensor in state.items()}
    if mixers_of(config) == ["rwkv6"]:
        state = rwkv.of_rwkv6(state, config.num_hidden_layers)
    if config.tie_word_embeddings:
        if head in state and not torch.equal(state[head], state[embedding]):
            raise ValueError(
                f"{where}: tie_word_embeddings = True, and its head is another matrix than its embedding; correct config.json"
            )
        state[head] = state[embedding]

    def named(name: str) -> str:
        """A tensor's name in their files."""
        return next(iter(renamed({name: embeddings}, inverse(names))))

    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    other = [(named(name), given[name], shape) for name, shape in expected.items() if given.get(name, shape) != shape]
    require_tensors(where, other, map(named, expected.keys() - given.keys()))
    if left := sorted(map(named, given.keys() - expected.keys())):
        raise ValueError(f"{where}: {len(left)} of its tensors have no place in the model, such as {left[0]}")
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    require_finite(where, model)
    return model.eval()


# ---- writing -------------------------------------------------------------------------------------------------------------
def mixers_of(config: LongitudeConfig) -> list[str]:
    """The names of its mixers, each once."""
    return list(dict.fromkeys(spec["name"] for spec in config.layer_mixers()))


def kind_of(config: LongitudeConfig) -> str | None:
    """The model_type that has such mixers; None if none has."""
    specs = config.layer_mixers()
    if any(spec != specs[0] for spec in specs):
        return None
    if specs[0]["name"] == "mamba":
        return "mamba" if specs[0]["norm_eps"] is None else "falcon_mamba"
    return {"mamba2": "mamba2", "rwkv4": "rwkv"}.get(specs[0]["name"])


def comparable(config: LongitudeConfig) -> dict[str, Any]:
    """The options that decide logits and training, with those of the mixer that have a default of None written out."""
    mixer = config.mixer_options(config.layer_mixers()[0])
    of_dim = {"dt_rank": -(-config.hidden_size // 16), "head_dim": 64, "inner": config.hidden_size}
    mixer |= {name: value for name, value in of_dim.items() if name in mixer and mixer[name] is None}
    mixer = {f"{name} of the mixer": value for name, value in mixer.items() if name not in ("mode", "chunk_size")}
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "mlp", "norm", "norm_position",
        "embedding_norm", "embedding_scale", "hidden_dropout", "tie_word_embeddings",
    )  # fmt: skip
    eps = "layer_norm_eps" if config.norm == "layernorm" else "rms_norm_eps"
    encodings = [one for specs in config.layer_specs() for one in specs if one["name"] != "nope"]
    return {name: getattr(config, name) for name in (*names, eps)} | mixer | {"encoding": encodings or "nope"}
