"""What mixes tokens: attention in one of its forms, or a state that runs along the sequence. One contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from longitude.attention.cache_guard import unchanged_if_refused
from longitude.attention.documents import padding_of
from longitude.attention.masks import Causal, Mask
from longitude.positions.base import Encoding
from longitude.positions.composed import Composed, compose
from longitude.positions.coordinates import Positions
from longitude.registry import Registry, options_of, resolve_options


@dataclass
class MixerInputs:
    """The keywords of Mixer.forward in one object.

    shared: what the layers of one forward of a model find once, for all of them.
    """

    mask: Mask
    positions: Positions | None = None
    documents: Tensor | None = None
    cache: Any = None
    memory: Tensor | None = None
    encoding: Composed | None = None
    tables: Any = None
    return_weights: bool = False
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` gives, found by the first layer of a forward that uses this key."""
        if torch.compiler.is_compiling():
            return find()
        if key not in self.shared:
            self.shared[key] = find()
        return self.shared[key]

    def to(self, device: Any, non_blocking: bool = False) -> MixerInputs:
        """The same on another device, as libraries that spread layers over devices want it; caches stay where they are."""
        tensors = self.positions, self.documents, self.memory, self.tables
        moved = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), tensors)
        names = ("positions", "documents", "memory", "tables")
        return replace(self, **dict(zip(names, moved, strict=True)), shared={})


