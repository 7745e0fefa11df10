"""Token mixers, attention or recurrent, behind a common interface."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from longitude.attention.documents import padding_of
from longitude.attention.masks import Causal, Mask, require_mask
from longitude.attention.request import Step
from longitude.errors import UsageError
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions
from longitude.positions.linear import FullPrecision
from longitude.registry import Checked, Registry, resolve_options


# ---- caches -----------------------------------------------------------------------------------------------------------
def of_this_mode(held: Any) -> Any:
    """Return held tensors, copied if made in inference_mode and read outside it: backward cannot save such tensors."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _made_in_inference(held):
        return held  # dynamo supports neither question
    return _cloned(held)


def _cloned(held: Any) -> Any:
    """A copy of all tensors. For each token, torch's tree_map would take longer than the copies."""
    if isinstance(held, Tensor):
        return held.clone()
    if isinstance(held, dict):
        return {name: _cloned(part) for name, part in held.items()}
    if isinstance(held, tuple | list):
        parts = map(_cloned, held)
        return type(held)(*parts) if hasattr(held, "_fields") else type(held)(parts)
    return held


def _made_in_inference(held: Any) -> bool:
    if isinstance(held, Tensor):
        return held.is_inference()
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else ()
    return any(_made_in_inference(part) for part in parts)


# ---- mixers -----------------------------------------------------------------------------------------------------------
@dataclass
class MixerInputs:
    """The keywords of Mixer.forward in one object.

    step: results that a forward computes once for all layers.
    """

    mask: Mask
    positions: Positions | None = None
    documents: Tensor | None = None
    cache: Any = None
    encoding: Composed | None = None
    tables: Any = None
    return_weights: bool = False
    step: Step = field(default_factory=lambda: Step())  # dynamo traces a function here, and no class

    def to(self, device: Any, non_blocking: bool = False) -> MixerInputs:
        """Move the tensors to another device, for libraries that spread layers over devices; caches are not moved."""
        tensors = self.positions, self.documents, self.tables
        moved = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), tensors)
        names = ("positions", "documents", "tables")
        return replace(self, **dict(zip(names, moved, strict=True)), step=Step())


