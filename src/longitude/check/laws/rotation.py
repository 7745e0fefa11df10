"""Laws of rotary tables: they turn as config.json declares, at every length and position, in every dtype, from any loading."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longitude.check.subject import CHECKPOINT_LAWS, Subject, computing_in
from longitude.checkpoints.compare import (
    Disagreement,
    border_of,
    difference,
    frequencies_of,
    head_dim_of,
    read,
    ropes as config_ropes,
)
from longitude.checkpoints.declared import declared_length, unread
from longitude.checkpoints.positions import is_rotary, last_position, table_of
from longitude.positions.hugging_face import NotUnderstood, RopeConfig
from longitude.positions.scaling import Frequencies
from longitude.positions.scaling.base import Follows
from longitude.testing.engine import DoesNotApply, LawBroken, Measurement, Unknown

FAR = 100_003
SHIFT = 64
"""Shift of positions in `relative_positions`, and most tokens it compares: few, so that float32 tables stay exact enough."""
LATER = 3
"""First of the passed positions: some tables start at 1 or 2 by default."""
ALL, BLOCK = 4096, 512
"""Positions that are all tried, as far as a length is declared, and positions of one pass."""
RESOLVED = 0.1
"""Error of an angle in float32, in rad, above which a pair is not compared."""
LONGEST = 608
"""Tokens of a full pass, if only a full pass can show a border, unless a length is given."""
BEYOND = 2**24 + 60_001
"""A position that neither bfloat16 nor float32 represents exactly."""
FREQUENCIES = 0.02
"""Largest relative error of a frequency. Rounding to bfloat16 gives up to 0.005; `far_positions` tests that."""


class NotShown(DoesNotApply):
    """Raised if no rotary tables can be read."""


def other_width(rotated: int, declared: int) -> LawBroken:
    """The error for tables that rotate another number of dimensions than the config declares."""
    message = f"the model rotates {rotated} dimensions of a head, and its config declares {declared}"
    return LawBroken(message, Measurement(abs(rotated / declared - 1), FREQUENCIES))


# ---- the config ---------------------------------------------------------------------------------------------------------
def ropes(config: Any) -> dict[str | None, RopeConfig]:
    """Rotary parameters of a config by the layer types in use (None: one for all layers). Unknown if they are not understood."""
    try:
        by_layer, layers = config_ropes(config), read(config).layers or []
    except Disagreement as reason:
        raise NotShown(f"the law `files` has it: {reason}") from reason
    except NotUnderstood as reason:
        raise Unknown(str(reason)) from reason
    except ValueError as reason:
        raise NotShown(str(reason)) from reason
    used = {layer.label for layer in layers if layer is not None}
    return {label: rope for label, rope in by_layer.items() if not used or label is None or label in used}


def expected(config: Any, layer: str | None, rope: RopeConfig, length: int) -> Frequencies:
    """Frequencies and factors of a type of layers for a sequence of `length` tokens."""
    if rope.sections is not None:
        raise NotShown("its positions have several axes (mrope)")
    return frequencies_of(rope, head_dim_of(config, layer), length)


# ---- what the model does ------------------------------------------------------------------------------------------------
class Tables(NamedTuple):
    """cos and sin [L, width], float64, as the model made them in one pass."""

    cos: Tensor
    sin: Tensor

    def pairs(self, count: int) -> Tables:
        """Tables [L, count] with one number per pair, without the repetition that models have."""
        width = self.cos.shape[-1]
        if width == count:
            return self
        if width != 2 * count:
            raise other_width(width, 2 * count)
        halves, neighbors = (
            int((first == other).all(1).sum())
            for first, other in ((self.cos[:, :count], self.cos[:, count:]), (self.cos[:, 0::2], self.cos[:, 1::2]))
        )
        if 2 * max(halves, neighbors) <= len(self.cos):  # a few wrong rows may not repeat
            raise other_width(2 * width, 2 * count)
        take = slice(count) if halves >= neighbors else slice(0, None, 2)
        return Tables(self.cos[:, take], self.sin[:, take])

    def frequencies(self) -> Frequencies:
        """What tables that begin at positions 0, 1 turn by, and their factor."""
        return Frequencies(
            torch.atan2(self.sin[1], self.cos[1]).cpu(), float(torch.hypot(self.cos[0], self.sin[0]).max())
        )

    def errors(self, positions: Tensor, want: Frequencies) -> Tensor:
        """Larger error [L, pairs] of cos and sin at positions [L]; infinite if a value is not finite."""
        angles, pairs = angles_at(positions, want), self.pairs(len(want.inverse))
        exact = ((pairs.cos, angles.cos()), (pairs.sin, angles.sin()))
        off = [(got.cpu() - table * want.attention_factor).abs().nan_to_num(nan=float("inf")) for got, table in exact]
        return torch.maximum(*off)


def angles_at(positions: Tensor, want: Frequencies) -> Tensor:
    """Angles [L, pairs] of positions [L], in rad, float64."""
    return positions[:, None].cpu().double() * want.inverse.cpu()


def tables_of(subject: Subject, tokens: Tensor, **options: Any) -> dict[str | None, Tables]:
    """The rotary tables of one pass, by layer type (None if the model has one kind)."""
    seen: dict[str | None, Tables] = {}

    def look(module: nn.Module, arguments: tuple, named: dict[str, Any], out: Any) -> None:
        layer = named.get("layer_type") or next((word for word in arguments if isinstance(word, str)), None)
        if isinstance(out, Tensor) and out.is_complex():
            out = (out.real, out.imag)
        if isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) and t.dim() >= 2 for t in out):
            cos, sin = (t.detach().double().reshape(-1, *t.shape[-2:])[0] for t in out)
            seen.setdefault(layer, Tables(cos, sin))

    with ExitStack() as stack:
        for module in filter(is_rotary, subject.model.modules()):
            stack.enter_context(module.register_forward_hook(look, with_kwargs=True))
        subject.logits(tokens, **options)
    return seen


def require_tables(tables: Mapping[str | None, Tables]) -> None:
    if not tables:
        raise NotShown("the model shows no rotary tables: none of its modules is called Rotary and returns cos and sin")


# ---- frequencies -------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=FREQUENCIES, rests_on=("files",))
def rotary_frequencies(subject: Subject) -> Measurement:
    """Frequencies of the tables = those of the config (relative), at every length.

    With the attention factor, read off the tables at positions 0 and 1 of a short pass. Of a scaling that follows the length,
    also in sequences of L - 1, L, L + 1 and 2 L tokens, L the original length, each after a short sequence.
    """
    read = ropes(subject.config)
    lengths = {8: tables_of(subject, subject.tokens(8))}
    require_tables(lengths[8])
    if (border := border_of(subject.config)) is not None:
        lengths |= around(subject, border)
    worst, causes, wrong = 0.0, dict[str, str](), list[int]()
    for length, tables in lengths.items():
        for layer in (layer for layer in read if layer in tables):
            want = expected(subject.config, layer, read[layer], length)
            off = difference(tables[layer].pairs(len(want.inverse)).frequencies(), want, FREQUENCIES)
            if off.text:
                causes.setdefault(layer or "the model", f"does not rotate as its config declares: it {off.text}")
                wrong.append(length)
            worst = max(worst, off.relative)
    cause = "; ".join(f"{layer} {text}" for layer, text in causes.items())
    if border is not None and wrong:
        cause += (
            f" (in sequences of {', '.join(map(str, dict.fromkeys(wrong)))} tokens; the original length is {border})"
        )
    return Measurement(worst, FREQUENCIES, "" if border is None else f"the original length is {border} tokens", cause)


def around(subject: Subject, border: int) -> dict[int, dict[str | None, Tables]]:
    """Tables in sequences of lengths around the original length of a scaling."""
    lengths = [border - 1, border, border + 1, 2 * border]
    by_length = {length: tables_in(subject, length, "position_ids" in subject.takes) for length in lengths}
    if all(
        same(by_length[lengths[0]], tables) for tables in by_length.values()
    ):  # they may follow the number of tokens
        if not reachable(subject, lengths[-1]):
            raise DoesNotApply(f"its tables do not follow the largest position; --length {lengths[-1]} measures passes")
        by_length = {length: tables_in(subject, length, by_position=False) for length in lengths}
    return by_length


def reachable(subject: Subject, length: int) -> bool:
    """Whether a full forward pass of this length is tried."""
    return length <= max(LONGEST, subject.reach)


def tables_in(
    subject: Subject, length: int, by_position: bool = True, behind: int | None = None
) -> dict[str | None, Tables]:
    """Tables of the first two positions in a sequence of this length, after a short one, then one of `behind` tokens."""
    subject.logits(subject.tokens(2))  # a short sequence resets what transformers keeps of a long one

    def tables(length: int) -> dict[str | None, Tables]:
        if not by_position:
            return tables_of(subject, subject.tokens(length))
        at = torch.tensor([[0, 1, length - 1]], device=subject.device)
        return tables_of(subject, subject.tokens(3), position_ids=at)

    if behind is not None:
        tables(behind)
    made = tables(length)
    subject.logits(subject.tokens(2))
    require_tables(made)
    return made


def same(first: Mapping[str | None, Tables], other: Mapping[str | None, Tables]) -> bool:
    """Whether the first two positions have the same tables."""
    return all(torch.equal(first[layer].sin[:2], other[layer].sin[:2]) for layer in first)


@CHECKPOINT_LAWS.law(threshold=0, rests_on=("files",))
def given_positions(subject: Subject) -> Measurement:
    """Tables of positions follow the position_ids that are given.

    Of 8 tokens at positions that begin later, and of gaps between them, against the same tokens without. The number counts ways
    that are ignored.
    """
    subject.require("position_ids", "none can be given")
    if (reason := unread(subject.config)) is not None:
        raise DoesNotApply(reason)
    tokens, steps = subject.tokens(8), torch.arange(8, device=subject.device)[None]
    without, learned = tables_of(subject, tokens), table_of(subject.model) is not None
    if unseen := not without and not learned:
        ropes(subject.config)  # raises where it declares no rotation: nothing is known of its positions
    if (end := last_position(subject.model)) is not None and end <= 16:
        raise DoesNotApply(f"its positions end at {end}")
    ignored = []
    for way, at in {"that begin later": steps + LATER, "with gaps between them": 2 * steps}.items():
        if unseen and way == "that begin later":
            continue  # a rotation is relative: logits stay
        if without:
            got = tables_of(subject, tokens, position_ids=at)
            same = all(torch.equal(got[layer].sin, without[layer].sin) for layer in without.keys() & got.keys())
        else:
            # without a mask, transformers takes gaps for borders between documents
            mask = {"attention_mask": torch.ones_like(tokens)} if "attention_mask" in subject.takes else {}
            same = torch.equal(subject.logits(tokens, position_ids=at, **mask), subject.logits(tokens, **mask))
        ignored += [way] if same else []
    cause = f"position_ids {' and '.join(ignored)} change nothing"
    return Measurement(len(ignored), 0, cause=cause)


# ---- far positions ---------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(rests_on=("files", "rotary_frequencies", "given_positions"))
def far_positions(subject: Subject) -> Measurement:
    """Tables, biases or logits at far positions = those of float32, in the model's own dtype, in bfloat16 and under autocast.

    As far as the model is declared for, and at 100,003; in bfloat16 beyond 2^24. And a short pass after it = the one before.
    """
    tokens = subject.tokens(8)
    before, again = (subject.logits(tokens) for _ in range(2))
    far = far_ones(subject)
    error = subject.error(subject.logits(tokens), before)
    if far.holds and torch.equal(before, again) and subject.first_above(error) is not None:
        kept = f"a pass at position {FAR} changes later passes of few tokens: what it makes is kept"
        return subject.measurement(error, kept)
    if not far.holds:
        return far
    try:
        low = in_bfloat16(subject)
    except (DoesNotApply, Unknown) as reason:
        return replace(far, note=f"{far.note}; in bfloat16 not tried: {reason}")
    return replace(far, note=f"{far.note}; {low.note}") if low.holds else low


def far_ones(subject: Subject) -> Measurement:
    """Error of tables, biases or logits at far positions."""
    if (end := last_position(subject.model)) is not None and end <= FAR:
        raise DoesNotApply(f"its positions are a table that ends at {end}")
    biases = [m for m in subject.model.modules() if hasattr(m, "build_alibi_tensor")]
    if biases:
        return far_biases(subject, biases[0])
    subject.require("position_ids", "no far position can be tried alone")
    declared: int = getattr(subject.config, "max_position_embeddings", None) or FAR
    starts = [FAR] if declared < 16 else sorted({FAR, declared - 8})
    try:
        tables = [far_tables(subject, start) for start in starts]
        return next((measured for measured in tables if not measured.holds), tables[-1])
    except (NotShown, Unknown):
        return far_logits(subject)


def far_tables(subject: Subject, start: int) -> Measurement:
    """Cos and sin of 8 positions from `start` on against float64."""
    wants, positions = wants_at(subject, start + 8), torch.arange(start, start + 8)
    error, allowed = 0.0, 0.0
    for layer, tables in tables_at(subject, positions, wants).items():
        # A position too far or too near is no rounding: cached_decoding finds it.
        off = min(float(tables.errors(positions + shift, wants[layer]).max()) for shift in (0, -1, 1))
        error = max(error, off)
        allowed = max(allowed, float(roundings(subject, positions, wants[layer]).max()))
    place = f"at position {start} in {dtype_name(next(subject.model.parameters()).dtype)}"
    return Measurement(error, allowed, place, f"cos and sin {place} are not those of its config", start)


def wants_at(subject: Subject, length: int) -> dict[str | None, Frequencies]:
    """Frequencies and factors that the config declares, by layer type, in a sequence of this length."""
    return {layer: expected(subject.config, layer, rope, length) for layer, rope in ropes(subject.config).items()}


def roundings(subject: Subject, positions: Tensor, want: Frequencies) -> Tensor:
    """Allowed error [L] of cos and sin: two roundings of a float32 angle, and one to the model's dtype."""
    eps = torch.finfo(next(subject.model.parameters()).dtype).eps
    return want.attention_factor * (eps + 8 * (positions + 8) * 2.0**-24)


