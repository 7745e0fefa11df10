"""A factor for each rotary pair: schemes as factors, candidates of a search, and a model rotating by them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.positions import rotary_modules
from longitude.positions.config_keys import FULL, WINDOWED
from longitude.positions.hugging_face import RopeConfig, read_ropes, to_hugging_face
from longitude.positions.scaling import LongRoPE, Scaling, rope_frequencies
from longitude.positions.scaling.base import METHODS
from longitude.positions.scaling.linear import UNROTATED


@dataclass(frozen=True)
class Candidate:
    """factors: lambda_k, by which the frequency of pair k is divided; attention_factor multiplies cos and sin."""

    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class RotaryPairs:
    """Rotary pairs of base `base`, rotary_dim/2 of them, to be extended from original_length to length."""

    base: float
    rotary_dim: int
    original_length: int
    length: int

    @property
    def factor(self) -> float:
        return self.length / self.original_length

    def candidate(self, scaling: Scaling | None) -> Candidate:
        """A scheme as factors: the plain frequencies divided by its own."""
        plain, _, _ = rope_frequencies(self.rotary_dim, self.base)
        inverse, attention_factor, _ = rope_frequencies(self.rotary_dim, self.base, scaling)
        factors = (plain / inverse).clamp(max=UNROTATED)  # pairs of frequency 0, and JSON has no infinity
        return Candidate(tuple(factors.tolist()), attention_factor)

    def starts(self) -> dict[str, Candidate]:
        """Name -> candidate, with the attention factor of its method; "unchanged" is the model as it was trained."""
        schemes = {
            method.name: method.make(self.factor, self.original_length)
            for method in METHODS.values()
            if method.starts and method.make
        }
        return {name: self.candidate(scheme) for name, scheme in ({"unchanged": None} | schemes).items()}

    def longrope(self, long: Candidate, short: tuple[float, ...] | None = None) -> LongRoPE:
        """These factors beyond the original length; `short` up to it, by default ones: the frequencies of the training."""
        return LongRoPE(
            short_factor=(1.0,) * len(long.factors) if short is None else short,
            long_factor=long.factors,
            original_max_length=self.original_length,
            factor=self.factor,
            max_length=self.length,
            attention_factor=long.attention_factor,
            follow="sequence",
        )


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


def writable(scheme: Scaling, rope: RopeConfig, rotary_dim: int, original_length: int, length: int) -> Scaling:
    """The scheme, or, if transformers has no rope_type for it, the same frequencies as factors for each pair."""
    try:
        to_hugging_face(rope._replace(scaling=scheme), rotary_dim)
        return scheme
    except ValueError:
        if rope.proportion != 1:  # no rope_type has factors for a part of the pairs
            raise
    pairs = RotaryPairs(rope.base, rotary_dim, original_length, length)
    candidate = pairs.candidate(scheme)
    return pairs.longrope(candidate, candidate.factors)


@contextmanager
def rotating_with(model: nn.Module, change: Scaling | PreTrainedConfig) -> Iterator[None]:
    """Context in which an unmodified Transformers model rotates as by another configuration; restored afterwards.

    Its rotary modules are built by their class from the config that would be saved, which is `change` or has it as the scheme;
    nothing else changes.
    """
    before = list(rotary_modules(model))
    device = next(model.parameters()).device
    try:
        for parent, name, module in before:
            config: Any = change if isinstance(change, PreTrainedConfig) else _scaled(module.config, change)
            setattr(parent, name, type(module)(config).to(device))
        yield
    finally:
        for parent, name, module in before:
            setattr(parent, name, module)


def _scaled(config: Any, scheme: Scaling) -> PreTrainedConfig:
    """A configuration with another scheme."""
    config = copy.deepcopy(config)
    ropes = with_scheme(read_ropes(config), scheme)
    for key, value in to_hugging_face(ropes, head_dim_of(config, FULL)).items():
        setattr(config, key, value)
    return config
