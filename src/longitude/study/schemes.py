"""Methods that extend a trained model to longer sequences without training: scaled positions.

`linear` interpolates positions: it divides those of rotary encodings and sinusoids by the factor, and stretches a learned
table. The other schemes change the frequencies of rotary pairs. Those of `longrope` are searched for at each length, on text
that no model is measured on.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from longitude.extend.evolution import Bounds, evolve
from longitude.extend.factors import Candidate, RotaryPairs
from longitude.extend.search import windows_of
from longitude.measure import losses_by_length
from longitude.measure.windows import Progress, Reader
from longitude.positions.base import ENCODINGS
from longitude.positions.scaling import NTK, SCHEMES, NTKByParts, Scaling, base as scaling
from longitude.registry import Registry, options_of
from longitude.report.wording import and_

PLAIN = ("non-overlapping", "sliding", "per-position")
"""Methods that evaluate the unchanged model."""
METHODS = Registry("method of --methods", "`longitude study --help`", ())
"""Methods of plugins that extend models: name -> a function that makes its `Method`."""
CANDIDATES = 64
"""Lists of factors that a search tries at each length; the published one tries 1344."""
TOKENS = 8192
"""Text on which each list is tried, about."""
Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """How a method extends a trained model.

    Attributes:
        scheme: (encoding, factor, training length) -> the scheme. It extends models with encodings that this scheme extends.
        positions: (positions, training length, length) -> position ids for the model, which stays as it is; None: 0, 1, 2, ...
        searched: Whether the scheme is searched for at each length, on the selection text.
    """

    scheme: Callable[[Spec, float, int], Scaling]
    positions: Callable[[Tensor, int, int], Tensor] | None = None
    searched: bool = False


def list_schemes() -> list[str]:
    """Methods of `longitude extend` that need no training."""
    SCHEMES.load()
    return [row.name for row in scaling.METHODS.values() if row.extends and not row.needs_training]


def method_of(name: str) -> Method:
    """A method that extends models, by its name. ValueError for an unknown one."""
    if name in METHODS:
        return METHODS[name]()
    if scaling.method_of(name).searched:  # NTK stands for the factors that are not known yet
        return Method(lambda spec, factor, original: NTK(factor), searched=True)

    def scheme(spec: Spec, factor: float, original: int) -> Scaling:
        chosen = scaling.scheme_of(name, factor, original)
        return replace(chosen, beta_fast=ramp_start(original)) if isinstance(chosen, NTKByParts) else chosen

    return Method(scheme)


def ramp_start(original: int) -> float:
    """Rotations within the training length from which YaRN and NTK by parts keep a pair: 32 of the 652 of Llama 2's fastest pair.

    No pair turns 32 times within a few hundred tokens. On a logarithmic scale this is the same part of the fastest pair's
    rotations at each length, so where the base follows from the length as well, the same share of the pairs stays.
    """
    turns, published = original / (2 * math.pi), 4096 / (2 * math.pi)
    return min(32.0, max(1.0, turns ** (math.log(32) / math.log(published))))


def extends(config: Any, scheme: str, original: int) -> bool:
    """Whether a scheme extends a model with this LongitudeConfig, trained at `original` positions.

    It must extend all of its encodings with a maximum length, and there must be one.
    """
    method = method_of(scheme)
    specs = [spec for specs in config.layer_specs() for spec in specs]
    longer = [_extended(spec, method.scheme(spec, 2.0, original), original, 2 * original) for spec in specs]
    return None not in longer and longer != specs


def _extended(spec: Spec, scheme: Scaling, original: int, length: int) -> Spec | None:
    """The spec as its encoding's class extends it, None if it cannot; unchanged if a function builds the encoding."""
    extend = getattr(ENCODINGS[spec["name"]], "extended", None)
    options = {name: value for name, value in spec.items() if name != "name"}
    longer = options if extend is None else extend(options, scheme, original, length)
    return None if longer is None else {"name": spec["name"], **longer}


