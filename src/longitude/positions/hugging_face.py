"""Rotary options of Hugging Face configs, read and written: rope_parameters (transformers 5) and rope_scaling (before)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, cast

from longitude.errors import Positive, Rate, Share, UsageError, check_choice, check_declared, check_sizes, unknown
from longitude.positions.base import Encoding, encoding as build
from longitude.positions.composed import Composed
from longitude.positions.config_keys import (
    ALL_KEYS,
    BASES,
    COMMON,
    EXTRA,
    KEYS,
    LOCAL_BASES,
    OLD_TYPES,
    ORIGINAL,
    SCALED,
    SCHEMAS,
    SHARES,
    SHARES_BY_LAYER,
    UNDERSTOOD,
    WIDTH,
    ZERO_IS_NONE,
    as_mapping,
    is_foreign,
    rope_dicts,
    value_of,
)
from longitude.positions.rotary import MultimodalRotary, Rotary
from longitude.positions.rotation import Layout
from longitude.positions.scaling import NTK, DynamicNTK, Linear, LongRoPE, Scaling
from longitude.positions.scaling.base import ORIGINAL_LENGTH, ROPE_TYPES


class NotUnderstood(ValueError):
    """A config has keys that change positions and cannot be read here; `keys` has their names."""

    def __init__(self, message: str, keys: Sequence[str] = ()):
        super().__init__(message)
        self.keys = tuple(keys)


class RopeConfig(NamedTuple):
    """The rotary parameters of a config, for one type of layers.

    Example: from_hugging_face(config).encoding(head_dim, "half") is the encoding that the config describes.

    Args:
        base: rope_theta.
        scaling: a scheme of lg.scaling, or None.
        partial_rotary_factor: the part of each head that rotates.
        proportion: the part of the pairs that rotates (p-RoPE).
        sections: pairs per axis (mrope), or None.
        interleaved: whether the pairs of the axes interleave, or come one axis after the other.
        temperature: encoding {"name": name, **options} of the temperature of queries in rotating layers, or None.
        rotates: whether each layer rotates queries and keys; None: all do.
        unrotated_temperature: temperature in layers that do not rotate.
    """

    base: float
    scaling: Scaling | None = None
    partial_rotary_factor: float = 1.0
    proportion: float = 1.0
    sections: tuple[int, ...] | None = None
    interleaved: bool = False
    temperature: dict[str, Any] | None = None
    rotates: tuple[bool, ...] | None = None
    unrotated_temperature: dict[str, Any] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """int(head_dim partial_rotary_factor), which must be even: ports disagree on what an odd one means."""
        dim = int(head_dim * self.partial_rotary_factor)
        if dim % 2:
            share = f"head_dim={head_dim} times partial_rotary_factor={self.partial_rotary_factor}"
            raise UsageError("rope", f"{share} to be even", dim)
        return dim

    def options(self, head_dim: int) -> dict[str, Any]:
        """Options for Rotary and rope_frequencies; if there are sections, for MultimodalRotary."""
        options = {"base": self.base, "scaling": self.scaling, "rotary_dim": self.rotary_dim(head_dim)}
        if self.sections is None:
            return options | {"proportion": self.proportion}
        if self.proportion != 1:
            raise UsageError("mrope", "sections without p-RoPE", f"proportion={self.proportion}")
        arrangement = "interleaved" if self.interleaved else "contiguous"
        return options | {"sections": self.sections, "arrangement": arrangement}

    def encoding(self, head_dim: int, layout: str, layer: int | None = None) -> Encoding:
        """The encoding that the config describes.

        No config has its layout: "half" for most models, "interleaved" for GPT-J, DeepSeek and similar models.

        Args:
            head_dim: width of a head.
            layout: which numbers of a head make a pair.
            layer: index of a layer, which may not rotate; None: the encoding of layers that rotate.

        Returns:
            MultimodalRotary if there are sections, else Rotary, composed with the temperature if there is one. For a layer
            that does not rotate: its temperature, or NoPosition.
        """
        if layer is not None and self.rotates is not None and not self.rotates[layer]:
            return build(**(self.unrotated_temperature or {"name": "nope"}))
        kind = Rotary if self.sections is None else MultimodalRotary
        rotary = kind(head_dim, cast(Layout, layout), **self.options(head_dim))
        return rotary if self.temperature is None else Composed([rotary, build(**self.temperature)])


Style = Literal["rope_parameters", "rope_scaling"]
SHARE = " or ".join(reversed(SHARES))  # a config has one of them
BOUNDS = {BASES[0]: Positive, SHARE: Share, "alpha": Positive, "llama_4_scaling_beta": Rate, ORIGINAL: int}
"""Types and bounds of rope parameters that belong to no scheme, which checks its own."""


# ---- reading ---------------------------------------------------------------------------------------------------------
def unread_words(keys: Sequence[str]) -> str:
    """Text for keys that `not_understood` returned; empty if there are none."""
    known = f"{', '.join(UNDERSTOOD)}; inside rope_parameters {', '.join(sorted(ALL_KEYS))}"
    return f"not understood: {', '.join(keys)}; understood are {known}" if keys else ""


def lost_type(config: Mapping[str, Any] | Any, error: BaseException) -> str | None:
    """Error text for a config that lacks a rope_type or the rope parameters of a layer type, if its class raised a KeyError."""
    keys, kind = as_mapping(config), error.args[0] if isinstance(error, KeyError) and error.args else ""
    if kind is None and any(rope.get("rope_type", "") is None for _, rope in rope_dicts(keys)):
        return f"rope_type is null in {SCHEMAS[0]}: write 'default' where nothing is scaled"
    if kind in (keys.get(SCHEMAS[0]) or {}) or kind not in (keys.get("layer_types") or ()):
        return None
    return f"{SCHEMAS[0]} has nothing for layers of {kind!r}: write their rope_type and rope_theta"


def read_ropes(config: Mapping[str, Any] | Any) -> RopeConfig | dict[str, RopeConfig | None]:
    """Read the rotary parameters that a config's keys declare, regardless of how its model family uses them.

    Defaults: the original length of yarn, longrope and llama3 is max_position_embeddings; the config's top-level
    original_max_position_embeddings takes precedence over the one in flat parameters. The factor of yarn and longrope is
    max_position_embeddings / original length. The original length of dynamic is max_position_embeddings.

    Raises:
        ValueError: a missing base (never 10000 by default), an unknown type, a misspelt key, a key of another type.
    """
    config = as_mapping(config)
    for name in SCHEMAS:
        if not isinstance(config.get(name, {}), Mapping):
            raise UsageError("", f"{name} to be a mapping or None", repr(config[name]))
    new, old = (config.get(name) for name in SCHEMAS)
    if old and new and old != new:
        lost = "remove one: transformers takes rope_scaling, and a base that is in rope_parameters is lost"
        raise UsageError("", "rope_parameters or rope_scaling", f"both: {new!r} and {old!r}", lost)
    parameters = new or old or {}
    base, local = (value_of(config, names) for names in (BASES, LOCAL_BASES))
    if isinstance(base, list):
        return ropes_by_layer(config, base, parameters)
    outside = {"rope_theta": base, "partial_rotary_factor": share_of(config)}

    def read(parameters: Mapping[str, Any], config: Mapping[str, Any] = config, **outside: Any) -> RopeConfig:
        merged = {key: value for key, value in parameters.items() if value is not None}
        if merged.get("max_position_embeddings") == config.get("max_position_embeddings"):  # a copy
            merged.pop("max_position_embeddings", None)
        merged = {key: value for key, value in outside.items() if value is not None} | merged
        return rope_of(merged, config)

    if typed := [layer for layer, value in parameters.items() if isinstance(value, Mapping)]:
        for layer, inner in parameters.items():
            if inner is not None and not isinstance(inner, Mapping):
                beside = f"{layer}={inner!r} beside the mapping {typed[0]}"
                raise UsageError("", "a mapping for each layer type", beside)
        inside = {key: value for key, value in config.items() if key != ORIGINAL}  # of flat parameters only
        return {layer: None if inner is None else read(inner, inside, **outside) for layer, inner in parameters.items()}
    if local is not None:  # Gemma 3 and ModernBERT before transformers 5: scaling is for full attention
        sliding = read({}, **outside | {"rope_theta": local})
        return {"full_attention": read(parameters, **outside), "sliding_attention": sliding}
    return read(parameters, **outside)._replace(
        rotates=rotating_layers(config), unrotated_temperature=unrotated_temperature(config)
    )


def ropes_by_layer(
    config: Mapping[str, Any], bases: Sequence[float], scaling: Mapping[str, Any]
) -> dict[str, RopeConfig | None]:
    """Rotary parameters by layer type, of lists with a base and a share for each layer (Step 3.5).

    ValueError for layers of one type with several bases or shares, and without layer_types.
    """
    types = config.get("layer_types") or []
    shares = config.get(SHARES_BY_LAYER) or [1.0] * len(bases)
    if not types or min(len(bases), len(shares)) < len(types):
        raise UsageError("rope_theta", "a number for each of the layer_types", f"{len(bases)} for {len(types)}")
    rotations: dict[str, tuple[float, float]] = {}
    for kind, base, share in zip(types, bases, shares):
        if rotations.setdefault(kind, (base, share)) != (base, share):
            several = [rotations[kind], (base, share)]
            raise UsageError("rope_theta", f"one base and share for layers of {kind!r}", several)
    scaled = config.get(SCALED) or ["full_attention"]
    return {
        kind: rope_of({BASES[0]: base, SHARES[0]: share} | (dict(scaling) if kind in scaled else {}), config)
        for kind, (base, share) in rotations.items()
    }


def share_of(config: Mapping[str, Any]) -> float:
    """The share of each head that rotates, by the keys outside of rope parameters."""
    if (share := value_of(config, SHARES)) is not None or config.get(WIDTH) is None:
        return 1.0 if share is None else share
    check_sizes("rope", **{WIDTH: config[WIDTH]})
    if config[WIDTH] % 2:
        raise UsageError("rope", f"{WIDTH} to be even", config[WIDTH])
    return min(1.0, config[WIDTH] / (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]))


def names_rotation(config: Mapping[str, Any]) -> bool:
    """Whether a config has any key from which `read_ropes` could read a rotation."""
    return any(config.get(key) for key in SCHEMAS) or bool(value_of(config, (*BASES, *LOCAL_BASES)))


def rope_of(keys_of_rope: dict[str, Any], config: Mapping[str, Any]) -> RopeConfig:
    """One flat dict of rope parameters -> RopeConfig."""
    old_key = keys_of_rope.pop("type", "default")
    kind = keys_of_rope.pop("rope_type", old_key)
    kind = OLD_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise unknown("rope_type", kind, ROPE_TYPES, f"all: {', '.join(ROPE_TYPES)}.")
    if "rope_theta" not in keys_of_rope:
        slips = get_close_matches(BASES[0], config, n=1, cutoff=0.8)
        other = f"{slips[0]} is no such key" if slips else "A config of text and images has it in its text_config"
        raise UsageError("", "rope_theta, the base of the frequencies", "none", f"it is never assumed. {other}")
    keys_of_rope = {key: value for key, value in keys_of_rope.items() if value != 0 or key not in ZERO_IS_NONE}
    _, needed, optional = ROPE_TYPES[kind]
    names = needed | optional
    keys = [*names, *EXTRA.get(kind, ()), *COMMON, *(ORIGINAL_LENGTH if "llama_4_scaling_beta" in keys_of_rope else ())]
    stretched = kind == "dynamic" and "alpha" in keys_of_rope  # HunYuan: its files keep keys of YaRN beside it
    for key in keys_of_rope:
        if key not in keys and not is_foreign(key) and not (stretched and key in KEYS["yarn"]):
            raise unknown(f"key of rope_type {kind!r}", key, keys, f"its keys: {', '.join(keys)}.")
    if missing := [key for key in needed if key not in keys_of_rope]:
        raise UsageError(f"rope_type {kind!r}", ", ".join(missing), sorted(keys_of_rope))
    share, proportional = keys_of_rope[SHARES[0]], kind == "proportional"
    check_declared(f"rope_type {kind!r}", BOUNDS, keys_of_rope | {SHARE: share})
    if share == 0 and not proportional:
        raise UsageError(f"rope_type {kind!r}", f"{SHARE} above 0", share)
    options = {names[key]: value for key, value in keys_of_rope.items() if key in names}
    if stretched:
        scaling = NTK(keys_of_rope["alpha"])
    else:
        scaling = scaling_of(kind, options | factor_of_phimoe(keys_of_rope), config)
    partial, proportion = (1.0, share) if proportional else (share, 1.0)
    temperature = rotated_temperature(keys_of_rope)
    return RopeConfig(keys_of_rope["rope_theta"], scaling, partial, proportion, *sections_of(keys_of_rope), temperature)


def factor_of_phimoe(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Attention factor of Phi-MoE, which its configs declare twice: for lengths up to L, and beyond."""
    scales = [parameters[key] for key in EXTRA["longrope"] if key in parameters]
    if not scales:
        return {}
    if len(scales) != 2 or scales[0] != scales[1]:
        raise NotUnderstood(
            f"short_mscale and long_mscale: expected two equal numbers, which multiply cos and sin, got {scales}",
            [f"rope_scaling.{key}" for key in EXTRA["longrope"]],
        )
    return {"attention_factor": scales[0]}