class Mixer(nn.Module):
    """x [B, L, dim] -> [B, L, dim]: each token is mixed with those before it.

    A class implements `mix_tokens`, and `cache_layer` for its cache. Encodings that act on a model's input work with every mixer.

    Attributes:
        scores: An encoding may add terms to its scores.
        rotates: An encoding may rotate its queries and keys.
        widens: An encoding may make its queries and keys wider.
        bidirectional: With lg.NoMask() a token attends to those after it, too, as encoders need.
        has_weights: It has weights over keys, and return_weights returns them.
        shares_sequence: Its tokens may be a slice of a sequence (lg.attention.SequenceSlice).
        growth: Of its cache, with the tokens N: "O(1)", "O(log N)" or "O(N)".
        undecayed: Names of parameters without weight decay, besides vectors and norms (lg.parameter_groups).
        full_precision: Names of its own parameters that stay float32 or wider however the module is moved or loaded.
        saturates: True if a sigmoid or tanh turns infinite inputs into finite outputs. NaN still propagates.
        far_from: A sequence of at most this many tokens leaves its far part unused and untrained; None: it has none.
    """

    scores = False
    rotates = False
    widens = False
    bidirectional = False
    has_weights = False
    shares_sequence = False
    growth = "O(N)"
    saturates = False
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
        memory: Float[Tensor, "B M dim"] | None = None,
        encoding: Encoding | None = None,
        tables: Any = None,
        return_weights: bool = False,
    ) -> Any:
        """Mix the tokens of one call. A refused call leaves the cache as it was.

        Args:
            x: Tokens [B, L, dim].
            inputs: All of the following in one object, as a model passes them to its layers; the model then checks its caches.
            mask: Which keys a query attends to, by order. Recurrences take Causal() only.
            positions: Of x: an int to count from, [L] or [B, L]; None continues the cache.
            documents: A number per token, cached ones included, [B, Lk]. A run of one number is a document, tokens attend to
                their own document only, and a negative number is padding, to which no token attends, and whose output is zeros.
                NaN or infinity in one document, or at padding, reaches no output and no gradient of another document's tokens.
            cache: The layer that `cache_layer()` makes. It keeps this call's tokens, and x attends to those before.
            memory: The layer's input at an earlier segment [B, M, dim], to which x attends and through which no gradient
                flows (Dai et al. 2019); positions and documents are then of both together.
            encoding: An encoding that a model holds for all its layers, instead of the layer's own.
            tables: What that encoding prepared for these positions.
            return_weights: Return the weights, too.

        Returns:
            [B, L, dim]; with return_weights also the weights [B, H, L, Lk].

        Raises:
            ValueError: For what does not fit, and for what this mixer cannot do.
        """
        if inputs is not None:
            return without_padding(self.mix_tokens(x, inputs), inputs)
        composed = None if encoding is None else compose(encoding)
        with unchanged_if_refused(cache):
            inputs = MixerInputs(mask, positions, documents, cache, memory, composed, tables, return_weights)
            return without_padding(self.mix_tokens(x, inputs), inputs)

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """What a mixer is: `forward`, with all but x in one object."""
        raise NotImplementedError

    def cache_layer(self) -> Any:
        """An empty layer of a cache, as transformers' Cache(layers=[...]) takes it."""
        raise NotImplementedError

    def products(self, keys: float) -> float:
        """Multiply-adds of a token in its products with `keys` keys and values, or with a state; without Linear layers.

        0 where a mixer does not say.
        """
        return 0

    @classmethod
    def encoding_shapes(cls, options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes that its encodings get by these options, where not the model's: head_dim, num_heads, num_kv_heads."""
        return {}

    def reset_parameters(self) -> None:
        """Draw again the parameters that are neither in Linear nor in norms or embeddings; models call it on every mixer."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self.full_precision and param is not None and param.dtype != _wide(param.dtype):
            narrow, param = param, nn.Parameter(param.detach().to(_wide(param.dtype)), param.requires_grad)
            vars(param).update(vars(narrow))  # marks of those who load or train
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What .to(), .bfloat16(), .half() and their like come down to."""
        kept = [p for name in self.full_precision if (p := self._parameters.get(name)) is not None]
        kept = [*kept, *(p.grad for p in kept if p.grad is not None)]

        def moved(x: Tensor) -> Tensor:
            out = fn(x)
            if any(x is one for one in kept) and out.dtype != _wide(out.dtype):
                return x.to(out.device, _wide(out.dtype))
            return out

        return super()._apply(moved, recurse)

    def mark_undecayed(self) -> None:
        """Set `_no_weight_decay` on what `undecayed` names, as training scripts of the published state space models read it.

        Copies and loaded checkpoints lose such marks, so lg.parameter_groups reads `undecayed` itself.
        """
        for name in self.undecayed:
            self.get_parameter(name)._no_weight_decay = True  # type: ignore[attr-defined]

    def refuses(self, encoding: Encoding) -> str | None:
        """The reason why it does not take an encoding; None where it does."""
        kind = type(encoding)
        if kind.terms is not Encoding.terms and not self.scores:
            return f"{kind.__name__} adds to scores, and {type(self).__name__} has none"
        rotates = kind.queries is not Encoding.queries or kind.keys is not Encoding.keys
        if rotates and not self.rotates:
            return f"{kind.__name__} rotates queries and keys, and {type(self).__name__} has none"
        if getattr(encoding, "widens", 1) > 1 and not self.widens:
            return f"{kind.__name__} makes queries and keys wider, and {type(self).__name__} keeps their width"
        return None

    def require(self, encoding: Composed | None) -> None:
        """ValueError with the first refusal of an encoding's members."""
        for member in encoding or ():
            if (why := self.refuses(member)) is not None:
                widened = getattr(member, "widens", 1) > 1
                able = [
                    name
                    for name, kind in MIXERS.items()
                    if kind.scores and kind.rotates and kind.widens >= widened and kind is not type(self)
                ]
                raise ValueError(
                    f"{why}; expected an encoding that acts on the input, or none at all, or one of the mixers "
                    f"{', '.join(sorted(able))}"
                )


def without_padding(mixed: Any, inputs: MixerInputs) -> Any:
    """What a mixer returns, zeros for padding, so that no gradient of these, whatever it is, reaches other tokens."""
    documents = inputs.documents
    if documents is None:
        return mixed
    out, *weights = mixed if isinstance(mixed, tuple) else (mixed,)
    padding = inputs.once(("padding", out.shape[1]), lambda: padding_of(documents, out.shape[1]))
    out = out if padding is None else torch.where(padding, 0.0, out)
    return (out, *weights) if weights else out


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


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
        options: Of its class.

    Returns:
        The mixer.

    Raises:
        ValueError: For an unknown name or option, with the nearest one.
    """
    return MIXERS[name](**mixer_resolved(name, options))


def mixer_resolved(name: str, options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """Every option of a mixer written out, but for an encoding, which is the model's.

    Each is from `options`, from what is `known` of the model, or its default.
    """
    parameters = {option: p for option, p in options_of(MIXERS[name]).items() if option != "encoding"}
    return resolve_options(name, parameters, options, known, "lg.mixer")


def require_no_weights(mixer: Mixer, return_weights: bool, memory: Tensor | None) -> None:
    """ValueError where weights or a memory are requested of a mixer that has neither."""
    for requested, name in ((return_weights, "return_weights"), (memory is not None, "memory")):
        if requested:
            raise ValueError(
                f"{name}: {type(mixer).__name__} has no weights over keys; expected a mixer such as 'attention'"
            )
