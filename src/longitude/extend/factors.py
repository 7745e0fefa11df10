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
from longitude.checkpoints.declared import Ropes, parameters_of
from longitude.checkpoints.positions import rotary_modules
from longitude.positions.config_keys import (
    BASES,
    FULL,
    GLOBAL,
    INSIDE,
    LOCAL_BASES,
    SHARES,
    WINDOWED,
    is_foreign,
    names_any,
)
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


def with_scheme(ropes: Ropes, scheme: Scaling) -> Ropes:
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


# ---- writing ---------------------------------------------------------------------------------------------------------
def with_ropes(before: Mapping[str, Any], config: Any, ropes: Ropes, head_dim: int) -> dict[str, Any]:
    """The text part of config.json, its keys in their order, with other rotary parameters.

    before: the file's text part; config: as its class reads it.
    """
    inner = dict(copy.deepcopy(before))
    neox = config.model_type.startswith("gpt_neox")
    base = "rotary_emb_base" if neox else next((key for key in BASES if key in inner), BASES[0])
    if not isinstance(ropes, RopeConfig):
        full, local = (ropes.get(kind) for kind in (FULL, WINDOWED[0]))
        by_type = base == GLOBAL or not names_any(inner, BASES) and "rope_scaling" not in inner
        if "rope_parameters" in inner or by_type or full is None:
            bases = {GLOBAL: full, LOCAL_BASES[-1]: local}  # ModernBERT's
            inner |= {key: rope.base for key, rope in bases.items() if key in inner and rope is not None}
            return inner | _entries(before, config, ropes, head_dim)
        entries = to_hugging_face(full, head_dim, style="rope_scaling")
        theta = entries.pop("rope_theta")
        if isinstance(inner.get(base), list):
            kinds = dict(enumerate(config.layer_types))
            theta = [theta if kinds.get(n) == FULL else unchanged for n, unchanged in enumerate(inner[base])]
            entries.pop(SHARES[0], None)  # in a list, too
        return inner | {base: theta} | entries
    inner |= _entries(before, config, ropes, head_dim)
    parameters = inner["rope_parameters"]
    if parameters["rope_type"] == "proportional":
        return inner  # transformers 4 does not have it
    inner[base] = parameters["rope_theta"]
    if base in (inside := inner.get(INSIDE) or {}):
        inside[base] = parameters["rope_theta"]
    if ropes.partial_rotary_factor != 1:
        inner["rotary_pct" if neox else SHARES[0]] = ropes.partial_rotary_factor
    if parameters["rope_type"] != "default":
        inner["rope_scaling"] = copy.deepcopy(parameters)
    elif "rope_scaling" in inner:
        inner["rope_scaling"] = None
    return inner


def _entries(before: Mapping[str, Any], config: Any, ropes: Ropes, head_dim: int) -> dict[str, Any]:
    """Entries of a config, with the rope parameters of its file that nothing here reads."""
    entries = to_hugging_face(ropes, head_dim)
    if "no_rope_layers" not in config.to_dict():  # its layer_types decide which layers rotate
        entries.pop("no_rope_layers", None)
    after = entries["rope_parameters"]
    for layer, new in (
        {layer: inner for layer, inner in after.items() if isinstance(inner, dict)} or {None: after}
    ).items():
        new |= {key: value for key, value in parameters_of(before, layer).items() if is_foreign(key)}
    return entries