def sections_of(parameters: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, bool]:
    """(pairs per axis, whether they interleave) of flat rope parameters."""
    sections, interleaved = parameters.get("mrope_section"), parameters.get("mrope_interleaved", False)
    if not isinstance(interleaved, bool):
        raise UsageError("", "mrope_interleaved True or False", repr(interleaved))
    if sections is None:
        if interleaved:
            raise UsageError("", "mrope_section, the pairs per axis, with mrope_interleaved", "none")
        return None, False
    if not isinstance(sections, list | tuple) or not sections or any(type(n) is not int or n < 0 for n in sections):
        raise UsageError("", "mrope_section to be a list of numbers of pairs", repr(sections))
    return tuple(sections), interleaved


def scaling_of(kind: str, options: dict[str, Any], config: Mapping[str, Any]) -> Scaling | None:
    """The scheme of a type, with the lengths that are outside its dict."""
    scheme = ROPE_TYPES[kind][0]
    if scheme is None or (kind == "proportional" and options.get("factor", 1.0) == 1):
        return None
    declared = config.get("max_position_embeddings")
    if kind not in ("linear", "proportional") and declared is not None:
        check_sizes(f"rope_type {kind!r}", max_position_embeddings=declared)
    if kind in ("yarn", "longrope", "llama3") and ORIGINAL in config:
        options["original_max_length"] = config[ORIGINAL]
    if "original_max_length" in options:
        check_sizes(f"rope_type {kind!r}", **{ORIGINAL: options["original_max_length"]})
    if kind == "yarn" and "factor" not in options:
        if declared is None or "original_max_length" not in options:
            raise UsageError("rope_type 'yarn'", f"factor, or {ORIGINAL} and max_position_embeddings", options)
        options["factor"] = declared / options["original_max_length"]
    if kind in ("yarn", "longrope", "llama3", "dynamic") and "original_max_length" not in options:
        if declared is None:
            raise UsageError(f"rope_type {kind!r}", f"{ORIGINAL} or max_position_embeddings", "neither")
        options["original_max_length"] = declared
    if kind == "longrope" and declared is not None:
        options.setdefault("factor", max(1.0, declared / options["original_max_length"]))
    return scheme(**options, **({"follow": "sequence"} if kind in ("longrope", "dynamic") else {}))


