"""The plan of an extension, made before anything is written: new configuration, scheme, changed tensors."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import Ropes, changed_keys, of_full_attention, turning_alike, with_ropes
from longitude.checkpoints.lint import COVERAGE, unknown_keys, unread_keys
from longitude.checkpoints.load import differences, in_one_line, require_shards, shapes_of
from longitude.checkpoints.positions import Kind, table_of
from longitude.checkpoints.source import Source, require_fit, ropes_of
from longitude.errors import UsageError, Within, check_bounds
from longitude.extend.factors import with_scheme, writable
from longitude.extend.layers import Layers, NotAsMeant, auto_class
from longitude.extend.search import SearchResult
from longitude.extend.weights import Change
from longitude.positions.absolute import Learned
from longitude.positions.config_keys import BASES, FULL, names_any
from longitude.positions.hugging_face import ORIGINAL, unread_words
from longitude.positions.scaling import BaseChange, DynamicNTK, Linear, Scaling, YaRN
from longitude.positions.scaling.base import method_of, scheme_of
from longitude.runs.costs import forward_memory
from longitude.runs.files import read_json
from longitude.runs.memory import require_memory, total_memory
from longitude.runs.quiet import quiet

ROTATED_VALUES = ("deepseek_v4",)
"""Model types with rotated values. A factor on cos and sin would multiply values too, so their YaRN has none."""
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
        kind: "rotary", "learned" or "alibi".
        original: The training length in tokens.
        target: The requested extension.
        factor: The scheme's factor.
        scheme: One of lg.scaling; None if nothing is scaled.
        base: New rope_theta.
        attention_factor: Factor of cos and sin.
        config: Content of the new config.json.
        changes: Tensor name -> its change.
        notes: Sentences for the user.
        search: Result of a search of factors.
        layers: Layers as the class rotates them before the change; None if the rotation does not change.
        ropes: Rotary parameters that the new configuration must declare.
    """

    source: Source
    kind: Kind
    original: int
    target: Target
    factor: float
    config: dict[str, Any]
    scheme: Scaling | None = None
    base: float | None = None
    attention_factor: float = 1.0
    changes: dict[str, Change] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    search: SearchResult | None = None
    layers: Layers | None = None
    ropes: Ropes | None = None

    @property
    def length(self) -> int:
        return self.target.to

    @property
    def nothing(self) -> bool:
        """Whether the model needs nothing written."""
        return self.kind == "alibi"

    @property
    def inner(self) -> dict[str, Any]:
        """The part of the new config.json about the text model."""
        return self.config if self.source.inner is self.source.json else self.config["text_config"]

    def difference(self) -> list[tuple[str, Any, Any]]:
        return changed_keys(self.source.json, self.config)

    def tokenizer_limit(self) -> tuple[int, int] | None:
        """(before, after) of the tokenizer's model_max_length, if that would cut longer texts off."""
        before = tokenizer_length(self.source)
        return None if before is None or not self.original <= before < self.length else (before, self.length)

    def require_written(self, folder: Path) -> None:
        """ValueError unless a written folder is read as planned: its tensors fit its model, which rotates as planned."""
        config = self.read_config(folder)
        if self.source.quantization is None:
            with (
                quiet(),
                torch.device("meta"),
                in_one_line(f"{self.source.name}: transformers builds no model of what is written"),
            ):
                skeleton = auto_class(self.source).from_config(config)
            require_shards(folder)
            require_fit(self.source.name, folder, skeleton)
        try:
            self.require_rotation(config)
        except NotAsMeant as error:
            raise ValueError(
                f"{self.source.name}: the written checkpoint was read again, and is not what --method {self.target.method} "
                f"asked for: {error}; it is removed: look for what changes files on that disk, or report it"
            ) from error

    def require_rotation(self, config: PreTrainedConfig) -> float:
        """The attention factor. NotAsMeant unless the class rotates as planned with a new configuration."""
        if self.layers is None:
            return self.attention_factor
        assert self.ropes is not None
        return self.layers.require(config, self.ropes, self.length)

    def read_config(self, folder: Path | None = None) -> PreTrainedConfig:
        """Configuration as transformers reads it from a folder; None: from the planned config.json."""
        with quiet(), in_one_line(f"{self.source.name}: transformers cannot read the new config.json"):
            if folder is not None:
                return AutoConfig.from_pretrained(folder)
            kind = CONFIG_MAPPING[self.config["model_type"]]
            return kind.from_dict(json.loads(json.dumps(self.config), object_hook=number_or_dict))


