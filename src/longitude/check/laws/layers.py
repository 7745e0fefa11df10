"""Laws of single layers: queries, keys, mask and scale as attention gets them, compared with what config.json declares.

Other laws compare a model with itself, and one that is wrong in the same way everywhere agrees with itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args
from warnings import catch_warnings

import torch
from torch import Tensor

from longitude.check.laws.passes import SOUND
from longitude.check.laws.rotation import NotShown, ropes
from longitude.check.quick import random_of
from longitude.check.recorder import (
    Recorded,
    apart,
    as_allowed,
    norms_without_weights,
    pairs_moved,
    recorded,
    unrotated,
)
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.compare import border_of, which_layers
from longitude.checkpoints.config import positions_of_layers
from longitude.checkpoints.declared import declared_length
from longitude.checkpoints.positions import is_rotary
from longitude.models.stock_caches import kinds_of
from longitude.positions.base import encoding
from longitude.positions.hugging_face import NotUnderstood
from longitude.positions.layers import LayerPositions
from longitude.positions.rotation import Layout
from longitude.positions.terms import Temperature
from longitude.testing.engine import DoesNotApply, Measurement, Unknown

TOKENS = 24
SHIFT = 7
"""Offset of the positions of the second row."""
CHUNK = 5
"""Tokens of a chunk after a cache."""
SHORTER = 16
"""Tokens of the windows that stand for longer ones in a small model."""
EXTRA, LONGEST = 8, 1032
"""Tokens beyond a window, and the most for which masks are tried, unless a length is given."""
LOOPED = ("dory",)
"""Model types that go through some layers several times, and number these calls."""
BACKWARDS = ("nanochat",)
"""Model types that rotate halves by the negative angles: the same as by the positive ones with the halves swapped."""


RESTS_ON = (*SOUND, "rotary_frequencies")
LAYERS = ("layer_rotations", "layer_masks", "attention_outputs")
"""Laws that name the layer; what compares whole models rests on them."""


def promised(config: Any, layout: Layout) -> list[LayerPositions]:
    """Positions that the config declares for each layer. DoesNotApply if it has none of these, Unknown if not understood."""
    ropes(config)
    try:
        with catch_warnings(action="ignore"):  # about unknown keys, which the law `files` notes
            return positions_of_layers(config, layout)
    except NotUnderstood as reason:
        raise Unknown(str(reason)) from reason
    except (KeyError, ValueError) as reason:
        raise NotShown(f"its layers cannot be read ({reason})") from reason


# ---- rotations -----------------------------------------------------------------------------------------------------------
KINDS = {"query": "queries", "key": "keys"}
Where = tuple[int, str]
"""A layer, and one of KINDS."""


class Rotations:
    """Queries and keys of two rows at different positions: as attention receives them, and before rotation."""

    def __init__(self, subject: Subject):
        self.config = subject.config
        self.layers = {layout: promised(self.config, layout) for layout in get_args(Layout)}
        length = min(TOKENS, subject.length - SHIFT - 1)
        steps = torch.arange(1, length + 1, device=subject.device)
        self.positions = torch.stack([steps, steps + SHIFT])
        if (border := border_of(self.config)) is not None and border <= int(self.positions.max()):
            raise DoesNotApply(f"its tables follow the length, and change at {border} tokens")
        self.tokens = subject.tokens(length, rows=2)
        # Norms behind the rotation (HunYuan) commute with it if their weights are equal.
        with norms_without_weights(subject.model):
            self.after = recorded(subject, self.tokens, position_ids=self.positions)
            # A temperature is 1 at position 0. Without one, positions stay, because recurrent layers read them.
            warm = has_temperature(self.layers["half"])
            positions = torch.zeros_like(self.positions) if warm else self.positions
            with unrotated(subject.model):
                self.before = recorded(subject, self.tokens, position_ids=positions)
                self.later = self.before if warm else recorded(subject, self.tokens, position_ids=positions + 1)

    def shown(self, wrong: Sequence[Where]) -> bool:
        """Whether queries and keys do not depend on positions if rotary modules do not rotate."""
        return all(
            apart(getattr(self.later[index], kind), getattr(self.before[index], kind)) <= EQUAL for index, kind in wrong
        )

    def errors(self, layout: Layout) -> dict[Where, float]:
        """Error of queries and keys of each layer, relative to the declared rotation."""
        return {
            (index, kind): self.error(index, kind, self.layers[layout][index].encoding)
            for index in self.after
            for kind in ("query", "key")
        }

    def error(self, index: int, kind: str, specs: Sequence[Mapping[str, Any]]) -> float:
        """Error of queries or keys of a layer, only of the rotated part of a head, relative to its encodings."""
        x, raw = (getattr(layers[index], kind).double() for layers in (self.after, self.before))
        width, latent = x.shape[3], getattr(self.config, "qk_rope_head_dim", None)
        if latent is not None and latent < width:  # the last numbers rotate
            x, raw = x[..., -latent:], raw[..., -latent:]
            specs = [
                {**spec, "head_dim": latent, "rotary_dim": latent} if "head_dim" in spec else spec for spec in specs
            ]
        if self.config.model_type in BACKWARDS:
            x, raw = (tensor.roll(width // 2, -1) for tensor in (x, raw))
        return apart(x, as_declared(raw, specs, self.positions, kind == "query"))


def has_temperature(layers: Sequence[LayerPositions]) -> bool:
    """Whether a layer multiplies queries by a factor of their position."""
    return any(spec["name"].endswith("temperature") for layer in layers for spec in layer.encoding)


def as_declared(x: Tensor, specs: Sequence[Mapping[str, Any]], positions: Tensor, queries: bool) -> Tensor:
    """Queries or keys [B, H, L, D] before rotation -> transformed by the encodings of a layer, in float64."""
    x = x.double()
    for spec in specs:
        module = encoding(**spec)
        tables = module.prepare(positions, int(positions.max()) + 1, torch.float64)
        x = module.queries(x, tables) if queries else module.keys(x, tables)
        for term in module.terms({}) if queries else ():
            if isinstance(term, Temperature):
                x = x * term.at(positions[:, None].double())[..., None]
    return x


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=RESTS_ON)
def layer_rotations(subject: Subject) -> Measurement:
    """Queries and keys of each layer = as its config declares them.

    Each row of a batch has different positions. The layout of pairs, half or interleaved, is the one that fits most layers.
    """
    subject.require("position_ids", "rows cannot have positions of their own")
    rotations = Rotations(subject)
    require_one_key_each(rotations.after, rotations.tokens.shape[1])
    errors = {layout: rotations.errors(layout) for layout in rotations.layers}
    above = {
        layout: [where for where, error in of_layout.items() if not error <= subject.threshold]
        for layout, of_layout in errors.items()
    }
    layout = min(above, key=lambda layout: len(above[layout]))
    wrong = above[layout]
    worst, cause, count = max(errors[layout].values()), "", len(rotations.after)
    if wrong and not (any(map(is_rotary, subject.model.modules())) and rotations.shown(wrong)):
        raise NotShown("no module shows its rotary tables, so queries and keys before the rotation are not known")
    if wrong:
        layers = list(dict.fromkeys(index for index, _ in wrong))
        kinds = " and ".join(name for kind, name in KINDS.items() if any(kind == at for _, at in wrong))
        cause = (
            f"{kinds} of {which_layers(layers, count)} are not rotated as config.json declares; declared for layer {layers[0]} "
            f"is {rotations.layers[layout][layers[0]].encoding}"
        )
    elif isinstance(declared := getattr(subject.config, "rope_interleave", None), bool):
        moved = pairs_moved(subject, rotations.tokens, rotations.positions)
        if others := [index for index, yes in moved.items() if yes != declared]:
            worst = 1.0
            cause = f"pairs of {which_layers(others, count)} are not those that rope_interleave={declared} declares"
    return Measurement(worst, subject.threshold, f"pairs in the layout {layout!r}", cause)


def require_one_key_each(layers: Mapping[int, Recorded], tokens: int) -> None:
    """Unknown for layers that compress keys, or add some: the config is read as one for each token."""
    for index, layer in layers.items():
        if (keys := layer.key.shape[2]) != tokens:
            raise Unknown(f"not understood: attention of layer {index} gets {keys} keys for {tokens} tokens")


# ---- masks ---------------------------------------------------------------------------------------------------------------
@CHECKPOINT_LAWS.law(threshold=0, rests_on=RESTS_ON)
def layer_masks(subject: Subject) -> Measurement:
    """Visible keys of each query in each layer = those of its config.

    It covers causality, windows and chunks, in a full pass, and for several tokens and one token after the model's cache and a
    static cache; and again with short windows in place of those that are too long to try.
    """
    if subject.config.model_type in LOOPED:
        raise Unknown("not understood: which window has each layer of a section that is gone through several times")
    layers = promised(subject.config, "half")
    sizes = {size for layer in layers for size in (layer.window, layer.chunk) if size is not None}
    tried = {size for size in sizes if size + EXTRA <= max(LONGEST, subject.reach)}
    length = max([TOKENS, *(size + EXTRA for size in tried)])
    tokens = subject.tokens(length)
    recordings = recorded(subject, tokens)
    require_one_key_each(recordings, length)
    if not any(isinstance(layer.mask, Tensor) for layer in recordings.values()):
        raise DoesNotApply("its attention is given no mask, and makes its own")
    i = torch.arange(length, device=subject.device)
    wants = {index: layers[index].allowed(i, i) for index in recordings}
    wrong: dict[int, str] = {}
    for index, layer in recordings.items():
        if not isinstance(layer.mask, Tensor):
            continue
        want, got = wants[index], as_allowed(layer.mask)[:, :length]
        if not torch.equal(got, want):
            row = int((got != want).any(-1).nonzero()[0])
            declared = f"expected {int(want[row].sum())}{bound_of(layers[index])}"
            wrong[index] = f"query {row} attends to {int(got[row].sum())} keys, {declared}"
    cached, notes = behind_caches(subject, tokens, wants)
    wrong = cached | wrong
    cause = ""
    if wrong:
        first = next(iter(wrong))
        which = which_layers([*wrong], len(recordings))
        cause = f"the mask of {which} is not what config.json declares: {wrong[first]}"
    if left := sizes - tried:
        sizes_left = ", ".join(map(str, sorted(left)))
        reached = min(left) < (declared_length(subject.config) or math.inf)  # longer ones hide nothing
        if not wrong and reached and (small := with_short_windows(subject, left)) is not None:
            short = layer_masks(small)
            notes.append(
                f"windows of {sizes_left} were tried as windows of {SHORTER}, in a small random model of its class"
            )
            if not short.holds:
                return replace(short, cause=f"windows of {sizes_left}, tried as windows of {SHORTER}: {short.cause}")
        else:
            notes.append(f"windows of {sizes_left} were not tried; --length measures there")
    return Measurement(len(wrong), 0, "; ".join(notes), cause)


def bound_of(layer: LayerPositions) -> str:
    """Words for the declared window or chunk of a layer; empty without one."""
    sizes = {"window": layer.window, "chunk": layer.chunk}
    return "".join(f" with a {kind} of {size}" for kind, size in sizes.items() if size is not None)


def with_short_windows(subject: Subject, sizes: Collection[int]) -> Subject | None:
    """A small random model of the config with short windows in place of these; None if there is none of its class."""
    config = copy.deepcopy(subject.model.config)
    text = config.get_text_config()
    for key, value in vars(text).items():
        if any(word in key for word in ("window", "chunk")) and type(value) is int and value in sizes:
            setattr(text, key, SHORTER)
    try:
        model = random_of(config, make=type(subject.model)._from_config)
    except Exception:  # sizes that depend on each other
        return None
    return replace(subject, model=model.to(subject.device), reference=None)


def behind_caches(subject: Subject, tokens: Tensor, wants: Mapping[int, Tensor]) -> tuple[dict[int, str], list[str]]:
    """For each layer, a query with a wrong number of visible keys after a cache; and caches that the model does not support.

    After a prefill, the last tokens come as a chunk, and the very last token alone.
    """
    length = tokens.shape[1]
    kinds = kinds_of(subject.model.config, 2 * length, accelerated=False)
    wrong: dict[int, str] = {}
    notes: list[str] = []
    for name, make in {"its cache": kinds["dynamic"], "a static cache": kinds["static"]}.items():
        try:
            cache, start = make(), 0
            for part in tokens.split([length - CHUNK - 1, CHUNK, 1], 1):
                recordings = recorded(subject, part, **subject.with_cache(cache))
                for index, got in counted(recordings).items() if start else ():
                    want = wants[index][start : start + part.shape[1]].sum(-1)
                    if (off := (got != want).nonzero()).numel():
                        row = int(off[0])
                        wrong.setdefault(
                            index, f"behind {name} query {start + row} attends to {got[row]} keys, expected {want[row]}"
                        )
                start += part.shape[1]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            notes.append(f"it does not take {name} ({type(error).__name__})")
    return wrong, notes


def counted(recordings: Mapping[int, Recorded]) -> dict[int, Tensor]:
    """Number of visible keys [L] of each query, by layer: all keys for one query without a mask; no entry for several."""
    counts = {}
    for index, layer in recordings.items():
        if isinstance(layer.mask, Tensor):
            counts[index] = as_allowed(layer.mask).sum(-1)
        elif layer.query.shape[2] == 1:
            counts[index] = torch.tensor([layer.key.shape[2]], device=layer.key.device)
    return counts
