"""The shape of a model, and its encodings with every option written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import get_annotations
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from longitude.attention.mixer import MIXERS, Mixer, mixer_resolved
from longitude.attention.operation import require_backend
from longitude.attention.short_conv import conv_places
from longitude.errors import Count, Positive, UsageError, check_declared, unknown
from longitude.positions.base import ENCODINGS, resolved
from longitude.positions.rotary import Rotary
from longitude.positions.scaling import Scaling, from_dict
from longitude.registry import options_of

Spec = str | dict[str, Any] | list[Any]
"""An encoding: a name, {"name": name, **options}, or a list of them, composed."""

Activation = Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["pre", "post", "both"]
MLPKind = Literal["dense", "none"]
SHARED = {
    "bias": "attention_bias", "dropout": "attention_dropout", "scale": "attention_scale", "backend": "attention_backend",
    "qk_norm": "qk_norm", "qk_norm_eps": "rms_norm_eps", "output_gate": "output_gate", "softcap": "score_softcap",
    "xsa": "xsa", "short_conv": "short_conv",
}  # fmt: skip
"""Mixer options, with the config key that sets each for all layers, unless the mixer's spec sets it."""
GATED = ("swiglu", "geglu_tanh")
"""Activations of MLPs with a gate."""


@strict
class LongitudeConfig(PreTrainedConfig):
    r"""The configuration of a Longitude model: by default a decoder of multi-head attention, with RMSNorm before each part.

    Every option of encodings and mixers that is left out is resolved from the model's shape and written out, so config.json
    depends on no default.

    Args:
        vocab_size (`int`, *optional*, defaults to 256):
            Rows of the token embedding, and logits per position.
        hidden_size (`int`, *optional*, defaults to 128):
            Width of the hidden states.
        num_hidden_layers (`int`, *optional*, defaults to 4):
            Blocks of each stack.
        num_attention_heads (`int`, *optional*, defaults to 4):
            Heads of queries in each layer. Must divide `hidden_size` if a mixer's head_dim follows from the two.
        num_key_value_heads (`int`, *optional*):
            Heads of keys and values, which queries share in groups. Must divide `num_attention_heads`, its default.
        intermediate_size (`int`, *optional*):
            Inner width of the MLP. Defaults to 8/3 `hidden_size`, rounded up to a multiple of 8, for "swiglu", and to
            4 `hidden_size` for the others. None if there is no MLP. "geglu_tanh" has the default of "swiglu".
        mlp (`str`, *optional*, defaults to `"dense"`):
            The part after the mixer in each block: "dense", an MLP with `hidden_act`; "none", as in Mamba.
        hidden_act (`str`, *optional*, defaults to `"swiglu"`):
            Activation of the MLP: "swiglu", "gelu" (exact), "gelu_tanh" (its approximation) or "relu"; "geglu_tanh" is gated as
            "swiglu" is, with "gelu_tanh".
        max_position_embeddings (`int` or `None`, *optional*, defaults to 2048):
            The length in tokens that encodings with a table must cover, and the training length for `longitude measure`. None
            if it is unknown, as in published Mambas: such an encoding then needs its own `max_length`.
        encoding (`str`, `dict` or `list`, *optional*, defaults to `"auto"`):
            The encoding of all layers: a name of `lg.list_encodings()`, {"name": name, **options}, or a list of them, which are
            composed. Mixers that cannot use it have none. "auto" is "rope" if a mixer rotates queries and keys, else "nope".
        encodings (`list`, *optional*):
            One such encoding per layer, instead of `encoding`, or a pattern of fewer, repeated from the first layer to the last.
            With the base of a rotation and a temperature in an encoding, and a window in a mixer, this is position by layer.
        mixer (`str` or `dict`, *optional*, defaults to `"attention"`):
            What mixes tokens in all layers: a name of `lg.list_mixers()`, or {"name": name, **options}.
        mixers (`list`, *optional*):
            One such mixer per layer, instead of `mixer`, or a pattern of fewer: a hybrid.
        encoder_encoding (`str`, `dict` or `list`, *optional*):
            The encoding of the encoder of an encoder-decoder. Defaults to the decoder's, or to "rope" if the decoder is
            recurrent and has none.
        norm (`str`, *optional*, defaults to `"rmsnorm"`):
            "rmsnorm" or "layernorm".
        norm_position (`str`, *optional*, defaults to `"pre"`):
            "pre": a norm before each part of a block, and one more at the end; "post": after each residual sum; "both": as
            "pre", and one more of what each part adds, as in Gemma 3.
        rms_norm_eps (`float`, *optional*, defaults to 1e-06):
            Added to the mean square in "rmsnorm" and in the norms of `qk_norm`.
        layer_norm_eps (`float`, *optional*, defaults to 1e-05):
            Added to the variance in "layernorm".
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the projections of the MLP have biases.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether the projections of attention have biases.
        attention_dropout (`float`, *optional*, defaults to 0.0):
            Dropout of attention weights, in training.
        hidden_dropout (`float`, *optional*, defaults to 0.0):
            Dropout of embeddings and of what each part of a block adds, in training.
        initializer_range (`float`, *optional*):
            Standard deviation of initial weights. Defaults to 1/sqrt(width of a layer's input).
        embedding_scale (`float`, *optional*):
            Token embeddings are multiplied by it. Defaults to sqrt(`hidden_size`), as in the original transformer, which keeps
            content and absolute positions in proportion.
        embedding_norm (`bool`, *optional*, defaults to `False`):
            Whether a norm stands before the first block, as in RWKV.
        attention_scale (`float`, *optional*):
            Queries times keys are multiplied by it. Defaults to head_dim**-0.5; T5 itself uses 1.
        attention_backend (`str`, *optional*, defaults to `"auto"`):
            The backend of attention, as in `lg.attend`.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether self-attention normalizes each head of queries and keys, before the rotation, as in Qwen3.
        xsa (`bool`, *optional*, defaults to `False`):
            Whether the part along the value of the same token is subtracted from each head, times a learned strength.
        output_gate (`bool`, *optional*, defaults to `False`):
            Whether the output of self-attention is multiplied by sigmoid(W x) before its projection, as in Qwen3-Next.
        score_softcap (`float`, *optional*):
            The c of c tanh(scale q.k / c), the capped products of self-attention, as in Gemma 2.
        short_conv (`list[str]` or `str`, *optional*):
            Short causal convolutions of self-attention: "input", "qkv" or "kv", and "output". Not for encoders.
        use_cache (`bool`, *optional*, defaults to `True`):
            Whether the model returns a cache outside of training.
        pad_token_id (`int`, *optional*):
            Id of the padding token.
        bos_token_id (`int`, *optional*):
            Id of the token at the beginning of a text.
        eos_token_id (`int` or `list[int]`, *optional*):
            Id of the token at the end of a text, or several.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the output projection is the token embedding.

    Raises:
        ValueError: an unknown option, name or choice, or sizes that do not fit each other.
    """

    model_type = "longitude"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    mlp: MLPKind = "dense"
    hidden_act: Activation = "swiglu"
    max_position_embeddings: int | None = 2048
    encoding: str | dict | list | None = "auto"
    encodings: list | None = None
    mixer: str | dict | None = "attention"
    mixers: list | None = None
    encoder_encoding: str | dict | list | None = None
    norm: Norm = "rmsnorm"
    norm_position: NormPosition = "pre"
    rms_norm_eps: Positive = 1e-6
    layer_norm_eps: Positive = 1e-5
    mlp_bias: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: Positive | None = None
    embedding_scale: float | None = None
    embedding_norm: bool = False
    attention_scale: float | None = None
    attention_backend: str = "auto"
    qk_norm: bool = False
    xsa: bool = False
    output_gate: bool = False
    score_softcap: Positive | None = None
    short_conv: list | tuple | str | None = None
    use_cache: bool = True
    pad_token_id: Count | None = None
    bos_token_id: Count | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: C901
        options = [field.name for field in fields(self)]
        for name in kwargs:  # transformers keeps any key, so a misspelled one would have no effect
            if get_close_matches(name, options, n=1, cutoff=0.8):
                raise unknown("option of LongitudeConfig", name, options, "")
            if any(name in options_of(kind) for kind in MIXERS.values()):
                key = f"{SHARED[name]}=... or " if name in SHARED else ""
                remedy = f'give {key}mixer={{"name": ..., "{name}": ...}}'
                raise UsageError("LongitudeConfig", "options of mixers in a mixer's spec", name, remedy)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_declared("LongitudeConfig", DECLARED, {name: getattr(self, name) for name in DECLARED})
        self.short_conv = [*conv_places(() if self.short_conv is None else self.short_conv)]
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= (number := getattr(self, name)) < 1:
                raise UsageError(name, f"0 <= {name} < 1", number)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                "",
                "num_key_value_heads to divide num_attention_heads",
                f"{self.num_key_value_heads} and {self.num_attention_heads}",
            )
        require_backend(self.attention_backend)
        if self.mlp == "none" and self.intermediate_size is not None:
            raise UsageError("intermediate_size", "none with mlp='none'", self.intermediate_size)
        if self.mlp == "none" and self.mlp_bias:
            raise UsageError("mlp_bias", "False with mlp='none'", "True")
        if self.intermediate_size is None and self.mlp != "none":
            gated = math.ceil(self.hidden_size * 8 / 3 / 8) * 8
            self.intermediate_size = gated if self.hidden_act in GATED else 4 * self.hidden_size
        if self.embedding_scale is None:
            self.embedding_scale = math.sqrt(self.hidden_size)
        self.mixer, self.mixers = self._one_or_each(
            "mixer", "mixers", "attention", lambda spec, _: self.resolve_mixer(spec)
        )
        mixers = self.every_mixer()
        for option in ("qk_norm", "xsa", "output_gate", "softcap", "short_conv"):
            self._require_taken(option, dict.fromkeys(spec["name"] for spec in mixers))
        for spec in mixers:
            if not {*self.short_conv} <= {*conv_places(spec.get("short_conv", self.short_conv))}:
                raise UsageError("short_conv", f"none beside a mixer with {spec['short_conv']}", self.short_conv)
        if self.hidden_size % self.num_attention_heads and any(map(self.needs_head_dim, self.layer_mixers())):
            raise UsageError(
                "", "num_attention_heads to divide hidden_size", f"{self.num_attention_heads} and {self.hidden_size}"
            )
        if self.encodings is None and self.encoding in (None, "auto"):
            rotates = any(mixer_class(spec).rotates for spec in self.layer_mixers())
            self.encoding = "rope" if self.encoding == "auto" and rotates else "nope"
        heads = [layer for layer, spec in enumerate(self.layer_mixers()) if has_heads(spec)]
        shapes = [self.encoding_shapes(layer) for layer in heads]
        if self.encodings is None and any(shape != shapes[0] for shape in shapes):
            self.encodings = [self.encoding if i in heads else "nope" for i in range(self.num_hidden_layers)]
            self.encoding = None  # layers with heads of different sizes cannot share one
        self.encoding, self.encodings = self._one_or_each("encoding", "encodings", "auto", self.resolve)
        super().__post_init__(**kwargs)

    def _require_taken(self, option: str, names: Iterable[str]) -> None:
        """UsageError if the config key of a shared option is set and no mixer of these names has the option."""
        key = SHARED[option]
        if getattr(self, key) and not any(option in options_of(MIXERS[name]) for name in names):
            able = ", ".join(name for name, kind in MIXERS.items() if option in options_of(kind))
            raise UsageError(key, f"a layer with one of the mixers {able}", ", ".join(names))

    @property
    def head_dim(self) -> int:
        """Width of a head, hidden_size / num_attention_heads; rounded down if no mixer has such heads."""
        return self.hidden_size // self.num_attention_heads

    def _one_or_each(
        self, single: str, listed: str, default: str, resolve: Callable[[Any, int | None], Any]
    ) -> tuple[Any, Any]:
        """The options for all layers and for each of them, resolved: exactly one of the two is not None."""
        for_all, for_each = getattr(self, single), getattr(self, listed)
        if for_each is None:
            return resolve(for_all, None), None
        if for_all not in (None, default):  # None if saved, the default if left out
            raise UsageError("", f"{single} or {listed}", f"both: {for_all!r} and {for_each!r}")
        if not isinstance(for_each, list | tuple):
            raise UsageError(listed, f"a list of {self.num_hidden_layers}, one per layer", repr(for_each))
        return None, [
            resolve(spec, layer) for layer, spec in enumerate(by_pattern(listed, for_each, self.num_hidden_layers))
        ]

    def resolve_mixer(self, spec: str | dict[str, Any]) -> dict[str, Any]:
        """A mixer's spec with every option written out that the rest of the config does not set."""
        options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, dict) else {}
        if not isinstance(name := options.pop("name", None), str) or {*"+:"} & {*name}:
            raise UsageError("mixer", 'a name or {"name": name, **options}', repr(spec))
        full = mixer_resolved(name, options, **self.sizes)
        full |= {part: self.resolve_mixer(full[part]) for part in MIXERS[name].parts}
        from_config = {*self.sizes, *SHARED} - options.keys()
        return {"name": name, **{option: _plain(value) for option, value in full.items() if option not in from_config}}

    def build_mixer(self, spec: dict[str, Any]) -> Mixer:
        """The mixer of a resolved spec, at this config's sizes."""
        return mixer_class(spec)(**self.mixer_options(spec))

    def mixer_options(self, spec: dict[str, Any]) -> dict[str, Any]:
        """All options of the mixer of a resolved spec, including those set by other config keys."""
        options = {option: value for option, value in spec.items() if option != "name"}
        for part in mixer_class(spec).parts:
            options[part] = {"name": options[part]["name"], **self.mixer_options(options[part])}
        parameters = options_of(mixer_class(spec))
        shared = {option: getattr(self, field) for option, field in SHARED.items() if option in parameters}
        return mixer_resolved(spec["name"], {**shared, **options}, **self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes, by the names of the options of mixers and encodings."""
        return {
            "dim": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim,
        }

    def resolve(self, spec: Spec, layer: int | None = None) -> dict[str, Any] | list[dict[str, Any]]:
        """A spec with every option written out, for one layer or for all."""
        if isinstance(spec, list):
            return [member for part in spec for member in _listed(self.resolve(part, layer))]
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if not isinstance(name := options.pop("name", None), str) or {*"+:"} & {*name}:
            raise UsageError("encoding", 'a name, {"name": name, **options} or a list of them', repr(spec))
        name = ENCODINGS.canonical(name)
        defaults = getattr(ENCODINGS[name], "model_defaults", {})
        known: dict[str, Any] = {**self.sizes, **self.encoding_shapes(layer), "embedding_scale": self.embedding_scale}
        if self.max_position_embeddings is not None:
            known["max_length"] = self.max_position_embeddings
        full = resolved(name, {**defaults, **options}, **known)
        if "scaling" in full and isinstance(factory := ENCODINGS[name], type) and issubclass(factory, Rotary):
            full["scaling"] = from_dict(full["scaling"])
        return {"name": name, **{option: _plain(value) for option, value in full.items()}}

    def needs_head_dim(self, spec: dict[str, Any]) -> bool:
        """Whether a resolved mixer's heads have the width hidden_size / num_attention_heads, and it sets no other."""
        kind = mixer_class(spec)
        sets_it = spec.get("head_dim") is not None or "head_dim" in kind.encoding_shapes({**self.sizes, **spec})
        return "head_dim" in options_of(kind) and not sets_it

    def encoding_shapes(self, layer: int | None = None) -> dict[str, int]:
        """Sizes of a layer's heads for its encodings, where they differ from the model's; None: the first layer with heads."""
        specs = self.layer_mixers() if layer is None else [self.layer_mixers()[layer]]
        spec = next(filter(has_heads, specs), None)
        return {} if spec is None else mixer_class(spec).encoding_shapes({**self.sizes, **spec})

    def layer_mixers(self) -> list[dict[str, Any]]:
        """For each layer, its resolved mixer."""
        return self.mixers if self.mixers is not None else [self.mixer] * self.num_hidden_layers  # type: ignore[list-item]

    def every_mixer(self) -> list[dict[str, Any]]:
        """The resolved mixers of all layers, and those that are parts of them."""
        return [
            mixer for spec in self.layer_mixers() for mixer in (spec, *(spec[part] for part in mixer_class(spec).parts))
        ]

    def layer_specs(self) -> list[list[dict[str, Any]]]:
        """For each layer, the resolved encodings that compose its own."""
        specs = self.encodings if self.encodings is not None else [self.encoding] * self.num_hidden_layers
        return [_listed(spec) for spec in specs]


DECLARED = get_annotations(LongitudeConfig, eval_str=True)
"""The options with their annotations; without those of transformers' base class."""


def by_pattern(name: str, pattern: Sequence[Any], layers: int) -> list[Any]:
    """Repeat a pattern to one entry per layer. ValueError if its length does not divide the number of layers."""
    if not pattern or layers % len(pattern):
        raise UsageError(name, f"{layers}, one per layer, or a pattern whose length divides {layers}", len(pattern))
    return [*pattern] * (layers // len(pattern))


def mixer_class(spec: dict[str, Any]) -> type[Mixer]:
    """The class of a resolved mixer."""
    return MIXERS[spec["name"]]


def has_heads(spec: dict[str, Any]) -> bool:
    """Whether an encoding may act on its queries and keys."""
    return mixer_class(spec).scores or mixer_class(spec).rotates


def _plain(value: Any) -> Any:
    """Convert a value for config.json: scalings to their name and all options, arrays and tuples to lists of numbers."""
    if isinstance(value, Scaling):
        return value.as_dict()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # numpy and torch, single numbers too


def _listed(spec: Any) -> list[dict[str, Any]]:
    return spec if isinstance(spec, list) else [spec]
