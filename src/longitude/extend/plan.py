"""The plan of an extension, made before anything is written: new configuration, scheme, changed tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import Ropes, decoded, of_full_attention
from longitude.checkpoints.lint import COVERAGE, contradictions
from longitude.checkpoints.load import (
    Source,
    built_without_weights,
    differences,
    in_one_line,
    require_fit,
    require_shards,
    ropes_of,
)
from longitude.checkpoints.unread import unread_sentence
from longitude.errors import UsageError, Within, check_bounds
from longitude.extend.factors import RotaryPairs, with_ropes, with_scheme, writable
from longitude.extend.layers import Layers, NotAsMeant
from longitude.extend.search import SearchResult
from longitude.positions.config_keys import FULL
from longitude.positions.hugging_face import ORIGINAL
from longitude.positions.scaling import BaseChange, DynamicNTK, Scaling, YaRN
from longitude.positions.scaling.base import method_of, scheme_of
from longitude.runs.costs import forward_memory
from longitude.runs.files import read_json
from longitude.runs.machine import require_memory, total_memory
from longitude.runs.quiet import quiet

ROTATED_VALUES = ("deepseek_v4",)
"""Model types with rotated values. A factor on cos and sin would multiply values too, so their YaRN has none."""
NOT_ROTARY = {
    "learned": "one with a learned table of positions, which has no frequencies to scale",
    "alibi": "one in which ALiBi biases every distance alike, at any length: it needs no scaling",
}
"""Why nothing is extended, by the kind of positions."""
FARTHEST = 2**24
"""transformers counts positions in float32, which represents every whole number up to here and not beyond."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The extension that is requested; ValueError for numbers that no model could be extended by. Fields: as in `extend`."""

    to: Annotated[int, Within(1, FARTHEST)]
    method: str
    factor: Annotated[float | None, Within(above=1)] = None
    base: float | None = None
    original: Annotated[int | None, Within(2)] = None

    @property
    def searched(self) -> bool:
        """Whether a search with the model chooses the factors."""
        return method_of(self.method).searched

    def scheme(self, factor: float, original: int) -> Scaling:
        """The scheme of a method that needs no search."""
        if self.method != "base":
            return scheme_of(self.method, factor, original)
        if self.base is None:
            raise ValueError("--method base: expected --base, the new rope_theta, got none; such as 500000")
        return BaseChange(self.base)

    def __post_init__(self) -> None:
        check_bounds(self)
        method_of(self.method)
        if self.base is not None and self.method != "base":
            raise ValueError(f"--base is the new base of --method base, got it with --method {self.method}")
        if self.factor is not None and (self.method in ("base", "drope") or self.searched):
            raise ValueError(f"--factor is no option of --method {self.method}; leave it out")


@dataclass
class ExtendPlan:
    """An extension before it is written.

    Attributes:
        source: The checkpoint.
        original: The training length in tokens.
        target: The requested extension.
        factor: The scheme's factor.
        scheme: One of lg.scaling; None if nothing is scaled.
        base: New rope_theta.
        attention_factor: Factor of cos and sin.
        config: Content of the new config.json.
        notes: Sentences for the user.
        search: Result of a search of factors.
        layers: Layers as the class rotates them before the change.
        ropes: Rotary parameters that the new configuration must declare.
    """

    source: Source
    original: int
    target: Target
    factor: float
    config: dict[str, Any]
    scheme: Scaling | None = None
    base: float | None = None
    attention_factor: float = 1.0
    notes: list[str] = field(default_factory=list)
    search: SearchResult | None = None
    layers: Layers = field(init=False)
    ropes: Ropes = field(init=False)

    @property
    def length(self) -> int:
        return self.target.to

    @property
    def inner(self) -> dict[str, Any]:
        """The part of the new config.json about the text model."""
        return self.config if self.source.inner is self.source.json else self.config["text_config"]

    def tokenizer_limit(self) -> tuple[int, int] | None:
        """(before, after) of the tokenizer's model_max_length, if that would cut longer texts off."""
        before = tokenizer_length(self.source)
        return None if before is None or not self.original <= before < self.length else (before, self.length)

    def require_written(self, folder: Path) -> None:
        """ValueError unless a written folder is read as planned: its tensors fit its model, which rotates as planned."""
        config = self.read_config(folder)
        if self.source.quantization is None:
            require_shards(folder)
            require_fit(self.source.name, folder, built_without_weights(self.source.name, config))
        try:
            self.require_rotation(config)
        except NotAsMeant as error:
            raise ValueError(
                f"{self.source.name}: the written checkpoint was read again, and is not what --method {self.target.method} "
                f"asked for: {error}; it is removed: look for what changes files on that disk, or report it"
            ) from error

    def require_rotation(self, config: PreTrainedConfig) -> float:
        """The attention factor. NotAsMeant unless the class rotates as planned with a new configuration."""
        return self.layers.require(config, self.ropes, self.length)

    def read_config(self, folder: Path | None = None) -> PreTrainedConfig:
        """Configuration as transformers reads it from a folder; None: from the planned config.json."""
        with (
            quiet(),
            in_one_line(f"{self.source.name}: its class reads no such config.json; try another --method"),
        ):
            if folder is not None:
                return AutoConfig.from_pretrained(folder)
            return CONFIG_MAPPING[self.config["model_type"]].from_dict(decoded(self.config))