# ---- all that is declared ------------------------------------------------------------------------------------------------
class Seen(Exception):
    """Raised by a hook to end a pass once it has the tensors it needs."""


@CHECKPOINT_LAWS.law(threshold=0, rests_on=("rotary_frequencies", "given_positions", "far_positions"))
def served_positions(subject: Subject) -> Measurement:
    """Each position up to the declared length has its own row of the table.

    All of a learned table; of rotary tables 4,096, and those at and around powers of two. The number counts positions that
    have another row, as where positions are clamped or begin again, and rows of a learned table that are those before them.
    """
    if (table := table_of(subject.model)) is not None and (end := last_position(subject.model)) is not None:
        return served_by_table(subject, table[1], end)
    subject.require("position_ids", "no position can be tried alone")
    declared = declared_length(subject.config)
    if declared is None or any(isinstance(rope.scaling, Follows) for rope in ropes(subject.config).values()):
        raise DoesNotApply("its config declares no length" if declared is None else "its tables follow the length")
    powers = {place + step for place in (2**k for k in range(declared.bit_length())) for step in (-1, 0, place // 2)}
    places = torch.tensor(sorted({*range(min(declared, ALL)), *(place for place in powers if place < declared)}))
    wants, wrong = wants_at(subject, declared), set[int]()
    for positions in places.split(BLOCK):
        for layer, tables in tables_at(subject, positions, wants).items():
            off = tables.errors(positions, wants[layer]).amax(1)
            wrong |= {*positions[off > roundings(subject, positions, wants[layer])].tolist()}
    cause = f"cos and sin are not those of their position at {min(wrong)}, the first of {len(wrong)}" if wrong else ""
    return Measurement(len(wrong), 0, f"{len(places)} positions up to {declared}", cause)


def served_by_table(subject: Subject, table: nn.Embedding, end: int) -> Measurement:
    """Measure which rows of a learned table a sequence of `end` tokens, its full length, gets."""
    seen: list[Tensor] = []

    def look(module: nn.Module, arguments: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out  # ProphetNet's table returns the positions as well
        seen.append(out.detach().reshape(-1, out.shape[-1]))
        raise Seen

    with table.register_forward_hook(look), suppress(Seen):
        subject.logits(subject.tokens(end))
    if not seen or len(seen[0]) != end:
        raise NotShown("its table of positions does not show")
    rows, weight = seen[0], table.weight.detach()
    begins = [int(at) for at in (weight == rows[0]).all(1).nonzero() if int(at) + end <= len(weight)]
    if not begins:
        raise NotShown("rows of its table of positions do not show")
    wrong, begin = min(
        ((rows != weight[begin : begin + end]).any(1).nonzero().flatten().tolist(), begin) for begin in begins
    )
    cause = ""
    if wrong:
        other = next((int(at) - begin for at in (weight == rows[wrong[0]]).all(1).nonzero()), "none")
        cause = f"{len(wrong)} of {end} positions have another row: position {wrong[0]} has that of {other}"
    elif wrong := ((rows[1:] == rows[:-1]).all(1).nonzero().flatten() + 1).tolist():
        zero = "" if rows[wrong[0]].any() else ", of zeros"
        cause = f"{len(wrong)} of {end} positions have the row of the one before them, as position {wrong[0]}{zero}"
    return Measurement(len(wrong), 0, f"{end} positions of a table", cause)


# ---- tables, biases and logits far away --------------------------------------------------------------------------------------
def tables_at(subject: Subject, positions: Tensor, layers: Container[str | None]) -> dict[str | None, Tables]:
    """Rotary tables [L] of these positions [L] by layer type, of those in `layers`. NotShown if the model shows none."""
    at = positions.to(subject.device)[None]
    tables = tables_of(subject, subject.tokens(len(positions)), position_ids=at)
    require_tables(tables)
    return {layer: of_layer for layer, of_layer in tables.items() if layer in layers}


def far_biases(subject: Subject, module: Any) -> Measurement:
    """ALiBi's biases of the 64 nearest of 100,003 keys against those of 64 keys in float64, in nats."""
    dtype, heads = next(subject.model.parameters()).dtype, subject.config.num_attention_heads

    def nearest(keys: int, kind: torch.dtype) -> Tensor:
        """Biases [heads, 64] of the last 64 of `keys` keys, relative to the last."""
        row = module.build_alibi_tensor(torch.ones(1, keys, device=subject.device), heads, kind)[:, 0, -64:].double()
        return row - row[:, -1:]

    exact = nearest(64, torch.float64)  # only distances count
    error, place = float((nearest(FAR, dtype) - exact).abs().max()), f"at position {FAR} in {dtype_name(dtype)}"
    return Measurement(error, 0.05, place, f"biases of near keys {place} are not those at the start", FAR)


def far_logits(subject: Subject) -> Measurement:
    """For models without visible tables: error of logits in the model's dtype against float32, at far and near positions."""
    tokens, dtype = subject.tokens(32), next(subject.model.parameters()).dtype
    if subject.device.type != "cpu":  # an accelerator does not survive an index beyond a table
        raise DoesNotApply("it shows no rotary tables, and only on the CPU can be tried where its positions end")
    positions = {start: torch.arange(start, start + 32, device=subject.device)[None] for start in (0, FAR)}
    try:
        subject.logits(tokens, position_ids=positions[FAR])
    except (IndexError, RuntimeError, ValueError) as error:
        raise DoesNotApply(f"its positions end before {FAR} ({' '.join(str(error).split())[:120]})") from error
    low = {start: subject.logits(tokens, position_ids=at) for start, at in positions.items()}
    with computing_in(subject.model, torch.float32):
        exact = {start: subject.logits(tokens, position_ids=at) for start, at in positions.items()}
    near, away = (float(subject.error(low[start], exact[start]).max()) for start in (0, FAR))
    place = f"at position {FAR} in {dtype_name(dtype)}"
    return Measurement(away, 3 * near + 0.05, f"logits, {place}", f"logits {place} differ from those in float32", FAR)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- bfloat16 ------------------------------------------------------------------------------------------------------------
def in_bfloat16(subject: Subject) -> Measurement:
    """Error of tables beyond position 2^24 in bfloat16.

    Tried with weights in bfloat16, and with unchanged weights under autocast. The error of each pair is in units of the error
    of float32 angles: 8 x angle x 2^-24 rad, and one rounding of cos and sin. Pairs with an angle error above 0.1 rad are left
    out.
    """
    subject.require("position_ids", "no far position can be tried alone")
    wants, positions = wants_at(subject, BEYOND + 8), torch.arange(BEYOND, BEYOND + 8)
    model, worst, wrong, notes = subject.model, 0.0, [], []
    ways = {
        "with weights in bfloat16": lambda: computing_in(model, torch.bfloat16, tables=False),
        "under autocast": lambda: torch.autocast(subject.device.type, torch.bfloat16),
    }
    for way, running in ways.items():
        try:
            with running():
                by_layer = tables_at(subject, positions, wants)
        except (RuntimeError, TypeError) as error:
            notes.append(f"it does not run {way} ({type(error).__name__})")
            continue
        for layer, tables in by_layer.items():
            off = excess(tables, positions, wants[layer])
            wrong += [] if off <= 1 else [way]
            worst = max(worst, off)
    cause = f"cos and sin at position {BEYOND} are not those of its config ({'; '.join(dict.fromkeys(wrong))})"
    if len(notes) == len(ways):
        raise DoesNotApply("; ".join(notes))
    return Measurement(worst, 1.0, "; ".join([f"at position {BEYOND}", *notes]), cause, BEYOND)


def excess(tables: Tables, positions: Tensor, want: Frequencies) -> float:
    """The largest error of tables [L, pairs], in units of what float32 angles and a rounding to bfloat16 give each pair."""
    angles = angles_at(positions, want)
    unsure = 8 * angles * 2.0**-24
    if not bool((compared := (unsure < RESOLVED).all(0)).any()):
        raise NotShown(f"all its pairs are too fast for float32 at position {BEYOND}")
    allowed = want.attention_factor * (unsure + 2 * torch.finfo(torch.bfloat16).eps)
    return float((tables.errors(positions, want) / allowed)[:, compared].max())


# ---- the meta device -----------------------------------------------------------------------------------------------------
@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Context in which uninitialized memory is NaN, so that tables that are never filled are found."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@CHECKPOINT_LAWS.law(threshold=1e-6, rests_on=("files", "rotary_frequencies", "far_positions"))
def meta_device(subject: Subject) -> Measurement:
    """Tables of a model loaded through the meta device = its own.

    Its weights given to from_pretrained() again, which builds the model without memory; tables that are not among the weights
    must be made again.
    """
    model = subject.model
    subject.logits(subject.tokens(2))  # tables that follow the length are those of a short sequence again
    state = model.state_dict()
    unsaved = {name: table for name, table in model.named_buffers() if name not in state and table.numel()}
    if not unsaved:
        raise DoesNotApply("all that it keeps is among its weights")
    with empty_is_nan():
        try:
            again = subject.rebuilt(type(model))
        except (AttributeError, NotImplementedError, OSError, TypeError, ValueError) as error:
            raise DoesNotApply(f"its class does not take its own weights ({type(error).__name__})") from error
    remade = dict(again.named_buffers())
    errors = {name: table_gap(remade.get(name), table) for name, table in unsaved.items()}
    wrong = [name for name, error in errors.items() if not error <= 1e-6]
    cause = (
        f"a model of the same weights has others, or none: {', '.join(wrong[:3])} (no weight, and made by the class)"
    )
    return Measurement(max(errors.values()), 1e-6, cause=cause)


def table_gap(got: Tensor | None, want: Tensor) -> float:
    """The largest difference, in units of the largest number of `want`; 1 if `got` is missing or not finite."""
    if got is None or got.dim() != want.dim() or got.device.type == "meta":
        return 1.0
    common = tuple(
        slice(min(sizes)) for sizes in zip(got.shape, want.shape, strict=True)
    )  # some tables grow as they are used
    got, want = got[common].double(), want[common].double()
    scale = float(want.abs().max()) or 1.0
    return float(((got - want).abs() / scale).nan_to_num(nan=1.0, posinf=1.0).max())
