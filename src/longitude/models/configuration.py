"""The shape of a model, and its encodings with every option written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from longitude.attention.mixer import MIXERS, Mixer, mixer_resolved
from longitude.attention.operation import require_backend
from longitude.errors import unknown
from longitude.positions.base import ENCODINGS, resolved
from longitude.positions.rotary import Rotary
from longitude.positions.scaling import Scaling, from_dict
from longitude.registry import options_of

Spec = str | dict[str, Any] | list[Any]
"""An encoding: a name, {"name": name, **options}, or a list of them, composed."""

ACTIVATIONS = ("swiglu", "gelu", "gelu_tanh", "relu")
NORMS = ("rmsnorm", "layernorm")
NORM_POSITIONS = ("pre", "post")
SHARED = {
    "bias": "attention_bias", "dropout": "attention_dropout", "scale": "attention_scale", "backend": "attention_backend",
}  # fmt: skip
"""Options of a mixer that the config says for all layers, unless the mixer's own spec does."""


@strict
class LongitudeConfig(PreTrainedConfig):
    """A transformer: by default a decoder of multi-head attention with RMSNorm before each part.

    encoding: an encoding for all layers, by name, as {"name": name, **options} or as a list of them, composed;
    encodings: one such per layer instead. Where one is said for all, mixers that cannot use it go without; where none
    is said, "auto", it is "rope" where a mixer turns queries and keys, and "none" elsewhere. mixer: what lets tokens
    hear each other, for all layers, by name (lg.list_mixers()) or as {"name": name, **options}; mixers: one such per layer
    instead: a hybrid. Options that are not said come from the model's shape; the resolved ones are what config.json
    holds, so a checkpoint never depends on a default. norm: "rmsnorm" or "layernorm", which stands before each part of
    a block ("pre", with one more at the end) or after the residual sum ("post"); hidden_act: "swiglu", "gelu" (exact),
    "gelu_tanh" or "relu". max_position_embeddings is the length that encodings with a table must hold.
    num_key_value_heads: None is num_attention_heads. intermediate_size: None is 8/3 hidden_size, rounded up to a
    multiple of 8, for "swiglu", and 4 hidden_size for the others. num_encoder_layers: of an encoder-decoder, None is
    num_hidden_layers; encoder_encoding: of its encoder, None is the decoder's, or "rope" beside a decoder of recurrences
    that has none. hidden_dropout: of embeddings and of what each part adds, in training. initializer_range: None is
    1/sqrt(width of a layer's input). embedding_scale: token embeddings are multiplied by it, None is sqrt(hidden_size)
    as in the original transformer, which keeps content and absolute positions in proportion. attention_scale: None is
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
    encoding: str | dict | list | None = "auto"
    encodings: list | None = None
    mixer: str | dict | None = "attention"
    mixers: list | None = None
    num_encoder_layers: int | None = None
    encoder_encoding: str | dict | list | None = None
    norm: str = "rmsnorm"
    norm_position: str = "pre"
    rms_norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-5
    mlp_bias: bool = False
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
            "max_position_embeddings", "intermediate_size", "num_encoder_layers",
        )  # fmt: skip
        for name in sizes:
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name}: expected 1 or more, got {size}")
        for name in ("rms_norm_eps", "layer_norm_eps", "initializer_range"):
            if (number := getattr(self, name)) is not None and not number > 0:
                raise ValueError(f"{name}: expected a number above 0, got {number}")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= (number := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {number}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "expected num_key_value_heads to divide num_attention_heads, "
                f"got {self.num_key_value_heads} and {self.num_attention_heads}"
            )
        choices = {"hidden_act": ACTIVATIONS, "norm": NORMS, "norm_position": NORM_POSITIONS}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise unknown(name, getattr(self, name), valid, "")
        require_backend(self.attention_backend)
        if self.intermediate_size is None:
            gated = math.ceil(self.hidden_size * 8 / 3 / 8) * 8
            self.intermediate_size = gated if self.hidden_act == "swiglu" else 4 * self.hidden_size
        if self.embedding_scale is None:
            self.embedding_scale = math.sqrt(self.hidden_size)
        self.mixer, self.mixers = self._one_or_each(
            "mixer", "mixers", "attention", lambda spec, _: self.resolve_mixer(spec)
        )
        if self.hidden_size % self.num_attention_heads and any(map(self.needs_head_dim, self.layer_mixers())):
            raise ValueError(
                f"expected num_attention_heads to divide hidden_size, got {self.num_attention_heads} and {self.hidden_size}"
            )
        if self.encodings is None and self.encoding in (None, "auto"):
            turns = any(kind_of(spec).rotates for spec in self.layer_mixers())
            self.encoding = "rope" if self.encoding == "auto" and turns else "none"
        heads = [layer for layer, spec in enumerate(self.layer_mixers()) if has_heads(spec)]
        if self.encodings is None and any(self.encoding_shapes(i) != self.encoding_shapes(heads[0]) for i in heads):
            self.encodings = [self.encoding if i in heads else "none" for i in range(self.num_hidden_layers)]
            self.encoding = None  # heads of several sizes share none
        self.encoding, self.encodings = self._one_or_each("encoding", "encodings", "auto", self.resolve)
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Of heads that divide the width; rounded down where no mixer has such heads."""
        return self.hidden_size // self.num_attention_heads

    def _one_or_each(
        self, one: str, each: str, default: str, resolve: Callable[[Any, int | None], Any]
    ) -> tuple[Any, Any]:
        """What was said for all layers and for each of them, resolved: exactly one of the two is not None."""
        for_all, for_each = getattr(self, one), getattr(self, each)
        if for_each is None:
            return resolve(for_all, None), None
        if for_all not in (None, default):  # None as saved, the default as nothing said
            raise ValueError(f"expected {one} or {each}, got both: {for_all!r} and {for_each!r}")
        if not isinstance(for_each, list | tuple):
            raise ValueError(f"{each}: expected a list of {self.num_hidden_layers}, one per layer, got {for_each!r}")
        if len(for_each) != self.num_hidden_layers:
            raise ValueError(f"{each}: expected {self.num_hidden_layers}, one per layer, got {len(for_each)}")
        return None, [resolve(spec, layer) for layer, spec in enumerate(for_each)]

    def resolve_mixer(self, spec: str | dict[str, Any]) -> dict[str, Any]:
        """A mixer's spec with every option written out that the rest of the config does not say."""
        options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, dict) else {}
        if not isinstance(name := options.pop("name", None), str):
            raise ValueError(f'mixer: expected a name or {{"name": name, **options}}, got {spec!r}')
        full = mixer_resolved(name, options, **self.sizes)
        from_config = {*self.sizes, *SHARED} - options.keys()
        return {"name": name, **{option: _plain(value) for option, value in full.items() if option not in from_config}}

    def build_mixer(self, spec: dict[str, Any]) -> Mixer:
        """The mixer of a resolved spec, at this config's sizes."""
        return kind_of(spec)(**self.built_with(spec))

    def built_with(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Every option that the mixer of a resolved spec is built with, those that the rest of the config says included."""
        options = {option: value for option, value in spec.items() if option != "name"}
        parameters = options_of(kind_of(spec))
        shared = {option: getattr(self, field) for option, field in SHARED.items() if option in parameters}
        return mixer_resolved(spec["name"], {**shared, **options}, **self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """What mixers and encodings know of the model's shape, by the names of their options."""
        return {
            "dim": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim,
        }

    def resolve(self, spec: Spec, layer: int | None = None) -> dict[str, Any] | list[dict[str, Any]]:
        """A spec with every option written out, for one layer or for all."""
        if isinstance(spec, list):
            return [one for part in spec for one in _listed(self.resolve(part, layer))]
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if not isinstance(name := options.pop("name", None), str):
            raise ValueError(f'encoding: expected a name, {{"name": name, **options}} or a list of them, got {spec!r}')
        defaults = getattr(ENCODINGS[name], "model_defaults", {})
        known = {**self.sizes, **self.encoding_shapes(layer), "max_length": self.max_position_embeddings}
        full = resolved(name, {**defaults, **options}, **known)
        if "scaling" in full and isinstance(factory := ENCODINGS[name], type) and issubclass(factory, Rotary):
            full["scaling"] = from_dict(full["scaling"])
        return {"name": name, **{option: _plain(value) for option, value in full.items()}}

    def needs_head_dim(self, spec: dict[str, Any]) -> bool:
        """Whether a resolved mixer's heads are hidden_size / num_attention_heads wide: not where it says, or has none."""
        kind = kind_of(spec)
        own = spec.get("head_dim") is not None or "head_dim" in kind.encoding_shapes({**self.sizes, **spec})
        return "head_dim" in options_of(kind) and not own

    def encoding_shapes(self, layer: int | None = None) -> dict[str, int]:
        """Sizes of heads that the encodings of a layer see, or of the first with heads, where they are not the model's."""
        specs = self.layer_mixers() if layer is None else [self.layer_mixers()[layer]]
        shapes = [kind_of(spec).encoding_shapes({**self.sizes, **spec}) for spec in specs if has_heads(spec)]
        return shapes[0] if shapes else {}

    def layer_mixers(self) -> list[dict[str, Any]]:
        """For each layer, its resolved mixer."""
        return self.mixers if self.mixers is not None else [self.mixer] * self.num_hidden_layers  # type: ignore[list-item]

    def layer_specs(self) -> list[list[dict[str, Any]]]:
        """For each layer, the resolved encodings that compose its own."""
        specs = self.encodings if self.encodings is not None else [self.encoding] * self.num_hidden_layers
        return [_listed(spec) for spec in specs]


def kind_of(spec: dict[str, Any]) -> type[Mixer]:
    """The class of a resolved mixer."""
    return MIXERS[spec["name"]]


def has_heads(spec: dict[str, Any]) -> bool:
    """Whether an encoding may act on its queries and keys."""
    return kind_of(spec).scores or kind_of(spec).rotates


def _plain(value: Any) -> Any:
    """What config.json can hold: schemes as their name and every option, arrays and tuples as lists of plain numbers."""
    if isinstance(value, Scaling):
        return value.as_dict()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value  # numpy and torch, single numbers too


def _listed(spec: Any) -> list[dict[str, Any]]:
    return spec if isinstance(spec, list) else [spec]
