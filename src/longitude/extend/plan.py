"""What will be written, decided before anything is: the new configuration, the scheme, the tensors that change."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.checkpoints.config import head_dim_of
from longitude.checkpoints.keys import Ropes, difference, names_base, ropes_of, with_ropes
from longitude.checkpoints.load import one_line_of
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import Source
from longitude.extend.config import ExtendConfig
from longitude.extend.methods import METHODS, everywhere, original_of, scaled, scheme_of
from longitude.extend.search import Found
from longitude.extend.tables import find_table, stretched
from longitude.extend.weights import Change
from longitude.positions.frequencies import Follows, Scaling
from longitude.positions.hugging_face import ORIGINAL, RopeConfig
from longitude.positions.scaling import DynamicNTK, rope_frequencies


@dataclass
class ExtendPlan:
    """kind: "rotary", "learned" or "alibi". original: the trained length. factor: the scheme's. before, after: what
    config.json says. changes: tensors that are written anew. notes: what one should know, a sentence each.
    """

    source: Source
    kind: str
    original: int
    length: int
    method: str | None
    factor: float = 1.0
    scheme: Scaling | None = None
    base: float | None = None
    attention_factor: float = 1.0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    search: Found | None = None

    @property
    def nothing(self) -> bool:
        """Whether the model needs nothing written."""
        return self.kind == "alibi"

    def difference(self) -> list[tuple[str, Any, Any]]:
        return difference(self.before, self.after)


def plan(source: Source, options: ExtendConfig, scheme: Scaling | None = None) -> ExtendPlan:
    """The plan for a checkpoint; scheme: the one that a search found. ValueError for what cannot or should not be done."""
    assert options.to is not None and options.method is not None
    kind = source.kind
    original = original_length(source, options, kind)
    if options.to < original:
        raise ValueError(
            f"--to {options.to} is less than the length {original} that {source.name} was trained at, a factor below one; "
            f"expected {original} or more"
        )
    factor = options.to / original if options.factor is None else options.factor
    made = ExtendPlan(source, kind, original, options.to, options.method, factor)
    made.before, made.after = source.json, copy.deepcopy(source.json)
    if kind == "rotary":
        _rotary(made, options, scheme)
    elif kind == "learned":
        _learned(made)
    else:
        made.notes.append(
            "ALiBi biases every distance alike, at any length: it needs no scaling, and nothing is written. Whether the "
            "model holds its quality at the new length is measured."
        )
        if hasattr(source.config, "max_seq_len"):
            made.notes.append(
                f"transformers makes this model's biases for max_seq_len positions: load it with max_seq_len={options.to}."
            )
    return made


def original_length(source: Source, options: ExtendConfig, kind: str) -> int:
    """The trained length. ValueError when nothing says it, or when the model was extended already."""
    if kind == "learned":
        return find_table(source).rows if options.original is None else options.original
    if kind == "alibi":
        length = options.original or source.declared or _tokenizer_length(source)
    else:
        scheme = everywhere(ropes_of(source)).scaling
        marked = source.inner.get(ORIGINAL)
        known = marked or original_of(scheme, source.declared)
        if scheme is not None or (marked is not None and source.declared is not None and marked < source.declared):
            what = f"{scheme.name}, " if scheme is not None else ""
            far = f"to {source.declared} tokens"
            if isinstance(scheme, DynamicNTK):  # it declares the trained length
                far = f"tokens by a factor of {scheme.factor:g}"
            extended = f"{source.name} was extended already ({what}from {known} {far})"
            if scheme is None:
                raise ValueError(
                    f"{extended} by another base than it was trained with, which its config.json no longer says; extend the "
                    f"original checkpoint, and nothing is scaled twice"
                )
            if options.original is None:
                raise ValueError(
                    f"{extended}; extend the original checkpoint, or say --original {known} to put the new scheme in the "
                    f"place of the old one, if the weights were not trained with it; nothing is scaled twice"
                )
            if known is not None and options.original != known:
                raise ValueError(f"--original {options.original}: {extended}; expected --original {known}")
        length = options.original or known
    if length is None:
        raise ValueError(f"{source.name}: nothing says the length that it was trained at; give it with --original")
    return length


def _tokenizer_length(source: Source) -> int | None:
    from longitude.runs.files import read_json

    path = source.folder / "tokenizer_config.json"
    said = read_json(path).get("model_max_length") if path.is_file() else None
    return said if isinstance(said, int) and said < 10**9 else None  # a huge number stands for none


# ---- rotary ----------------------------------------------------------------------------------------------------------
def _rotary(made: ExtendPlan, options: ExtendConfig, scheme: Scaling | None) -> None:
    source, method = made.source, METHODS[options.method or ""]
    ropes = ropes_of(source)
    if made.length == made.original and made.factor == 1:
        if options.base is not None and options.base != everywhere(ropes).base:
            raise ValueError(
                f"--base {options.base:g}: --to is the trained length, where nothing changes; give a longer --to, or leave "
                f"--base out"
            )
        made.base = everywhere(ropes).base
        made.notes.append("Factor 1: every method is the identity, and the checkpoint is a copy.")
        return
    if options.base is not None and options.base < everywhere(ropes).base:
        raise ValueError(
            f"--base {options.base:g} is below the base of {source.name}, {everywhere(ropes).base:g}: it would turn faster, "
            f"which shortens the context; give a larger one"
        )
    made.scheme = scheme or scheme_of(options.method or "", made.factor, made.original, options.base)
    after = scaled(ropes, made.scheme)
    turning = everywhere(after)
    head_dim = head_dim_of(source.config)
    inner = with_ropes(source, after, head_dim)
    if method.raises:
        inner |= {source.length_key: made.length, ORIGINAL: made.original}
    else:
        inner[source.length_key] = made.original
    made.after = inner if source.inner is source.json else source.json | {"text_config": inner}
    found = require_same_turning(made, after, head_dim)
    made.base, made.attention_factor = base_of(turning, head_dim), found
    made.notes.append(method.know)
    if not names_base(source.inner):
        made.notes.append(
            f"config.json names no base: {everywhere(ropes).base:g} is what transformers takes for this model, and it is "
            f"written down now. Make sure that the model was trained with it."
        )
    if isinstance(after, dict):
        local = [layer for layer, rope in after.items() if rope == ropes[layer]]  # type: ignore[index]
        made.notes.append(f"Layers that stay as they are: {', '.join(local)}.")
    if (window := getattr(source.config, "sliding_window", None)) and window < made.length:
        made.notes.append(f"A layer with a sliding window sees {window} tokens, before and after.")
    require_memory(made, options)


def base_of(rope: RopeConfig, head_dim: int) -> float:
    """The base that is written for it."""
    from longitude.positions.hugging_face import type_of

    return type_of(rope, head_dim)[1]


def require_same_turning(made: ExtendPlan, ropes: Ropes, head_dim: int) -> float:
    """ValueError unless transformers makes, from the new configuration, the frequencies that are meant: its own module is
    built from it and asked, at the original length and, where they follow the length, at the new one. -> the attention factor
    of the layers that see everything.
    """
    module = rotary_of(made.source.skeleton)
    assert module is not None
    try:
        with quiet():
            theirs: Any = type(module)(type(made.source.config).from_dict(_inner(made)))
    except Exception as error:  # whatever a class thinks of keys
        raise ValueError(
            f"{made.source.name}: transformers cannot build {type(module).__name__} for --method {made.method} "
            f"({one_line_of(error)}); choose another method"
        ) from error
    factor = 1.0
    for layer, rope in ropes.items() if isinstance(ropes, dict) else [(None, ropes)]:
        if rope is None:
            continue
        for length in (made.original, made.length) if isinstance(rope.scaling, Follows) else (made.original,):
            inverse, theirs_factor = asked(theirs, layer, length)
            options: dict[str, Any] = rope._replace(sections=None).options(head_dim)
            options |= {"rotary_dim": 2 * len(inverse), "length": length}
            mine = rope_frequencies(max(head_dim, 2 * len(inverse)), **options)
            before = len(getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq"))  # of the model as it is
            near = len(inverse) == before and torch.allclose(mine.inverse.float(), inverse.float(), rtol=1e-4, atol=0)
            if not near or abs(theirs_factor - mine.attention_factor) > 1e-6:
                raise ValueError(
                    f"{made.source.name}: transformers' {type(module).__name__} does not turn as {rope.scaling} says; "
                    f"{made.source.config.model_type} models cannot be extended by --method {made.method}"
                )
            if rope == everywhere(ropes):
                factor = mine.attention_factor
    return factor


def asked(rotary: Any, layer: str | None, length: int) -> tuple[Tensor, float]:
    """The frequencies and the attention factor that a module of transformers uses for so many tokens."""
    kind = {} if layer is None else {"layer_type": layer}
    rotary(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]), **kind)
    prefix = "" if layer is None else f"{layer}_"
    return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling", 1.0)


def _inner(made: ExtendPlan) -> dict[str, Any]:
    return made.after if made.source.inner is made.source.json else made.after["text_config"]


def require_memory(made: ExtendPlan, options: ExtendConfig) -> None:
    """ValueError when one sequence of the new length has a cache larger than this machine, unless it runs elsewhere."""
    config = made.source.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = {"float64": 8, "float32": 4}.get(str(config.dtype).removeprefix("torch."), 2)
    cache = 2 * config.num_hidden_layers * heads * head_dim_of(config) * size * made.length
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache > here and not options.no_measure:
        raise ValueError(
            f"--to {made.length}: keys and values of one sequence take about {cache / 2**30:.1f} GiB, this machine has "
            f"{here / 2**30:.1f}; give a shorter length, or --no-measure if the model will run elsewhere"
        )
    made.notes.append(f"Keys and values of one sequence of {made.length} tokens take {cache / 2**20:.0f} MiB.")


# ---- learned tables --------------------------------------------------------------------------------------------------
def _learned(made: ExtendPlan) -> None:
    source = made.source
    if made.method != "linear":
        raise ValueError(
            f"--method {made.method}: {source.name} has a learned table of positions and no frequencies to scale; expected "
            f"--method linear, which stretches the table"
        )
    table = find_table(source)
    if made.original != table.rows:
        raise ValueError(
            f"--original {made.original}: the table of {source.name} has {table.rows} positions; leave it out"
        )
    if made.factor != made.length / made.original:
        raise ValueError("--factor: a table is stretched to --to and has no other factor; leave it out")
    grown = table.dim * 4 * made.length
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if grown > here // 4:
        raise ValueError(
            f"--to {made.length}: the table alone would take {grown / 2**30:.1f} GiB, this machine has {here / 2**30:.1f}; "
            f"give a shorter length"
        )
    if made.length == made.original:
        made.notes.append("Factor 1: the table stays as it is, and the checkpoint is a copy.")
        return
    made.changes[table.name] = partial(stretched, offset=table.offset, length=made.length)
    inner = _inner(made)
    key = source.length_key
    before = inner.get(key, getattr(source.config, key))
    inner |= {key: before + made.length - table.rows}
    if inner.get("n_ctx") == before:  # GPT-2's, an old double
        inner["n_ctx"] = inner[key]
    made.notes.append(
        "Rows between trained ones are their averages: neighbours are nearly alike, and no row but the first and the last is "
        "where it was. Fine-tune before use; short texts pay as well."
    )