def extended_by(scheme: str) -> str:
    """What a scheme extends, in words for an error."""
    option = "extended" if scheme == "linear" else "scaling"  # linear interpolates tables and sinusoids, too
    able = [name for name, kind in ENCODINGS.items() if hasattr(kind, option) or option in options_of(kind)]
    return f"{and_(able)} that are not scaled yet"


def extended(model: Any, scheme: str | Scaling, original: int, length: int) -> Any:
    """A model with the same weights for `length` positions, trained at `original`; the model itself if it is no longer.

    Args:
        model: A model of longitude.models.
        scheme: The name of a method that extends models, or a scheme of lg.scaling.
        original: Training length, in positions.
        length: Positions of the extended model.
    """
    method = method_of(scheme) if isinstance(scheme, str) else Method(lambda *_: scheme)
    if length <= original or method.positions is not None:
        return model

    def scaled(spec: Spec) -> dict[str, Any]:
        chosen = method.scheme(spec, length / original, original)
        longer = _extended(spec, chosen, original, length)
        assert longer is not None, f"{scheme} does not extend {spec['name']}"
        return dict(longer)

    config = copy.deepcopy(model.config)
    if config.encodings is not None:
        config.encodings = [config.resolve([*map(scaled, specs)], i) for i, specs in enumerate(config.layer_specs())]
    else:
        config.encoding = config.resolve([*map(scaled, config.layer_specs()[0])])
    with torch.random.fork_rng():
        other = type(model)(config)
    other.load_state_dict(model.state_dict())
    torch.nn.Module.to(other, next(model.parameters()).device)
    return other.train(model.training)


def extended_on(
    model: Any, method: str, documents: Sequence[Tensor], original: int, length: int, on_progress: Progress
) -> Any:
    """As `extended`, by a method that may search for its factors on `documents`."""
    searches = method_of(method).searched and length > original
    scheme = searched(model, documents, original, length, on_progress) if searches else method
    return extended(model, scheme, original, length)


def rotary_dim(spec: Spec) -> int:
    """The dimensions of a head that an encoding rotates."""
    return spec["rotary_dim"] or spec["head_dim"]


def reader_of(model: Any, scheme: str, original: int, length: int) -> Reader:
    """Reads windows with an extended model, at the positions of the method."""
    place = method_of(scheme).positions

    def placed(input_ids: Tensor, **named: Any) -> Any:
        assert place is not None
        positions = place(torch.arange(input_ids.shape[1], device=input_ids.device), original, length)
        return model(input_ids=input_ids, position_ids=positions.expand_as(input_ids), **named)

    return Reader(model if place is None or length <= original else placed)


def searched(
    model: Any,
    documents: Sequence[Tensor],
    original: int,
    length: int,
    on_progress: Progress = lambda done, total: None,
) -> Scaling:
    """LongRoPE's factors for `length`, by the evolution of `longitude extend --method longrope`, of `CANDIDATES` in all.

    The search starts from the other schemes and returns the candidate with the lowest loss in windows of `length` tokens of
    the documents. The same arguments give the same factors.

    Args:
        model: A model with rotary encodings.
        documents: int64 [n], some of length + 1 or more; none that the study measures.
        original: Training length, in positions.
        length: Tokens of a window.
        on_progress: Called with the number of candidates tried so far, and of all.
    """
    spec = next(spec for specs in model.config.layer_specs() for spec in specs if "scaling" in spec)
    pairs = RotaryPairs(spec["base"], rotary_dim(spec), original, length)
    windows = windows_of(documents, length, TOKENS)
    tried = 0

    def loss(candidate: Candidate) -> float:
        nonlocal tried
        other = extended(model, pairs.longrope(candidate), original, length)
        [found] = losses_by_length(other, windows, lengths=[length], methods=["non-overlapping"])
        tried += 1
        on_progress(tried, CANDIDATES)
        nats = float(found.nats.sum())
        return nats if math.isfinite(nats) else math.inf

    starts = [*pairs.starts().values()]
    losses = evolve(starts, Bounds.of(pairs), lambda some: [*map(loss, some)], CANDIDATES, Random(0))
    return pairs.longrope(min(losses, key=losses.__getitem__))