def plan_extension(
    source: Source, target: Target, search: SearchResult | None = None, must_fit: bool = True
) -> ExtendPlan:
    """The plan for a checkpoint. ValueError if it cannot or should not be extended; must_fit: also if memory is too small."""
    original = original_length(source, target)
    factor = target.to / original if target.factor is None else target.factor
    plan = ExtendPlan(source, original, target, factor, copy.deepcopy(source.json), search=search)
    _plan_rotary(plan, must_fit)
    if search is not None and search.note:
        plan.notes.append(search.note)
    plan.notes += [
        f"{difference}: they are copied as they are." for difference in differences(source.skeleton, source.unread)[1]
    ]
    return plan


def original_length(source: Source, target: Target) -> int:
    """The training length. ValueError if it is unknown or not below `to`, or the model is extended or contradicts itself."""
    if (kind := source.kind) != "rotary":
        raise UsageError(source.name, "a model that rotates its queries and keys", NOT_ROTARY[kind])
    for contradiction in contradictions(source.json, source.config):
        raise ValueError(f"{source.folder / 'config.json'}: {contradiction}")
    scheme = of_full_attention(ropes_of(source)).scaling
    written = source.inner.get(ORIGINAL)
    known = written or original_of(scheme, source.declared)
    if scheme is not None or (written is not None and source.declared is not None and written < source.declared):
        _require_unextended(source, target, scheme, known)
    length = target.original or known
    if length is None:
        raise ValueError(f"{source.name}: the length that it was trained at is unknown; pass it with --original")
    if target.to <= length:
        raise UsageError("--to", f"more than {length}, the length that {source.name} was trained at", target.to)
    return length


def pairs_of(source: Source, original: int, length: int) -> RotaryPairs:
    """Rotary pairs of the layers whose distances grow."""
    ropes = ropes_of(source)
    return RotaryPairs(of_full_attention(ropes).base, Layers.of(source, ropes, original).rotary_dim, original, length)


def original_of(scheme: Scaling | None, declared: int | None) -> int | None:
    """The training length according to a configuration; None where its scheme names none: Gemma 3's is not 131,072 / 8."""
    return declared if scheme is None else getattr(scheme, "original_max_length", None)


def _require_unextended(source: Source, target: Target, scheme: Scaling | None, known: int | None) -> None:
    """ValueError for a model that was extended, unless --original lets the new scheme replace the old one."""
    to = f"to {source.declared} tokens"
    if isinstance(scheme, DynamicNTK):  # it declares the training length
        to = f"tokens by a factor of {scheme.factor:g}"
    what = f"{scheme.name}, " if scheme is not None else ""
    extended = f"{source.name} was extended already ({what}{f'from {known} ' if known else ''}{to})"
    if scheme is None:
        raise ValueError(
            f"{extended} by another base than it was trained with, which its config.json no longer has; extend the "
            f"original checkpoint, and nothing is scaled twice"
        )
    if target.original is None:
        raise ValueError(
            f"{extended}; extend the original checkpoint, or pass --original {known or 'L, the length before that,'} "
            f"to put the new scheme in the place of the old one, if the weights were not trained with it; nothing is scaled twice"
        )
    if known is not None and target.original != known:
        raise ValueError(f"--original {target.original}: {extended}; expected --original {known}")