class Mixer(Checked, FullPrecision):
    """Token mixer: x [B, L, dim] -> [B, L, dim], in which each token depends on itself and earlier tokens.

    Subclasses implement `mix_tokens`, and `cache_layer` for their cache. Encodings that act on a model's input work with every
    mixer.

    Attributes:
        scores: Whether an encoding may add terms to its scores.
        rotates: Whether an encoding may rotate its queries and keys.
        widens: Whether an encoding may make its queries and keys wider.
        rotates_values: Whether an encoding may rotate its values, and its outputs back.
        bidirectional: Whether a token also attends to later tokens under lg.NoMask(), as encoders need.
        has_weights: Whether it has attention weights, which return_weights returns.
        growth: Growth of its cache with the number of tokens N: "O(1)", "O(log N)" or "O(N)".
        undecayed: Names of parameters without weight decay, besides vectors and norms (lg.parameter_groups).
        full_precision: Names of its direct parameters that stay float32 or wider when the module is moved, cast or loaded.
        saturates: Whether sigmoids or tanh map an infinite token to finite numbers; NaN still reaches the output.
        carries: Whether its cache stores a state beside keys and values, which cannot be cropped.
        choosing: Names of its modules that only choose the keys to attend to: a choice has no gradient.
        parts: Names of its options that are mixers themselves.
        far_from: Longest sequence, in tokens, that leaves parameters for distant tokens unused; None: it has none of these.
    """

    scores = False
    rotates = False
    widens = False
    rotates_values = False
    bidirectional = False
    has_weights = False
    growth = "O(N)"
    saturates = False
    carries = False
    choosing: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    undecayed: tuple[str, ...] = ()
    full_precision: tuple[str, ...] = ()

    @property
    def far_from(self) -> int | None:
        return None

    def forward(
        self,
        x: Float[Tensor, "B L dim"],
        inputs: MixerInputs | None = None,
        *,
        mask: Mask = Causal(),  # noqa: B008 (frozen)
        positions: Positions | None = None,
        documents: Int[Tensor, "B Lk"] | None = None,
        cache: Any = None,
        encoding: Encoding | None = None,
        tables: Any = None,
        return_weights: bool = False,
    ) -> Any:
        """Mix the tokens of a call. After an error, make a new cache.

        Args:
            x: Tokens [B, L, dim].
            inputs: All following arguments in one object, as models pass them to layers; the model then checks its caches.
            mask: Which keys a query attends to, by order. Recurrent mixers support Causal() only.
            positions: Positions of x: an int to count from, [L] or [B, L]; None continues the cache.
            documents: A number per token, cached tokens included, [B, Lk]. A run of equal numbers is a document, and tokens
                attend within their document only. A negative number is padding: no token attends to it, and its output is
                zeros. NaN or infinity in a document, or at padding, never reaches outputs or gradients of other documents.
            cache: The layer that `cache_layer()` makes. It keeps this call's tokens, and x attends to earlier ones.
            encoding: An encoding that a model shares among all its layers; it replaces the layer's encoding.
            tables: Return value of that encoding's `prepare` for these positions.
            return_weights: Return the weights, too.

        Returns:
            [B, L, dim]; with return_weights also the weights [B, H, L, Lk].

        Raises:
            ValueError: For arguments of wrong type or shape, and for options that this mixer does not support.
        """
        if inputs is None:
            composed = None if encoding is None else compose(encoding)
            reads: Any = composed or getattr(self, "encoding", None) or compose(None)
            inputs = MixerInputs(mask, positions, documents, cache, composed, tables, return_weights)
            return reads(partial(Mixer.forward, self, x, inputs))
        require_alone(self, mask, positions, documents, cache, encoding, tables, return_weights or None)
        mixed = self.mix_tokens(x, inputs)
        return mixed if inputs.documents is None else without_padding(mixed, inputs.documents, inputs)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """Mix the tokens of a call: `forward`, with all arguments except x in one object. Subclasses implement it."""
        raise NotImplementedError

    def cache_layer(self) -> Any:
        """An empty layer of a cache, for transformers' Cache(layers=[...])."""
        raise NotImplementedError

    def products(self, keys: float) -> float:
        """Multiply-adds of a token in its products with `keys` keys and values, or with a state; without Linear layers.

        0 if a mixer does not define it.
        """
        return 0

    @classmethod
    def encoding_shapes(cls, options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes for its encodings that differ from the model's under these options: head_dim, num_heads, num_kv_heads."""
        return {}

    def reset_parameters(self) -> None:
        """Initialize parameters that are not in Linear layers, norms or embeddings; models call it on every mixer."""

    def refuses(self, encoding: Encoding) -> str | None:
        """The reason why it does not support an encoding; None if it does."""
        kind = type(encoding)
        if kind.terms is not Encoding.terms and not self.scores:
            return f"{kind.__name__} adds to scores, and {type(self).__name__} takes no biases"
        rotates = kind.queries is not Encoding.queries or kind.keys is not Encoding.keys
        if rotates and not self.rotates:
            return f"{kind.__name__} rotates queries and keys, and {type(self).__name__} takes no rotations"
        if encoding.widens > 1 and not self.widens:
            return f"{kind.__name__} makes queries and keys wider, and {type(self).__name__} keeps their width"
        if encoding.rotate_values and not self.rotates_values:
            return f"{kind.__name__} rotates values, and {type(self).__name__} has values without positions"
        return None

    def require(self, encoding: Composed | None) -> None:
        """ValueError with the first refusal of an encoding's members."""
        for member in encoding or ():
            if (why := self.refuses(member)) is not None:
                widened, rotated = member.widens > 1, member.rotate_values
                able = [
                    name
                    for name, kind in MIXERS.items()
                    if kind.scores
                    and kind.rotates
                    and kind.widens >= widened
                    and kind.rotates_values >= rotated
                    and kind is not type(self)
                ]
                raise ValueError(
                    f"{why}; expected an encoding that acts on the input, or none at all, or one of the mixers "
                    f"{', '.join(sorted(able))}"
                )


def require_alone(layer: nn.Module, mask: Mask, *arguments: Any) -> None:
    """ValueError for arguments beside `inputs`, which nothing would read; arguments: None for those not passed."""
    alone = type(mask) is Causal
    for argument in arguments:
        alone = alone and argument is None
    if not alone:
        raise ValueError(
            f"{type(layer).__name__}: expected inputs, or arguments one by one, got both; put them into inputs by "
            "dataclasses.replace"
        )


def without_padding(mixed: Any, documents: Tensor, inputs: MixerInputs) -> Any:
    """Return a mixer's output with zeros at padding, so that no gradient from padding reaches other tokens."""
    out, *weights = mixed if isinstance(mixed, tuple) else (mixed,)
    padding = inputs.step.once(padding_of, documents, out.shape[1])
    out = out if padding is None else torch.where(padding, 0.0, out)
    return (out, *weights) if weights else out


# ---- the registry ----------------------------------------------------------------------------------------------------
MIXERS = Registry("mixer", "lg.list_mixers()", ["longitude.attention.layers", "longitude.recurrent"])
register_mixer = MIXERS.register


def list_mixers() -> list[str]:
    """The names of all registered mixers: attention in its forms, and recurrences.

    Returns:
        The names, in the order of registration.
    """
    return list(MIXERS)


def mixer(name: str, **options: Any) -> Mixer:
    """Build a mixer by name, as in lg.mixer("mamba", dim=256).

    Args:
        name: A registered name (lg.list_mixers()).
        options: Options of its class.

    Returns:
        The mixer.

    Raises:
        ValueError: For an unknown name or option, with the nearest one.
    """
    return MIXERS[name](**mixer_resolved(name, options))


def mixer_resolved(name: str, options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """All options of a mixer except an encoding, which the model has.

    Each is from `options`, from the `known` sizes of the model, or its default.
    """
    return resolve_options(name, MIXERS[name], options, known, "lg.mixer", without=("encoding",))


def require_cache(layer: Mixer, cache: Any, kinds: Collection[str]) -> None:
    """ValueError unless it is None or of a kind that the mixer reads."""
    if cache is not None and getattr(cache, "kind", None) not in kinds:
        expected = f"the {type(layer.cache_layer()).__name__} that its cache_layer() makes"
        got = getattr(cache, "owner", None) or type(cache).__name__
        raise UsageError(f"cache: {type(layer).__name__}", expected, got)


def require_plain(layer: Mixer, mask: Mask, what: str) -> None:
    """ValueError unless the mask is Causal(). what: what the mixer does with the tokens before each."""
    require_mask(mask)
    if not isinstance(mask, Causal):
        expected = "lg.Causal(), with documents and padding as documents="
        raise UsageError(f"mask: {type(layer).__name__} {what}", expected, repr(mask))


def require_no_weights(mixer: Mixer, return_weights: bool) -> None:
    """ValueError if weights are requested of a mixer that has none."""
    if return_weights:
        raise ValueError(
            f"return_weights: {type(mixer).__name__} has no weights over keys; expected a mixer such as 'attention'"
        )
