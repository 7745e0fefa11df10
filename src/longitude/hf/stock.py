"""Unmodified Transformers models with any encoding instead of their rotation, with save_pretrained and from_pretrained."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longitude.errors import UsageError, one_line_of
from longitude.hf.layer import PositionEmbeddings, attach
from longitude.labels import LAYERS, parse_encoding
from longitude.models.configuration import LongitudeConfig, by_pattern
from longitude.models.decoder import built_by_layer
from longitude.models.stock_caches import PLAIN_LAYERS
from longitude.positions.base import ENCODINGS, Encoding
from longitude.positions.composed import Composed, compose, of_axes
from longitude.positions.coordinates import as_int, canonical, explicit
from longitude.positions.hugging_face import RopeConfig, read_ropes
from longitude.positions.remapped import Remapped
from longitude.positions.rotary import Rotary
from longitude.registry import options_of

Spec = str | dict[str, Any] | Sequence[Any]
KEY = "longitude_positions"
"""The key of the encoding in config.json, and the name under which the model has its parameters."""


def set_positions(model: PreTrainedModel, encoding: Spec) -> None:
    """Replace the rotation of an unmodified Transformers model by another encoding, in all layers.

    Parameters of the encoding become parameters of the model. save_pretrained saves them; `longitude.hf.from_pretrained` loads
    the model again. Weights that were trained with another rotation need further training.

    Args:
        model: a causal model with rotary parameters (Llama, Mistral, GPT-NeoX and similar models).
        encoding: a name, {"name": name, **options}, a label such as "t5:max_distance=32", or a list of these, which is
            composed. Missing options come from the model's shape. {"layers": [...]} has an entry for each layer, or a pattern
            of fewer entries that is repeated, as does the label "rope..rope..nope". "nope" is a layer without position.

    Raises:
        ValueError: a model or an encoding that does not fit, with the reason.
    """
    base: Any = model.base_model
    layers = attentions(base)
    if isinstance(encoding, str) and LAYERS in encoding:
        encoding = {"layers": encoding.split(LAYERS)}
    if isinstance(encoding, Mapping) and "layers" in encoding:
        layer_specs = by_layer(encoding, model.config, len(layers))
        specs = {"layers": layer_specs}
    else:
        specs = resolved(encoding, model.config)
        layer_specs = [specs] * len(layers)
    built = built_by_layer(layer_specs)
    members = list(dict.fromkeys(member for of_layer in built for member in of_layer))  # a shared one is there once
    require_fitting([spec for of_layer in layer_specs for spec in of_layer], members, model.config)
    composed_by_layer = [Composed(of_layer) for of_layer in built]
    config = own_config(model)
    parameter = next(base.parameters())
    model.set_attn_implementation("longitude")
    base.add_module(KEY, nn.ModuleList(members).to(parameter.device, parameter.dtype))
    base.rotary_emb = IdentityRotary({member: None for composed in composed_by_layer for member in composed})
    for attention, composed in zip(layers, composed_by_layer, strict=True):
        attach(attention, composed)
    setattr(config, KEY, specs)
    config.rope_parameters = with_sentinel(config.rope_parameters)


def own_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Give the model its own copy of its configuration: AutoModel passes one object to all models made from it."""
    shared, config = model.config, deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config  # pyright: ignore[reportArgumentType]
    return config


class IdentityRotary(nn.Module):
    """Replaces a model's rotation by none: cos = 1, sin = 0, without the model's scaling.

    Called once in a forward, with positions, it makes the tables that all layers share.
    """

    members: tuple[Encoding, ...]

    def __init__(self, members: dict[Encoding, None]):
        super().__init__()
        self.__dict__["members"] = tuple(members)  # not as modules: the model has them, once

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> PositionEmbeddings:
        """Make (cos, sin) of the identity, with positions and tables, for x [B, L, dim] and position_ids [B or 1, L]."""
        if position_ids.dim() != 2:
            raise UsageError("position_ids", "[B, L]", list(position_ids.shape))
        positions = as_int(canonical("position_ids", position_ids, x.shape[0], x.shape[1]))
        of_tokens = explicit(positions, x.shape[1], x.device)
        shared = [m for m in self.members if m.stable_keys and not m.learns_frequencies]
        tables = {m: m(partial(m.prepare, of_axes(m, of_tokens), None, x.dtype)) for m in shared}
        return PositionEmbeddings((x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)), positions, tables)