def tokenizer_length(source: Source) -> int | None:
    """model_max_length of its tokenizer; None if it is a huge number, which means no limit."""
    path = source.folder / "tokenizer_config.json"
    length = read_json(path, links=True).get("model_max_length") if path.is_file() else None
    return length if isinstance(length, int) and length < 10**9 else None


# ---- rotary ----------------------------------------------------------------------------------------------------------
def _require_reach(plan: ExtendPlan, scheme: Scaling) -> None:
    """UsageError for a --factor of YaRN with which the new length is not reached: `check` finds such a config broken."""
    reach = plan.factor * plan.original
    if isinstance(scheme, YaRN) and reach < COVERAGE * plan.length:
        least = f"{plan.length / plan.original:g} or more for --to {plan.length}"
        raise UsageError("--factor", least, plan.factor, f"{plan.target.method} reaches {reach:g} tokens; raise it")


def _plan_rotary(plan: ExtendPlan, must_fit: bool) -> None:
    source, target = plan.source, plan.target
    ropes, method = ropes_of(source), method_of(target.method)
    rope = of_full_attention(ropes)
    if target.base is not None and target.base < rope.base:
        below = f"below the base of {source.name}, {rope.base:g}"
        raise ValueError(f"--base {target.base:g} is {below}: a smaller base shortens the context; give a larger one")
    layers = Layers.of(source, ropes, plan.original)
    scheme = plan.search.scheme if plan.search else target.scheme(plan.factor, plan.original)
    _require_reach(plan, scheme)
    if source.config.model_type in ROTATED_VALUES and isinstance(scheme, YaRN):
        scheme = replace(scheme, attention_factor=1.0)
        plan.notes.append(
            f"The attention factor is 1, as in every {source.config.model_type} model: its values rotate, too."
        )
    plan.scheme = writable(scheme, rope, layers.rotary_dim, plan.original, plan.length)
    after = with_scheme(ropes, plan.scheme)
    _, plan.base, written = plan.scheme.written(rope.base, layers.rotary_dim)
    inner = with_ropes(
        source.inner, source.config, with_scheme(ropes, written or BaseChange(plan.base)), layers.rotary_dim
    )
    if vars(source.config).get("head_dim", 0) is None:  # Mixtral: transformers' YaRN multiplies it
        inner["head_dim"] = head_dim_of(source.config, FULL)
    if method.raises_length:
        inner |= {source.length_key: plan.length, ORIGINAL: plan.original}
    else:
        inner[source.length_key] = plan.original
    plan.config = inner if source.inner is source.json else source.json | {"text_config": inner}
    plan.layers, plan.ropes = layers, after
    try:
        plan.attention_factor = plan.require_rotation(plan.read_config())
    except NotAsMeant as error:
        raise ValueError(
            f"{source.name}: transformers does not rotate as {target.method} defines: {error}; "
            f"{source.config.model_type} models cannot be extended by --method {target.method}"
        ) from error
    plan.notes.append(method.note)
    if unread := unread_sentence(source.inner, source.config):
        plan.notes.append(f"{unread}. They stay as they are.")
    plan.notes += layers.notes()
    if warm := [spec for spec in (rope.temperature, rope.unrotated_temperature) if spec is not None]:
        plan.notes.append(f"The temperature of queries stays as it is: {', '.join(map(str, warm))}.")
    with in_one_line(f"{source.name}: the size of its heads is unknown"):
        head_dim = head_dim_of(source.config, FULL)
    cache = forward_memory(source.skeleton, head_dim, source.dtype, plan.length, rows=1, chunk=1, logits=0).cache
    if must_fit:
        elsewhere = "give a shorter length, or --no-measure if the model will run elsewhere"
        what = f"--to {plan.length}: keys and values of one sequence take"
        require_memory(cache, total_memory(), what, elsewhere)
    plan.notes.append(f"Keys and values of one sequence of {plan.length} tokens take {cache / 2**20:.0f} MiB.")