def plan_extension(
    source: Source, target: Target, search: SearchResult | None = None, must_fit: bool = True
) -> ExtendPlan:
    """The plan for a checkpoint. ValueError if it cannot or should not be extended; must_fit: also if memory is too small."""
    original = original_length(source, target)
    if target.to < original:
        below = f"less than the length {original} that {source.name} was trained at, a factor below one"
        raise ValueError(f"--to {target.to} is {below}; expected {original} or more")
    factor = target.to / original if target.factor is None else target.factor
    plan = ExtendPlan(source, source.kind, original, target, factor, copy.deepcopy(source.json), search=search)
    if plan.kind == "rotary":
        _plan_rotary(plan, must_fit)
    elif plan.kind == "learned":
        _plan_table(plan)
    else:
        plan.notes.append(
            "ALiBi biases every distance alike, at any length: it needs no scaling, and nothing is written. Whether the "
            "model keeps its quality at the new length, only a measurement shows."
        )
        if hasattr(source.config, "max_seq_len"):
            biases = "transformers makes this model's biases for max_seq_len positions"
            plan.notes.append(f"{biases}: load it with max_seq_len={target.to}.")
    if search is not None and search.note:
        plan.notes.append(search.note)
    plan.notes += [f"{each}: they are copied as they are." for each in differences(source.skeleton, source.unread)[1]]
    return plan


def original_length(source: Source, target: Target) -> int:
    """The training length. ValueError when it is unknown, or when the model was extended already."""
    if source.kind == "learned":
        return find_table(source).rows if target.original is None else target.original
    if source.kind == "alibi":
        length = target.original or source.declared or tokenizer_length(source)
    else:
        scheme = of_full_attention(ropes_of(source)).scaling
        written = source.inner.get(ORIGINAL)
        known = written or original_of(scheme, source.declared)
        if scheme is not None or (written is not None and source.declared is not None and written < source.declared):
            _require_unextended(source, target, scheme, known)
        length = target.original or known
    if length is None:
        raise ValueError(f"{source.name}: the length that it was trained at is unknown; pass it with --original")
    return length


def original_of(scheme: Scaling | None, declared: int | None) -> int | None:
    """The training length according to a configuration."""
    if scheme is None:
        return declared
    if isinstance(scheme, Linear) and declared is not None:
        return round(declared / scheme.factor)
    return getattr(scheme, "original_max_length", None)


def _require_unextended(source: Source, target: Target, scheme: Scaling | None, known: int | None) -> None:
    """ValueError for a model that was extended, unless --original lets the new scheme replace the old one."""
    to = f"to {source.declared} tokens"
    if isinstance(scheme, DynamicNTK):  # it declares the training length
        to = f"tokens by a factor of {scheme.factor:g}"
    what = f"{scheme.name}, " if scheme is not None else ""
    extended = f"{source.name} was extended already ({what}from {known} {to})"
    if scheme is None:
        raise ValueError(
            f"{extended} by another base than it was trained with, which its config.json no longer has; extend the "
            f"original checkpoint, and nothing is scaled twice"
        )
    if target.original is None:
        raise ValueError(
            f"{extended}; extend the original checkpoint, or pass --original {known} to put the new scheme in the "
            f"place of the old one, if the weights were not trained with it; nothing is scaled twice"
        )
    if known is not None and target.original != known:
        raise ValueError(f"--original {target.original}: {extended}; expected --original {known}")


def tokenizer_length(source: Source) -> int | None:
    """model_max_length of its tokenizer; None if it is a huge number, which means no limit."""
    path = source.folder / "tokenizer_config.json"
    length = read_json(path, links=True).get("model_max_length") if path.is_file() else None
    return length if isinstance(length, int) and length < 10**9 else None


def number_or_dict(read: dict[str, Any]) -> Any:
    """Infinity and NaN as transformers writes them into JSON."""
    return float(read["__float__"]) if read.keys() == {"__float__"} else read


# ---- rotary ----------------------------------------------------------------------------------------------------------
def _require_no_slip(source: Source) -> None:
    """ValueError for a misspelt key about positions: its meaning would be lost in the new config.json."""
    for slip in unknown_keys(source.inner, source.config):
        raise ValueError(f"{source.name}: config.json: {slip}")


def _require_reach(plan: ExtendPlan, scheme: Scaling) -> None:
    """UsageError for a --factor of YaRN with which the new length is not reached: `check` finds such a config broken."""
    reach = plan.factor * plan.original
    if isinstance(scheme, YaRN) and reach < COVERAGE * plan.length:
        least = f"{plan.length / plan.original:g} or more for --to {plan.length}"
        raise UsageError("--factor", least, plan.factor, f"{plan.target.method} reaches {reach:g} tokens; raise it")


