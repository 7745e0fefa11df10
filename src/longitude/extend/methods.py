"""What each method does to a configuration. Formulas and keys live in longitude.positions; here is who calls which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from longitude.positions.frequencies import Scaling
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import (
    NTK,
    BaseChange,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    YaRN,
)

LOCAL = ("sliding_attention", "chunked_attention")
"""Layer types that see a window only: what they see does not grow."""


@dataclass(frozen=True)
class Method:
    """scheme: (factor, original length) -> what lg.scaling calls it; None where more is needed. raises: whether
    max_position_embeddings becomes the new length. know: what one should know before using it.
    """

    scheme: Callable[[float, int], Scaling] | None
    raises: bool
    know: str


METHODS: dict[str, Method] = {
    "linear": Method(
        lambda s, _: Linear(s),
        True,
        "Neighbours come closer together than the model ever saw: fine-tune before use; short texts pay as well.",
    ),
    "ntk": Method(
        lambda s, _: NTK(s),
        True,
        "Fast pairs hardly change; near the new length some pairs still turn further than in training, so ask for more than "
        "you need or fine-tune.",
    ),
    "dynamic": Method(
        lambda s, original: DynamicNTK(s, original, follow="sequence"),
        False,
        "Unchanged up to the original length, which max_position_embeddings must go on saying. Beyond it every token changes "
        "the frequencies, and keys cached before were turned by others: cached decoding drifts from a whole pass.",
    ),
    "ntk-by-parts": Method(
        lambda s, original: NTKByParts(s, original),
        True,
        "The frequencies of YaRN without its attention factor, which is written as 1.",
    ),
    "yarn": Method(
        lambda s, original: YaRN(s, original),
        True,
        "Static: the attention factor holds for short texts too, which is where the cost measured here comes from. Keep the "
        "original checkpoint for them.",
    ),
    "llama3": Method(
        lambda s, original: Llama3(s, original),
        True,
        "Published with training at the new length after it; pairs that turn more than 4 times stay as they are.",
    ),
    "longrope": Method(
        None,
        True,
        "Up to the original length the short factors count, beyond it the long ones, with one attention factor for both: a "
        "cache that crosses the border holds keys turned the other way.",
    ),
    "base": Method(None, True, "Made for training on: without it, a larger base alone reaches about as far as ntk."),
}


def scheme_of(method: str, factor: float, original: int, base: float | None = None) -> Scaling:
    """The scheme of a method that needs no search."""
    if method == "base":
        if base is None:
            raise ValueError(
                "--method base: expected --base, the new rope_theta, got none; 500000 served 8 times the length"
            )
        return BaseChange(base)
    make = METHODS[method].scheme
    assert make is not None, method
    return make(float(factor), original)


def scaled(
    ropes: RopeConfig | Mapping[str, RopeConfig | None], scheme: Scaling
) -> RopeConfig | dict[str, RopeConfig | None]:
    """The same with `scheme`: all of it, or the layers that see everything."""
    if isinstance(ropes, RopeConfig):
        return ropes._replace(scaling=scheme)
    return {
        layer: rope if rope is None or layer in LOCAL else rope._replace(scaling=scheme)
        for layer, rope in ropes.items()
    }


def everywhere(ropes: RopeConfig | Mapping[str, RopeConfig | None]) -> RopeConfig:
    """Of the layers that see everything. ValueError where none turns, or several differently."""
    if isinstance(ropes, RopeConfig):
        return ropes
    found = {layer: rope for layer, rope in ropes.items() if rope is not None and layer not in LOCAL}
    if not found:
        raise ValueError(f"expected layers that see the whole text and turn their keys, got {', '.join(ropes)}")
    schemes = {rope.scaling for rope in found.values()}
    if len(schemes) > 1:
        raise ValueError(f"expected one scheme for the layers that see the whole text, got several: {', '.join(found)}")
    return next(iter(found.values()))


def original_of(scheme: Scaling | None, declared: int | None) -> int | None:
    """The trained length that a configuration tells of."""
    if scheme is None:
        return declared
    if isinstance(scheme, Linear) and declared is not None:
        return round(declared / scheme.factor)
    return getattr(scheme, "original_max_length", None)


def name_of(scheme: Scaling) -> str:
    return scheme.name.replace("_", "-") if not isinstance(scheme, DynamicNTK | LongRoPE) else scheme.name.split("_")[0]