# ---- which models, which encodings -----------------------------------------------------------------------------------
def attentions(base: Any) -> list[nn.Module]:
    """Attention modules of the layers, in order; ValueError for a model with a rotation that cannot be replaced."""
    kind = type(base).__name__
    rotary = getattr(base, "rotary_emb", None)
    keyed = hasattr(base.config, "rope_parameters")
    if not isinstance(rotary, nn.Module) or not keyed:
        missing = [*["rotary_emb"] * (not isinstance(rotary, nn.Module)), *["rope_parameters"] * (not keyed)]
        expected = "a model with a rotation to replace, such as Llama"
        raise UsageError("set_positions", expected, f"{kind} without {' and '.join(missing)}")
    names = list(inspect.signature(rotary.forward).parameters)
    if names not in (["x", "position_ids"], ["x", "position_ids", "layer_type"]):
        raise ValueError(f"set_positions: {kind}.rotary_emb takes {', '.join(names)}; expected x and position_ids")
    modules = [m for m in base.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    if [m.layer_idx for m in modules] != list(range(base.config.num_hidden_layers)):
        raise ValueError(f"set_positions: expected one attention in each layer of {kind}, found {len(modules)}")
    require_plain_keys(modules, base.config)
    require_identity(modules[0], rotary, base.config)
    return modules


def require_plain_keys(attentions: list[nn.Module], config: PreTrainedConfig) -> None:
    """UsageError if the cache that transformers makes for a model has more than keys and values, such as an indexer's keys."""
    for attention, layer in zip(attentions, DynamicCache(config=config).layers):
        if type(layer) not in PLAIN_LAYERS:
            raise UsageError(
                "set_positions",
                "attention whose cache stores keys and values alone",
                f"{type(attention).__name__}, which caches {type(layer).__name__}",
                "it selects or compresses keys, and positions of those are not an encoding's",
            )


def require_identity(attention: nn.Module, rotary: nn.Module, config: PreTrainedConfig) -> None:
    """UsageError if a layer runs with the model's own rotation, but not with the identity that replaces it: cos 1, sin 0.

    It runs on the meta device, which has no weights. A layer that cannot be made or run by itself is not judged.
    """
    eager = deepcopy(config)
    eager._attn_implementation = "eager"
    labels = getattr(config, "layer_types", None) or [None]
    label = labels[:1] if "layer_type" in inspect.signature(rotary.forward).parameters else []

    def run(embeddings: Any) -> None:
        x = torch.zeros(1, 1, config.hidden_size, device="meta", dtype=torch.float32)
        made(hidden_states=x, position_embeddings=embeddings, attention_mask=None)

    try:
        with torch.no_grad(), torch.device("meta"):
            made: Any = type(attention)(eager, 0).float()
            turned = type(rotary)(eager)(torch.zeros(1, 1, 1), torch.zeros(1, 1), *label)
            run(turned)
    except Exception:
        return
    try:
        with torch.no_grad(), torch.device("meta"):
            run((torch.ones(1, 1, 1), torch.zeros(1, 1, 1)))
    except Exception as error:
        latent = " with latent keys (kv_lora_rank)" if getattr(config, "kv_lora_rank", None) else ""
        raise UsageError(
            "set_positions",
            "attention that multiplies queries and keys by cos and sin",
            f"{type(attention).__name__}{latent}, which rotates in its own way",
            f"its rotation cannot be replaced ({one_line_of(error)})",
        ) from error


def require_fitting(specs: list[dict[str, Any]], members: list[Encoding], config: PreTrainedConfig) -> None:
    """ValueError for an encoding that an unmodified model cannot have, or with other heads than the model's."""
    for member in (m for composed in members for m in compose(composed)):
        if member.at_input:
            raise ValueError(
                f"set_positions: {type(member).__name__} acts on the model's input, which is not replaced; use lg.LongitudeConfig"
            )
        if member.axes > 1:
            raise ValueError(
                f"set_positions: {type(member).__name__} takes {member.axes} axes, and the model's tokens have one position"
            )
    for spec in specs:
        for option, size in heads_of(config).items():
            if spec.get(option, size) != size:
                raise ValueError(
                    f"set_positions: {spec['name']} has {option}={spec[option]}, and the model {size}; leave {option} out"
                )


# ---- from specs to modules, and back --------------------------------------------------------------------
def resolved(encoding: Spec, config: PreTrainedConfig, layer: int | None = None) -> list[dict[str, Any]]:
    """The name and all options of each composed encoding.

    layer: the layer with the rotation that supplies missing options; None: the rotation of all layers.
    """
    parts = encoding if isinstance(encoding, list | tuple) else [encoding]
    if not parts or not all(isinstance(part, str | Mapping) for part in parts):
        raise UsageError(
            "set_positions", 'a name, {"name": name, **options}, or a list of at least one of them', repr(encoding)
        )
    heads = heads_of(config)
    shape = LongitudeConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=heads["num_heads"],
        num_key_value_heads=heads["num_kv_heads"],
        max_position_embeddings=config.max_position_embeddings,
        encoding="nope",
    )
    specs = []
    for part in parts:
        for options in parse_encoding(part) if isinstance(part, str) else [dict(part)]:
            factory = ENCODINGS[options.get("name", "")]
            if "head_dim" in options_of(factory):
                options.setdefault("head_dim", heads["head_dim"])
            if isinstance(factory, type) and issubclass(factory, Rotary):
                options = with_own_rotation(options, config, heads["head_dim"], layer)
            spec = shape.resolve(options)
            specs += spec if isinstance(spec, list) else [spec]
    return specs


