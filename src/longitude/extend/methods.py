"""Methods of `longitude extend`: the scheme of lg.scaling for each, and notes on its use.

A registered scheme is a method by its name. METHODS has exceptions and notes for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace

from longitude.checkpoints.keys import WINDOWED
from longitude.errors import unknown
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import SCHEMES, BaseChange, DynamicNTK, Follows, Linear, Scaling

UNROTATED = 1e30
"""Factor of "linear", which every family reads, that disables rotation: cos is 1, and sin vanishes in every dtype."""
ROTATED_VALUES = ("deepseek_v4",)
"""Model types with rotated values. A factor on cos and sin would multiply values too, so their YaRN has none."""


@dataclass(frozen=True)
class Method:
    """An extension method.

    Attributes:
        note: For the user.
        scheme: (factor, original length) -> the scheme; None if it depends on more than these.
        raises_length: Whether max_position_embeddings becomes the new length.
        searched: Loss by which a search with the model chooses the factors; empty if nothing is searched.
    """

    note: str
    scheme: Callable[[float, int], Scaling] | None = None
    raises_length: bool = True
    searched: str = ""


METHODS: dict[str, Method] = {
    "linear": Method(
        "Adjacent positions come closer together than in training: fine-tune before use; short contexts cost as well.",
    ),
    "ntk": Method(
        "Fast pairs hardly change; near the new length some pairs still rotate further than in training: take a longer --to "
        "than you need, or fine-tune.",
    ),
    "dynamic": Method(
        "Unchanged up to the original length, which max_position_embeddings must keep. Beyond it every token changes the "
        "frequencies, and keys cached before were rotated by others: cached decoding drifts from a whole pass.",
        lambda factor, original: DynamicNTK(factor, original, follow="sequence"),
        raises_length=False,
    ),
    "ntk-by-parts": Method("The frequencies of YaRN without its attention factor, which is written as 1."),
    "yarn": Method(
        "Static: short contexts are rotated otherwise, too. Keep the original checkpoint for them.",
    ),
    "llama3": Method(
        "Published with training at the new length after it; pairs that rotate more than 4 times stay as they are.",
    ),
    "longrope": Method(
        "Up to the original length the short factors are used, beyond it the long ones, with one attention factor for both: "
        "a cache that crosses the border has keys rotated by the other factors.",
        searched="text",
    ),
    "longrope2": Method(
        "Chosen by the loss of the digits of hidden numbers, not by that of text. Up to the original length the short factors "
        "are used, beyond it the long ones: a cache that crosses the border has keys rotated by the other factors. Published "
        "with training at both lengths after it.",
        searched="the digits of hidden numbers",
    ),
    "drope": Method(
        "No layer of full attention rotates any more, written as linear with a factor beyond every position. Short contexts "
        "are lost until the model is recalibrated: train it on at the original length, as --fine-tune does by default here.",
        lambda factor, original: Linear(UNROTATED),
    ),
    "base": Method("Made for training on: without it, a larger base alone extends about as far as ntk."),
}


def method_of(name: str) -> Method:
    """The method of a name. ValueError, with the nearest, for an unknown one."""
    own = name.replace("-", "_")
    scheme = SCHEMES.get(own)
    make = None if scheme is None else from_factor(scheme)
    if name in METHODS:
        method = METHODS[name]
        return method if make is None else replace(method, scheme=make)
    if scheme is None or make is None:
        names = [*METHODS, *["all"] * (name != "all")]  # "all" is for the command line only
        raise unknown(
            "method", name, names, "`longitude extend --method all` compares those without search and training."
        )
    return Method((scheme.__doc__ or "").partition("\n")[0], make)


def from_factor(scheme: type[Scaling]) -> Callable[[float, int], Scaling] | None:
    """(factor, original length) -> a scheme that needs nothing else and does not follow a length; None for any other."""
    options = {field.name: field.default for field in fields(scheme)}
    missing = {name for name, default in options.items() if default is MISSING}
    if not missing <= {"factor", "original_max_length"} or issubclass(scheme, Follows):
        return None

    def make(factor: float, original: int) -> Scaling:
        known = {"factor": factor, "original_max_length": original}
        return scheme(**{name: value for name, value in known.items() if name in options})

    return make


def scheme_of(name: str, factor: float, original: int, base: float | None = None) -> Scaling:
    """The scheme of a method that needs no search."""
    if name == "base":
        if base is None:
            raise ValueError("--method base: expected --base, the new rope_theta, got none; such as 500000")
        return BaseChange(base)
    make = method_of(name).scheme
    assert make is not None, name
    return make(float(factor), original)


def is_unrotated(scheme: Scaling | None) -> bool:
    """Whether a scheme leaves no rotation, as "drope" writes it."""
    return isinstance(scheme, Linear) and scheme.factor >= UNROTATED


def with_scheme(
    ropes: RopeConfig | Mapping[str, RopeConfig | None], scheme: Scaling
) -> RopeConfig | dict[str, RopeConfig | None]:
    """Rotary parameters with `scheme`, for all layers or for those with full attention."""
    if isinstance(ropes, RopeConfig):
        return ropes._replace(scaling=scheme)
    return {
        layer: rope if rope is None or layer in WINDOWED else rope._replace(scaling=scheme)
        for layer, rope in ropes.items()
    }


def original_of(scheme: Scaling | None, declared: int | None) -> int | None:
    """The training length according to a configuration."""
    if scheme is None:
        return declared
    if isinstance(scheme, Linear) and declared is not None:
        return round(declared / scheme.factor)
    return getattr(scheme, "original_max_length", None)