def _plan_rotary(plan: ExtendPlan, must_fit: bool) -> None:
    source, target = plan.source, plan.target
    _require_no_slip(source)
    ropes, method = ropes_of(source), method_of(target.method)
    rope = of_full_attention(ropes)
    if plan.length == plan.original and plan.factor == 1:
        if target.base is not None and target.base != rope.base:
            unchanged = "--to is the training length, where nothing changes"
            raise ValueError(f"--base {target.base:g}: {unchanged}; give a longer --to, or leave --base out")
        plan.base = rope.base
        plan.notes.append("Factor 1: every method is the identity, and the checkpoint is a copy.")
        return
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
    if unread := unread_keys(source.inner, source.config):
        plan.notes.append(f"{unread_words(unread)}. They stay as they are.")
    plan.notes += [*turning_alike(source.config), *layers.notes()]
    if warm := [spec for spec in (rope.temperature, rope.unrotated_temperature) if spec is not None]:
        plan.notes.append(f"The temperature of queries stays as it is: {', '.join(map(str, warm))}.")
    if not names_any(source.inner, BASES):
        taken = f"{rope.base:g} is what transformers takes for this model, and it is written down now"
        plan.notes.append(f"config.json names no base: {taken}. Make sure that the model was trained with it.")
    with in_one_line(f"{source.name}: the size of its heads is unknown"):
        head_dim = head_dim_of(source.config, FULL)
    cache = forward_memory(source.skeleton, head_dim, source.dtype, plan.length, rows=1, chunk=1, logits=0).cache
    if must_fit:
        elsewhere = "give a shorter length, or --no-measure if the model will run elsewhere"
        what = f"--to {plan.length}: keys and values of one sequence take"
        require_memory(cache, total_memory(), what, elsewhere)
    plan.notes.append(f"Keys and values of one sequence of {plan.length} tokens take {cache / 2**20:.0f} MiB.")


# ---- learned tables --------------------------------------------------------------------------------------------------
def _plan_table(plan: ExtendPlan) -> None:
    source, table = plan.source, find_table(plan.source)
    if plan.target.method != "linear":
        raise ValueError(
            f"--method {plan.target.method}: {source.name} has a learned table of positions and no frequencies to scale; "
            f"expected --method linear, which stretches the table"
        )
    if plan.original != table.rows:
        raise ValueError(f"--original {plan.original}: the table has {table.rows} positions; leave it out")
    if plan.factor != plan.length / plan.original:
        raise ValueError("--factor: a table is stretched to --to and has no other factor; leave it out")
    what = f"--to {plan.length}: the table alone, with its copies, takes"
    require_memory(16 * table.dim * plan.length, total_memory(), what, "give a shorter length")
    if plan.length == plan.original:
        plan.notes.append("Factor 1: the table stays as it is, and the checkpoint is a copy.")
        return
    plan.changes[table.name] = partial(stretched, offset=table.offset, length=plan.length)
    inner, key = plan.inner, source.length_key
    before = inner.get(key, getattr(source.config, key))
    inner[key] = before + plan.length - table.rows
    if inner.get("n_ctx") == before:  # GPT-2's older key for the same
        inner["n_ctx"] = inner[key]
    plan.notes.append(
        "Rows between trained ones are their averages: adjacent rows are nearly alike, and no row but the first and the last is "
        "where it was. Fine-tune before use; short contexts cost as well."
    )


@dataclass(frozen=True)
class LearnedTable:
    """A table in the files of a checkpoint.

    Attributes:
        name: The tensor's name.
        rows: Positions it has.
        offset: Rows before them that are no positions (2 in OPT, one more than the padding token's id in RoBERTa).
        dim: Width of a row.
    """

    name: str
    rows: int
    offset: int
    dim: int


def find_table(source: Source) -> LearnedTable:
    """The learned table of a checkpoint. ValueError when its files have none of that name, or several."""
    table = table_of(source.skeleton)
    assert table is not None, "called for a model without a table"
    name, module = table
    offset = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    names = [f"{name}.weight", f"{name}.weight".removeprefix(f"{prefix}.")]  # the latter where saved without the head
    held = [key for shard in source.shards for key in shapes_of(shard) if key in names]
    if source.pickled:  # its tensors get the model's names when they are written
        held = names[:1]
    if len(held) != 1:
        raise ValueError(f"{source.name}: expected one tensor {names[0]}, the table of positions, got {held or 'none'}")
    return LearnedTable(held[0], module.num_embeddings - offset, offset, module.embedding_dim)


def stretched(table: Tensor, offset: int, length: int) -> Tensor:
    """Table [offset + rows, dim] -> [offset + length, dim], linear along positions; first, last and offset rows unchanged."""
    rows = len(table) - offset
    if length == rows:
        return table
    encoding = Learned(rows, table.shape[1], row_offset=offset, beyond="interpolate", length=length)
    encoding.table = nn.Parameter(table, requires_grad=False)
    return torch.cat([table[:offset], encoding.codes(torch.arange(length)).to(table.dtype)])
