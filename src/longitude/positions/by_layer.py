"""Per-layer positions of a Hugging Face config: which layers rotate, and which temperature multiplies their queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longitude.errors import UsageError, check_positive, check_sizes


# ---- which layers rotate ---------------------------------------------------------------------------------------------
def rotating_layers(config: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Whether each layer rotates queries and keys, by the config's keys; None if all do.

    As in transformers, no_rope_layers has 1 for a layer that rotates.
    """
    layers, given = config.get("num_hidden_layers"), config.get("no_rope_layers")
    if given:
        if not isinstance(given, list | tuple) or any(one not in (0, 1) for one in given):
            raise UsageError("no_rope_layers", "a list of 1 (the layer rotates) and 0", repr(given))
        if layers is not None and len(given) < layers:
            raise UsageError("no_rope_layers", f"one number for each of {layers} layers", len(given))
        rotates = tuple(map(bool, given[:layers]))
    elif layers is not None and "no_rope_layer_interval" in config:
        check_sizes("rope", no_rope_layer_interval=config["no_rope_layer_interval"])
        rotates = tuple((layer + 1) % config["no_rope_layer_interval"] != 0 for layer in range(layers))
    else:
        return None
    return None if all(rotates) else rotates


# ---- temperatures of queries -----------------------------------------------------------------------------------------
def unrotated_temperature(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Temperature {"name": name, **options} of queries in layers that do not rotate (Llama 4), or None."""
    if not config.get("attn_temperature_tuning"):
        return None
    options = {"attn_scale": config.get("attn_scale", 0.1), "floor_scale": config.get("floor_scale", 8192)}
    check_positive("attn_temperature_tuning", **options)
    return {"name": "llama4_temperature", **options}


def rotated_temperature(given: Mapping[str, Any], original: str) -> dict[str, Any] | None:
    """Temperature {"name": name, **options} in the rope parameters of layers that rotate (Ministral 3), or None."""
    if (beta := given.get("llama_4_scaling_beta")) is None:
        return None
    if (length := given.get(original)) is None:
        raise UsageError("llama_4_scaling_beta", f"{original} beside it among the rope parameters", "none")
    check_positive("rope", llama_4_scaling_beta=beta)
    check_sizes("rope", **{original: length})
    return {"name": "ministral3_temperature", "beta": beta, "original_max_length": length}


# ---- writing ---------------------------------------------------------------------------------------------------------
def write(rope: Any, inner: dict[str, Any], outside: dict[str, Any], original: str) -> None:
    """Write a RopeConfig's rotating layers and temperatures to rope parameters (`inner`) and to entries outside of them."""
    if rope.temperature is not None:
        _require("ministral3_temperature", rope.temperature)
        length = rope.temperature["original_max_length"]
        if inner.setdefault(original, length) != length:
            raise UsageError(
                "temperature",
                f"original_max_length={inner[original]}, that of the scaling, because a config has one {original} "
                "for both",
                length,
            )
        inner["llama_4_scaling_beta"] = rope.temperature["beta"]
    if rope.rotates is not None:
        outside["no_rope_layers"] = [int(one) for one in rope.rotates]
    if rope.unrotated_temperature is not None:
        _require("llama4_temperature", rope.unrotated_temperature)
        options = {key: value for key, value in rope.unrotated_temperature.items() if key != "name"}
        outside |= {"attn_temperature_tuning": True, **options}


def _require(name: str, spec: Mapping[str, Any]) -> None:
    if spec["name"] != name:
        raise UsageError("temperature", f"{name}, for which configs have keys", spec["name"])
