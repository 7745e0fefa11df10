"""Drawings of rotations: wavelengths of the pairs, with and without scaling, and scores of a rotated query and key."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.attention.operation import attend
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.rotary import Rotary, XPos
from longitude.positions.scaling import SCHEMES, Follows, Scaling, rope_frequencies
from longitude.registry import options_of
from longitude.show.drawing import Dials, Drawing, Line, Lines, offsets_of
from longitude.show.shape import Shape

SEEDS = 3
"""Number of seeds for random queries and keys."""
FACTOR = 4
"""Extension factor of the scaling schemes that are drawn beside unscaled rotations."""
PLAIN, SHOWN = "no scaling", "yarn"
"""Names of no scheme, and of the one that is drawn as clocks beside it if a model has none."""
NEW = 1e-9
"""Relative amount by which an angle must exceed the trained ones to count as new."""


def schemes(factor: float, original: int) -> dict[str, Scaling]:
    """Registered schemes that a factor and a training length determine, by name."""
    made = {
        name: kind.extending(float(factor), original) for name, kind in SCHEMES.items() if "factor" in options_of(kind)
    }
    return {name: scheme for name, scheme in made.items() if scheme is not None}


def arcs(before: Tensor, after: Tensor, trained: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Shares of its circle that each pair goes through: within the training length, and at a length with other frequencies."""
    seen, asked = (offsets * theta.double() / (2 * math.pi) for offsets, theta in ((trained, before), (length, after)))
    return seen.clamp(max=1).numpy(), asked.clamp(max=1).numpy()


def dials(
    before: Tensor, every: dict[str, Tensor], trained: int, length: int, which: str = "", note: str = ""
) -> Iterator[Dials]:
    """A dial for each pair under each scheme.

    Args:
        before: Frequencies in training.
        every: Name of a scheme -> frequencies at the length.
        trained: Tokens that were seen in training.
        length: Tokens that are asked for.
        which: Name of the layers, if not all rotate alike.
        note: A further sentence of the caption.
    """
    for place, (name, after) in enumerate(every.items(), 1):
        seen, asked = arcs(before, after, trained, length)
        new = int((asked > seen * (1 + NEW)).sum())
        yield Dials(
            name=f"clocks-{which.replace(' ', '-')}{place}",
            title=f"RoPE as clocks, {name}: {new} of {len(seen)} pairs meet new angles{f' ({which})' if which else ''}",
            caption=f"A dial for each rotary pair, and on it the angles between a query and its keys: within {trained} tokens, "
            f"as in training, and beyond them up to {length}.{note}",
            seen=seen,
            asked=asked,
        )


def clocks(encoding: Encoding, shape: Shape, asked: int | None = None) -> Iterator[Dials]:
    """The dials of RoPE: trained at the length of the shape, or at that of its scheme, and asked for a multiple.

    Encodings that give a pair other positions than those of the text, such as ReRoPE, have none.
    """
    rotary = encoding.rope if isinstance(encoding, XPos) else encoding
    if not isinstance(rotary, Rotary) or (rotary is encoding and type(rotary) is not Rotary):
        return
    scaling = rotary.scaling
    trained = getattr(scaling, "original_max_length", None) or shape.length
    length = asked or math.ceil(trained * (getattr(scaling, "factor", None) or FACTOR))
    same = {"base": rotary.base, "rotary_dim": rotary.rotary_dim, "proportion": rotary.proportion}
    before = rope_frequencies(rotary.head_dim, **same).inverse
    each = {PLAIN: before}
    if scaling is not None:
        each[scaling.name] = rotary.frequencies(followed(scaling, length)).inverse
    elif rotary.rotary_dim >= 4:
        scaling = schemes(max(1.0, length / trained), trained)[SHOWN]
        each[SHOWN] = rope_frequencies(rotary.head_dim, scaling=scaling, **same).inverse
    yield from dials(before, each, trained, length)


def followed(scaling: Scaling | None, length: int) -> int | None:
    """The length, for a scheme whose frequencies depend on that of the text; None for others."""
    return length if isinstance(scaling, Follows) and scaling.follow != "declared" else None