def by_layer(encoding: Mapping[str, Any], config: PreTrainedConfig, layers: int) -> list[list[dict[str, Any]]]:
    """For each layer its specs with every option written out."""
    if encoding.keys() != {"layers"} or not isinstance(encoding["layers"], list | tuple):
        raise UsageError("set_positions", '{"layers": [an encoding, ...]} alone', repr(dict(encoding)))
    pattern = by_pattern("set_positions", encoding["layers"], layers)
    return [resolved(part, config, layer) for layer, part in enumerate(pattern)]


def heads_of(config: PreTrainedConfig, layer_type: str | None = None) -> dict[str, int]:
    """The model's heads, by the names of an encoding's options; those of one type of layers where types differ (Gemma 4)."""
    layers = [config]
    if getattr(config, "is_heterogeneous", False):
        configs: Any = config.per_layer_config
        layers = configs[:] if layer_type is None else [configs[layer_type]]
    if not all(hasattr(layer, "num_attention_heads") for layer in layers):
        raise UsageError("", "num_attention_heads", f"a {config.model_type} config without it")
    heads_by_layer = [
        {
            "num_heads": (count := layer.num_attention_heads),
            "num_kv_heads": getattr(layer, "num_key_value_heads", None) or count,
            "head_dim": getattr(layer, "head_dim", None) or layer.hidden_size // count,
        }
        for layer in layers
    ]
    if others := [heads for heads in heads_by_layer if heads != heads_by_layer[0]]:
        raise UsageError("", "layers with the same heads", f"{heads_by_layer[0]} and {others[0]}")
    return heads_by_layer[0]


def own_rotation(config: PreTrainedConfig, layer: int | None, with_base: bool) -> dict[str, Any]:
    """config.rope_parameters, or those of a layer's type. ValueError if they differ, without a layer or a base of the user."""
    rotations = config.rope_parameters
    if not rotations or not all(isinstance(rotation, Mapping) for rotation in rotations.values()):
        return rotations or {}
    if layer is not None:
        return rotations[config.layer_types[layer]]
    of_types = list({name: rotations[name] for name in config.layer_types}.values())
    if with_base or all(rotation == of_types[0] for rotation in of_types):
        return of_types[0]
    bases = ", ".join(f"{name} {rotations[name].get('rope_theta')}" for name in dict.fromkeys(config.layer_types))
    raise UsageError(
        "set_positions",
        f"base, because the model's layers have several ({bases})",
        "none",
        '{"layers": [encoding]} keeps that of each layer',
    )