# ---- layers that rotate, and temperatures of queries ---------------------------------------------------------------------
def rotating_layers(config: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Whether each layer rotates queries and keys, by the config's keys; None if all do.

    As in transformers, no_rope_layers has 1 for a layer that rotates.
    """
    layers, flags = config.get("num_hidden_layers"), config.get("no_rope_layers")
    if flags:
        if not isinstance(flags, list | tuple) or any(flag not in (0, 1) for flag in flags):
            raise UsageError("no_rope_layers", "a list of 1 (the layer rotates) and 0", repr(flags))
        if layers is not None and len(flags) < layers:
            raise UsageError("no_rope_layers", f"one number for each of {layers} layers", len(flags))
        rotates = tuple(map(bool, flags[:layers]))
    elif layers is not None and "no_rope_layer_interval" in config:
        check_sizes("rope", no_rope_layer_interval=config["no_rope_layer_interval"])
        rotates = tuple((layer + 1) % config["no_rope_layer_interval"] != 0 for layer in range(layers))
    else:
        return None
    return None if all(rotates) else rotates


def unrotated_temperature(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Temperature {"name": name, **options} of queries in layers that do not rotate (Llama 4), or None."""
    if not config.get("attn_temperature_tuning"):
        return None
    options = {"attn_scale": config.get("attn_scale", 0.1), "floor_scale": config.get("floor_scale", 8192)}
    check_declared("attn_temperature_tuning", dict.fromkeys(options, Positive), options)
    return {"name": "llama4_temperature", **options}


def rotated_temperature(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Temperature {"name": name, **options} in the rope parameters of layers that rotate (Ministral 3), or None."""
    if (beta := parameters.get("llama_4_scaling_beta")) is None:
        return None
    if (length := parameters.get(ORIGINAL)) is None:
        raise UsageError("llama_4_scaling_beta", f"{ORIGINAL} beside it among the rope parameters", "none")
    return {"name": "ministral3_temperature", "beta": beta, "original_max_length": length}


# ---- writing ---------------------------------------------------------------------------------------------------------
def to_hugging_face(
    rope: RopeConfig | Mapping[str, RopeConfig | None], head_dim: int | None = None, style: Style = "rope_parameters"
) -> dict[str, Any]:
    """Convert rotary parameters to entries of a transformers config, for config.update(...).

    Length-dependent schemes follow the whole sequence in transformers, regardless of `follow`. max_position_embeddings is
    included if tables depend on it (dynamic, longrope). NTK and BaseChange have no rope_type: they become "default" with the
    larger rope_theta. NTKByParts becomes "yarn" with attention_factor 1, and with the paper's ramp "llama3", the same formula.

    Args:
        rope: a RopeConfig, or one per layer type.
        head_dim: width of a head; only NTK's exported rope_theta depends on it.
        style: "rope_parameters" (transformers 5), or "rope_scaling" with rope_theta, which has no layer types.

    Returns:
        Entries of config.json.

    Raises:
        ValueError: for schemes without a rope_type: YaRN with the paper's ramp, p-RoPE with a scaling other than Linear.
    """
    check_choice("to_hugging_face", Style, style=style)
    if not isinstance(rope, RopeConfig):
        if style == "rope_scaling":
            raise UsageError("rope_scaling", "one RopeConfig", "one per layer type", "use 'rope_parameters'")
        both = {
            layer: (None, {}) if rope_of_layer is None else entries(rope_of_layer, head_dim)
            for layer, rope_of_layer in rope.items()
        }
        outside: dict[str, Any] = {}
        for layer, (_, more) in both.items():
            if clash := [key for key in more if outside.get(key, more[key]) != more[key]]:
                raise UsageError("", f"the same {clash[0]} for all layer types", f"another for {layer!r}")
            outside |= more
        return {"rope_parameters": {layer: inner for layer, (inner, _) in both.items()}} | outside
    inner, outside = entries(rope, head_dim)
    if style == "rope_parameters":
        return {"rope_parameters": inner} | outside
    outside |= {key: inner.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in inner}
    if inner["rope_type"] == "longrope":  # where transformers 4 looks for it
        outside[ORIGINAL] = inner[ORIGINAL]
    return {"rope_scaling": None if inner == {"rope_type": "default"} else inner} | outside


def entries(rope: RopeConfig, head_dim: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A RopeConfig -> its rope parameters, and the entries of the config outside of them."""
    kind, base, scaling = type_of(rope, head_dim)
    inner: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    if kind == "proportional":
        inner["partial_rotary_factor"] = rope.proportion
    elif rope.partial_rotary_factor != 1:
        inner["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.sections is not None:
        inner |= {"mrope_section": list(rope.sections)} | ({"mrope_interleaved": True} if rope.interleaved else {})
    outside: dict[str, Any] = {}
    if scaling is not None:
        ours, (_, needed, optional) = scaling.as_dict(), ROPE_TYPES[kind]
        inner |= {key: ours[name] for key, name in (needed | optional).items() if ours[name] is not None}
        declared = scaling.max_length if isinstance(scaling, LongRoPE) else None
        declared = scaling.original_max_length if isinstance(scaling, DynamicNTK) else declared
        outside |= {} if declared is None else {"max_position_embeddings": declared}
    write_layers(rope, inner, outside)
    return inner, outside


def type_of(rope: RopeConfig, head_dim: int | None) -> tuple[str, float, Scaling | None]:
    """(rope_type, rope_theta, scheme of that type)."""
    if rope.proportion != 1:
        if rope.partial_rotary_factor != 1 or not isinstance(rope.scaling, Linear | None):
            scheme = type(rope.scaling).__name__ if rope.scaling else "no"
            share = f" and partial_rotary_factor={rope.partial_rotary_factor}" * (rope.partial_rotary_factor != 1)
            got = f"p-RoPE with {scheme} scaling{share}"
            remedy = 'rope_type "proportional" has a factor and nothing else: Linear scaling (--method linear) fits'
            raise UsageError("rope_parameters", "p-RoPE alone or with Linear scaling", got, remedy)
        return "proportional", rope.base, rope.scaling
    if rope.scaling is None:
        return "default", rope.base, None
    # A share of few dimensions may be odd, which only matters to NTK, whose base depends on it.
    return rope.scaling.written(rope.base, None if head_dim is None else int(head_dim * rope.partial_rotary_factor))


def write_layers(rope: RopeConfig, inner: dict[str, Any], outside: dict[str, Any]) -> None:
    """Write a RopeConfig's rotating layers and temperatures to rope parameters (`inner`) and to entries outside of them."""
    if rope.temperature is not None:
        _require("ministral3_temperature", rope.temperature)
        length = rope.temperature["original_max_length"]
        if inner.setdefault(ORIGINAL, length) != length:
            expected = f"original_max_length={inner[ORIGINAL]}, that of the scaling: a config has one {ORIGINAL}"
            raise UsageError("temperature", expected, length)
        inner["llama_4_scaling_beta"] = rope.temperature["beta"]
    if rope.rotates is not None:
        outside["no_rope_layers"] = [int(flag) for flag in rope.rotates]
    if rope.unrotated_temperature is not None:
        _require("llama4_temperature", rope.unrotated_temperature)
        options = {key: value for key, value in rope.unrotated_temperature.items() if key != "name"}
        outside |= {"attn_temperature_tuning": True, **options}


def _require(name: str, spec: Mapping[str, Any]) -> None:
    if spec["name"] != name:
        raise UsageError("temperature", f"{name}, for which configs have keys", spec["name"])