def wavelengths(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Positions of one full rotation of each rotary pair, before and after its scheme; how much schemes slow pairs down.

    None of RoPE-Mixed, whose frequencies are learned and differ by head and axis.
    """
    rotary = encoding.rope if isinstance(encoding, XPos) else encoding
    if not isinstance(rotary, Rotary) or getattr(rotary, "mixed", False):
        return
    follows = followed(rotary.scaling, shape.length)
    now = rotary.frequencies(follows).inverse
    original = getattr(rotary.scaling, "original_max_length", None)
    trained = original or shape.length
    same = {"base": rotary.base, "rotary_dim": rotary.rotary_dim, "proportion": rotary.proportion}
    before, each = now, {}
    if rotary.scaling is not None:
        before = rope_frequencies(rotary.head_dim, **same).inverse
        each = {rotary.scaling.name: now}
    elif rotary.rotary_dim >= 4 and type(rotary) is Rotary:
        drawn = schemes(FACTOR, trained).items()
        each = {name: rope_frequencies(rotary.head_dim, scaling=one, **same).inverse for name, one in drawn}
    drawn = {PLAIN: before, **each} if rotary.scaling is not None else {"wavelength": now}
    pairs = np.arange(len(now))
    at = f" At length {shape.length}, which the scheme follows." if follows else ""
    yield Lines(
        name="wavelengths",
        title="Positions of one full rotation, by pair",
        caption="A pair whose wavelength is above the training length saw only a part of its circle: beyond that length it "
        f"meets angles that are new.{at}",
        x="rotary pair",
        y="positions",
        lines={name: (pairs, (2 * math.pi / theta).double().numpy()) for name, theta in drawn.items()},
        log_y=True,
        levels={"training length" if original else "length": trained},
    )
    if not each:
        return
    turning = int((before * trained >= 2 * math.pi).sum())
    every = f", for a factor of {FACTOR} and a training length of {trained}" if rotary.scaling is None else ""
    left_out = [name for name in SCHEMES if name not in each] if rotary.scaling is None else []
    yield Lines(
        name="slowed",
        title=f"How many times slower each pair rotates, {'by scheme' if rotary.scaling is None else 'by the scheme'}",
        caption=f"Frequencies before over those after{every}. Pairs from {turning} on never finished a rotation within "
        f"{trained}: only slower ones stay within angles that were trained."
        + (f" Not drawn, because a factor alone does not decide them: {', '.join(left_out)}." if left_out else "")
        + at,
        x="rotary pair",
        y="times slower",
        lines=grouped({name: (pairs, (before / theta).double().numpy()) for name, theta in each.items()}),
        marks={"first pair without a full rotation": turning} if turning < len(pairs) else {},
    )


def grouped(lines: dict[str, Line]) -> dict[str, Line]:
    """Merge equal curves under one name."""
    names: dict[bytes, list[str]] = {}
    for name, (_, y) in lines.items():
        names.setdefault(y.tobytes(), []).append(name)
    return {" and ".join(same): lines[same[0]] for same in names.values()}


def scores(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Scores of a rotated query and key against their offset: they depend on both vectors."""
    if not encoding.overrides("keys"):
        return
    offsets, dim = offsets_of(shape.length), shape.head_dim
    generator = torch.Generator().manual_seed(0)
    alike = torch.ones(1, dim, dtype=torch.float64)
    given = {"q = k, all dimensions alike": (alike, alike)}
    for seed in range(SEEDS):
        q, k = torch.randn(2, 1, dim, generator=generator, dtype=torch.float64)
        given[f"random q and k, {seed + 1}"] = q, k
    yield Lines.by_offset(
        name="scores",
        title="Score of one query and one key, by offset",
        caption="q.k after rotation, over the product of their lengths before it. It falls with distance for vectors whose "
        "dimensions are all alike, and not in general: which offset a head prefers is learned in its queries and keys.",
        y="cosine of q and k",
        lines={name: (offsets, rotated(encoding, q, k, offsets, shape)) for name, (q, k) in given.items()},
        focus="q = k, all dimensions alike",
    )


def rotated(encoding: Encoding, q: Tensor, k: Tensor, offsets: np.ndarray, shape: Shape) -> np.ndarray:
    """Cosines of the first head's query at the newest position and a key [1, head_dim] at each offset before it."""
    newest = shape.length - 1
    if compose(encoding).regions():  # by attention to one key alone, whose logsumexp is its score
        q, k = (x.expand(len(offsets), 1, 1, -1) for x in (q, k))
        at_q, at_k = ((newest - torch.from_numpy(o))[:, None] for o in (0 * offsets, offsets))
        places: dict[str, Any] = {"q_positions": at_q, "k_positions": at_k}
        alone = attend(q, k, k, encoding=encoding, **places, scale=1.0, return_lse=True)
        return (alone[1].flatten() / (q[0].norm() * k[0].norm())).numpy()
    q_heads, k_heads = (x.expand(1, shape.heads, n, -1) for x, n in ((q, 1), (k, len(offsets))))
    keys = encoding.rotate_keys(k_heads, newest - torch.from_numpy(offsets))[0, 0]
    found = keys @ encoding.rotate_queries(q_heads, torch.tensor([newest]))[0, 0, 0]
    return (found / (q.norm() * k.norm())).numpy()
