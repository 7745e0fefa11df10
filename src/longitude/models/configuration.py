"""The shape of a model, and its encodings with every option written out."""

from __future__ import annotations

import math
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from longitude.attention.operation import require_backend
from longitude.errors import unknown
from longitude.positions.base import factory_of, resolved
from longitude.positions.frequencies import Scaling
from longitude.positions.rotary import Rotary
from longitude.positions.scaling import from_dict

Spec = str | dict[str, Any] | list[Any]
"""An encoding: a name, {"name": name, **options}, or a list of them, composed."""

ACTIVATIONS = ("swiglu", "gelu")


@strict
class LongitudeConfig(PreTrainedConfig):
    """A pre-norm decoder with RMSNorm.

    encoding: an encoding for all layers, by name, as {"name": name, **options} or as a list of them, composed; encodings:
    one such per layer instead. Options that are not said come from the model's shape; the resolved ones are what
    config.json holds, so a checkpoint never depends on a default. max_position_embeddings is the length that encodings with
    a table must hold. num_key_value_heads: None is num_attention_heads. intermediate_size: None is 4 hidden_size for
    "gelu" (exact) and 8/3 hidden_size, rounded up to a multiple of 8, for "swiglu". initializer_range: None is
    1/sqrt(width of a layer's input). embedding_scale: token embeddings are multiplied by it, None is sqrt(hidden_size) as in
    the original transformer, which keeps content and absolute positions in proportion. attention_scale: None is
    head_dim**-0.5 (T5 itself uses 1). attention_backend: as in lg.attend.
    """

    model_type = "longitude"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "swiglu"
    max_position_embeddings: int = 2048
    encoding: str | dict | list | None = "rope"
    encodings: list | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float | None = None
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        own = [field.name for field in fields(self)]
        for name in kwargs:  # transformers keeps any key; one that nearly is ours is a slip
            if get_close_matches(name, own, n=1, cutoff=0.8):
                raise unknown("option of LongitudeConfig", name, own, "")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"expected num_attention_heads to divide hidden_size, got {self.num_attention_heads} and {self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "expected num_key_value_heads to divide num_attention_heads, "
                f"got {self.num_key_value_heads} and {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise unknown("hidden_act", self.hidden_act, ACTIVATIONS, "")
        require_backend(self.attention_backend)
        if self.intermediate_size is None:
            gated = math.ceil(self.hidden_size * 8 / 3 / 8) * 8
            self.intermediate_size = gated if self.hidden_act == "swiglu" else 4 * self.hidden_size
        if self.embedding_scale is None:
            self.embedding_scale = math.sqrt(self.hidden_size)
        if self.encodings is not None:
            if self.encoding not in (None, "rope"):  # None as saved, "rope" as nothing said
                raise ValueError(f"expected encoding or encodings, got both: {self.encoding!r} and {self.encodings!r}")
            if len(self.encodings) != self.num_hidden_layers:
                raise ValueError(
                    f"encodings: expected {self.num_hidden_layers}, one per layer, got {len(self.encodings)}"
                )
            self.encoding, self.encodings = None, [self.resolve(spec) for spec in self.encodings]
        else:
            self.encoding = self.resolve("none" if self.encoding is None else self.encoding)
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def resolve(self, spec: Spec) -> dict[str, Any] | list[dict[str, Any]]:
        """A spec with every option written out."""
        if isinstance(spec, list):
            return [one for part in spec for one in _listed(self.resolve(part))]
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if not isinstance(name := options.pop("name", None), str):
            raise ValueError(f'encoding: expected a name, {{"name": name, **options}} or a list of them, got {spec!r}')
        defaults = getattr(factory_of(name), "model_defaults", {})
        known = {
            "dim": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_length": self.max_position_embeddings,
        }
        full = resolved(name, {**defaults, **options}, **known)
        if "scaling" in full and isinstance(factory := factory_of(name), type) and issubclass(factory, Rotary):
            full["scaling"] = from_dict(full["scaling"])
        return {"name": name, **{option: _plain(value) for option, value in full.items()}}

    def layer_specs(self) -> list[list[dict[str, Any]]]:
        """For each layer, the resolved encodings that compose its own."""
        specs = self.encodings if self.encodings is not None else [self.encoding] * self.num_hidden_layers
        return [_listed(spec) for spec in specs]


def _plain(value: Any) -> Any:
    """What config.json can hold: schemes as their name and every option, arrays and tuples as lists of plain numbers."""
    if isinstance(value, Scaling):
        return value.as_dict()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value  # numpy and torch, single numbers too


def _listed(spec: Any) -> list[dict[str, Any]]:
    return spec if isinstance(spec, list) else [spec]