def with_own_rotation(
    options: dict[str, Any], config: PreTrainedConfig, head_dim: int, layer: int | None
) -> dict[str, Any]:
    """A rotation's options, with base and rotary_dim of the model's own rotation as defaults.

    A rotation by remapped offsets, which needs no training, also keeps the model's scaling.
    """
    if "layout" not in options:
        raise ValueError(
            f"set_positions: {options['name']} needs layout='half', in which the weights of Llama, Mistral, GPT-NeoX and most "
            "others were trained, or layout='interleaved'"
        )
    factory = ENCODINGS[options["name"]]
    if missing := [option for option in factory.model_defaults if option not in options]:
        raise ValueError(
            f"set_positions: {options['name']} needs {' and '.join(missing)}, which depend on the model's training length"
        )
    known = options_of(factory)
    rotation = own_rotation(config, layer, "base" in options or "base" not in known)
    scaled = issubclass(factory, Remapped) and rotation.get("rope_type", "default") not in ("default", "longitude")
    keys = {**config.to_dict(), "rope_parameters": rotation}
    if scaled and isinstance(rope := read_ropes(keys), RopeConfig) and rope.scaling is not None:
        options = {"scaling": rope.scaling.as_dict(), **options}
    if "rope_theta" in rotation and "base" in known:
        options = {"base": rotation["rope_theta"], **options}
    if rotation.get("partial_rotary_factor", 1.0) != 1.0 and "rotary_dim" in known:
        options = {"rotary_dim": int(head_dim * rotation["partial_rotary_factor"]), **options}
    return options


# ---- saved and loaded ------------------------------------------------------------------------------------------------
loading: ContextVar[bool] = ContextVar("loading", default=False)
"""Whether a model with the sentinel in its config may be made."""


def with_sentinel(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters that unmodified transformers does not load; without the sentinel it would silently rotate, too."""
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one for each type of layer
        return {name: with_sentinel(value) for name, value in rope.items()}
    return {**rope, "rope_type": "longitude"}


def no_rotation(config: PreTrainedConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
    """Frequencies for rope_type "longitude" in transformers: the identity rotation, only for `from_pretrained`."""
    if not loading.get():
        raise ValueError(
            f"this model's positions are Longitude's, {json.dumps(getattr(config, KEY, None))}: "
            "load it with longitude.hf.from_pretrained"
        )
    return torch.zeros(1), 1.0


ROPE_INIT_FUNCTIONS["longitude"] = no_rotation


def from_pretrained(path: Any, **options: Any) -> PreTrainedModel:
    """Load a model that was saved after set_positions, with its encoding and parameters.

    Args:
        path: a directory, or the name of a model on the hub.
        **options: as for from_pretrained of transformers.

    Returns:
        The model.

    Raises:
        ValueError: it has no encoding of Longitude, or its weights lack parameters.
        OSError: there is no such model.
    """
    if options.get("attn_implementation", "longitude") != "longitude":
        raise UsageError("attn_implementation", "'longitude'", repr(options["attn_implementation"]))
    options["attn_implementation"] = "longitude"
    config = AutoConfig.from_pretrained(path)
    if getattr(config, KEY, None) is None:
        raise ValueError(f"{path}: no encoding was set in this model ({KEY} in config.json); load it with transformers")
    model, info = class_of(path, config).from_pretrained(path, config=config, output_loading_info=True, **options)
    if missing := [key for key in info["missing_keys"] if KEY in key]:
        raise ValueError(f"{path}: the weights lack {', '.join(sorted(missing))}")
    return model


def class_of(path: Any, config: PreTrainedConfig) -> Any:
    """Subclass of the Transformers class, with a from_pretrained that loads such a model and sets its encoding on creation."""
    stock = getattr(transformers, (config.architectures or ["none"])[0], None)
    if stock is None:
        raise ValueError(f"{path}: config.json names no class of transformers, got {config.architectures}")

    def make(self: PreTrainedModel, config: PreTrainedConfig, *arguments: Any, **named: Any) -> None:
        token = loading.set(True)
        try:
            stock.__init__(self, config, *arguments, **named)
        finally:
            loading.reset(token)
        set_positions(self, getattr(config, KEY))

    return type(stock.__name__, (stock,), {"__init__": make, "__module__": stock.__module__})
