"""Laws of running a model in bfloat16 and under autocast, and of loading it through the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from longitude.check.family import by_its_class
from longitude.check.rotary import (
    NotShown,
    Tables,
    allowed_errors,
    angles_at,
    expected,
    require_tables,
    ropes,
    tables_at,
    why_far,
)
from longitude.check.subject import CHECKPOINT_LAWS, Subject, computing_in
from longitude.checkpoints.quiet import quiet
from longitude.positions.scaling import Frequencies
from longitude.testing.engine import DoesNotApply, Measurement

BEYOND = 2**24 + 60_001
"""A position that neither bfloat16 nor float32 represents exactly."""


# ---- bfloat16 ------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=1.0, rests_on=("rotary_frequencies", "given_positions", "far_positions"))
@by_its_class
def bfloat16_positions(subject: Subject) -> Measurement:
    """Tables beyond position 2^24 in bfloat16 = those of float64.

    Tried with weights in bfloat16, and with unchanged weights under autocast. The error of each pair is in units of the error
    of float32 angles: 8 x angle x 2^-24 rad, and one rounding of cos and sin. Pairs with an angle error above 0.1 rad are left
    out.
    """
    subject.require("position_ids", "no far position can be tried alone")
    read = ropes(subject.config)
    wants = {layer: expected(subject.config, layer, rope, BEYOND + 8) for layer, rope in read.items()}
    positions = torch.arange(BEYOND, BEYOND + 8)
    model, worst, causes, notes, why = subject.model, 0.0, [], [], ""
    ways = {
        "with weights in bfloat16": lambda: computing_in(model, torch.bfloat16, tables=False),
        "under autocast": lambda: torch.autocast(subject.device.type, torch.bfloat16),
    }
    for way, running in ways.items():
        try:
            with running():
                tables = tables_at(subject, positions)
        except (RuntimeError, TypeError) as error:
            notes.append(f"it does not run {way} ({type(error).__name__})")
            continue
        require_tables(tables)
        for layer in tables.keys() & wants.keys():
            off = excess(tables[layer].pairs(len(wants[layer].inverse)), positions, wants[layer])
            if not off <= 1:
                causes.append(way)
                with running():
                    why = why or why_far(subject, layer, positions, torch.bfloat16)
            worst = max(worst, off)
    cause = f"cos and sin at position {BEYOND} are not those of its config ({'; '.join(dict.fromkeys(causes))}){why}"
    if len(notes) == len(ways):
        raise DoesNotApply("; ".join(notes))
    return Measurement(worst, 1.0, "; ".join([f"at position {BEYOND}", *notes]), cause, BEYOND)


def excess(tables: Tables, positions: Tensor, want: Frequencies) -> float:
    """The largest error of tables [L, pairs], in units of what is allowed for each pair."""
    allowed, pairs = allowed_errors(positions, want, torch.bfloat16)
    if not bool(pairs.any()):
        raise NotShown(f"all its pairs are too fast for float32 at position {BEYOND}")
    return float((tables.errors(angles_at(positions, want), want) / allowed)[:, pairs].max())


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


@CHECKPOINT_LAWS.law(threshold=1e-6, rests_on=("config", "rotary_frequencies", "far_positions"))
def meta_device(subject: Subject) -> Measurement:
    """Tables of a model loaded through the meta device = its own.

    Its weights given to from_pretrained() again, which builds the model without memory; tables that are not among the weights
    must be made again.
    """
    model = subject.model
    subject.logits(subject.tokens(2))  # tables that follow the length are those of a short sequence again
    state = model.state_dict()
    own = {name: table for name, table in model.named_buffers() if name not in state and table.numel()}
    if not own:
        raise DoesNotApply("all that it keeps is among its weights")
    subject.require_room(state)
    with quiet(), empty_is_nan():
        try:
            again = type(model).from_pretrained(None, config=model.config, state_dict=dict(state))
        except (AttributeError, NotImplementedError, OSError, TypeError, ValueError) as error:
            raise DoesNotApply(f"its class does not take its own weights ({type(error).__name__})") from error
    found = dict(again.named_buffers())
    errors = {name: table_gap(found.get(name), table) for name, table in own.items()}
    wrong = [name for name, error in errors.items() if not error <= 1e-6]
    unfilled = [name for name in wrong if (table := found.get(name)) is None or not usable(table)]
    cause = (
        f"made again from its config with other numbers: {', '.join(wrong[:3])}; the model's own were changed after it was made"
        if wrong and not unfilled
        else f"not made again behind the meta device: {', '.join(unfilled[:3])}; neither among the weights nor filled by "
        "_init_weights(), so a loaded model has whatever was in memory"
    )
    return Measurement(max(errors.values()), 1e-6, cause=cause, whose="checkpoint" if wrong and not unfilled else "")


def usable(table: Tensor) -> bool:
    """Whether a table was filled: uninitialized memory is NaN."""
    return table.device.type != "meta" and bool(table.isfinite().all())


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
