"""What lets a token hear the others: attention in one of its forms, or a state that runs along the sequence. One contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from longitude.errors import unknown
from longitude.positions.base import Encoding, written_out
from longitude.positions.composed import Composed


class Mixer(nn.Module):
    """x [B, L, dim] -> [B, L, dim]: each token hears itself and those before it.

    forward(x, *, positions, documents, cache, memory, encoding, tables, return_weights) takes what MultiHeadAttention.forward
    does. What a mixer cannot do with one of them is a ValueError that names the mixer. `cache_layer()` is an empty cache for
    it. scores: an encoding may add terms to its scores; rotates: an encoding may turn its queries and keys. What acts on a
    model's input goes with every mixer. both_sides: with lg.NoMask() a token hears those after it too, as encoders need.
    has_weights: it weighs keys, and return_weights gives those weights; elsewhere that is a ValueError.
    growth: of what its cache holds, with the tokens N: "O(1)", "O(log N)" or "O(N)". by_fft: a Fourier transform spreads rounding
    over all places, so that a later token may move an earlier output in its last bits.
    """

    scores = False
    rotates = False
    both_sides = False
    has_weights = False
    growth = "O(N)"
    by_fft = False

    def cache_layer(self) -> Any:
        """An empty layer of a cache, as transformers' Cache(layers=[...]) takes it."""
        raise NotImplementedError

    @classmethod
    def encoding_shapes(cls, options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes that its encodings see, by these options, where they are not the model's: head_dim, num_heads, num_kv_heads."""
        return {}

    def reset_parameters(self) -> None:
        """Draw the parameters that are neither in Linear nor in norms or embeddings anew; models call it on every mixer."""

    def refuses(self, encoding: Encoding) -> str | None:
        """Why an encoding means nothing to it, in words; None where it takes it."""
        kind = type(encoding)
        if kind.terms is not Encoding.terms and not self.scores:
            return f"{kind.__name__} adds to scores, and {type(self).__name__} has none"
        turns = kind.queries is not Encoding.queries or kind.keys is not Encoding.keys
        if turns and not self.rotates:
            return f"{kind.__name__} turns queries and keys, and {type(self).__name__} has none that it could turn"
        return None

    def require(self, encoding: Composed | None) -> None:
        """ValueError with the first refusal of an encoding's members."""
        for member in encoding or ():
            if (why := self.refuses(member)) is not None:
                able = [name for name, kind in _registry.items() if kind.scores and kind.rotates]
                raise ValueError(
                    f"{why}; expected an encoding that acts on the input, or none at all, or one of the mixers "
                    f"{', '.join(sorted(able))}"
                )


# ---- the registry ----------------------------------------------------------------------------------------------------
_registry: dict[str, type[Mixer]] = {}
Kind = TypeVar("Kind", bound=type[Mixer])


def register_mixer(name: str) -> Callable[[Kind], Kind]:
    """Make a class known by name: to lg.mixer, models, study, bench, battery and command line."""

    def add(kind: Kind) -> Kind:
        if name in _registry and _registry[name].__qualname__ != kind.__qualname__:
            raise ValueError(f"a mixer named {name!r} is registered already: {_registry[name]!r}; choose another name")
        _registry[name] = kind
        return kind

    return add


def registered() -> Mapping[str, type[Mixer]]:
    """Name -> class, of all that are loaded; longitude.mixing loads them all."""
    return _registry


def mixer_options(kind: type[Mixer]) -> dict[str, inspect.Parameter]:
    """The options of a mixer, by name."""
    return dict(inspect.signature(kind).parameters)


def mixer_resolved(name: str, options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """Every option of a mixer written out, but for an encoding, which is the model's.

    What `options` does not say comes from `known` (a model's dim, num_heads, ...) where the option has no default or None, else
    from the default. ValueError for an option that does not exist or is still missing.
    """
    if name not in _registry:
        raise unknown("mixer", name, _registry, "lg.mixers() lists them.")
    parameters = {option: p for option, p in mixer_options(_registry[name]).items() if option != "encoding"}
    return written_out(name, parameters, options, known, "lg.mixer")


def require_no_weights(mixer: Mixer, return_weights: bool, memory: Tensor | None) -> None:
    """ValueError where weights or a memory are asked of a mixer that knows neither."""
    for asked, name in ((return_weights, "return_weights"), (memory is not None, "memory")):
        if asked:
            raise ValueError(
                f"{name}: {type(mixer).__name__} has no weights over keys; expected a mixer such as 'attention'"
            )
