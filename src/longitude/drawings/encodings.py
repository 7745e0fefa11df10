"""Drawings of encodings: each function takes a built encoding, and draws nothing if it does not apply.

Every number comes from the methods that attention calls (`embed`, `rotate_queries`, `terms`, `lg.attend`), not from a
formula here. Learned numbers are drawn after training or not at all: before it they are noise, or a flat line.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from longitude.attention.operation import attend
from longitude.drawings.build import Shape
from longitude.drawings.drawing import Drawing, Grid, Line, Lines, floor_of, heads, middle, offsets_of
from longitude.drawings.rotations import pairs_of, scores
from longitude.positions.axes import ContinuousBias
from longitude.positions.base import Encoding, encoding as build
from longitude.positions.bias import FORBIDDEN, T5Bias, t5_bucket
from longitude.positions.composed import Composed, compose
from longitude.positions.disentangled import Disentangled
from longitude.positions.terms import OffsetBias, PairBias, Temperature

HEADS = 4
AFTER = " after training at length 128"
"""Heads of the saved encodings, and the end of titles of their numbers."""
OTHERS = "num_heads", "training"
"""Attributes that the saved encoding and the one that is drawn need not share."""


@torch.no_grad()
def drawings(encoding: Encoding, shape: Shape) -> list[Drawing]:
    """All drawings of an encoding, in the order of its members.

    Args:
        encoding: Built for the shape, in float64.
        shape: Sizes of the attention that it is drawn in.

    Returns:
        Drawings with distinct names.
    """
    members = list(encoding) if isinstance(encoding, Composed) else [encoding]
    kinds = (table, pairs_of, scores, bias, buckets, logarithms, temperature)
    pictures = [drawing for member in members for draw in kinds for drawing in draw(member, shape)]
    return [*pictures, *weights(encoding, shape)]


# ---- at the input ----------------------------------------------------------------------------------------------------
def table(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the embeddings that are added to the tokens."""
    if not encoding.at_input or encoding.learned:  # before training a table is noise
        return
    length = min(shape.length, encoding.max_length or shape.length)
    added = encoding.embed(torch.zeros(1, length, shape.dim, dtype=torch.float64), torch.arange(length)[None])[0]
    shown, step = min(length, 48), shape.dim // 64 | 1  # odd: sines and cosines take turns
    columns = range(0, shape.dim, step)
    every = "" if step == 1 else f" Of {shape.dim} dimensions, one in {step} is drawn."
    yield Grid(
        name="table",
        title=f"What is added to the tokens at positions 0 to {shown - 1}",
        caption=f"A row for each position, a column for each dimension of the token.{every}",
        x="dimension",
        y="position",
        values=added[:shown, columns].numpy(),
        rows=[str(position) for position in range(shown)],
        columns=columns,
    )
    unit = added / added.norm(dim=-1, keepdim=True)
    offsets = offsets_of(length)
    cosine = (unit[length - 1 - torch.from_numpy(offsets)] * unit[-1]).sum(-1).numpy()
    yield Lines.by_offset(
        name="codes",
        title="How alike the codes of two positions are, by offset",
        caption=f"The cosine of what is added at position {length - 1} and at one this far before it.",
        y="cosine",
        lines={"cosine": (offsets, cosine)},
    )


@cache
def _saved() -> dict[str, Any]:
    """Options and numbers of the first layer: seed 0, two layers, 800 steps on the standard library of Python."""
    return json.loads(files("longitude.drawings").joinpath("trained.json").read_text(encoding="utf-8"))


def trained(encoding: Encoding) -> Encoding | None:
    """An encoding of the same options with the learned numbers of the saved study, and as many heads; None if it has none."""

    def options(of: Encoding) -> dict[str, Any]:
        return {name: value for name, value in vars(of).items() if name[0] != "_" and name not in OTHERS}

    for label, saved in _saved().items():
        made = build(label.partition(":")[0], num_heads=HEADS, **saved["options"])
        if type(made) is type(encoding) and options(made) == options(encoding):
            made.load_state_dict({name: torch.tensor(numbers) for name, numbers in saved["weights"].items()})
            return made.double()
    return None


def _terms(encoding: Encoding, kind: Any) -> list[Any]:
    """The terms of a kind that positions alone decide."""
    return [] if encoding.reads_tokens else [term for term in encoding.terms({}) if isinstance(term, kind)]


# ---- biases ----------------------------------------------------------------------------------------------------------
def bias(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the bias of scores, if it depends only on positions."""
    terms = [] if encoding.reads_tokens else encoding.terms({})
    if not terms or not all(isinstance(term, OffsetBias | PairBias) for term in terms):
        return
    shown = trained(encoding) if encoding.learned else encoding
    if shown is None:
        return
    encoding, when = shown, AFTER if encoding.learned else ""
    newest, offsets = shape.length - 1, offsets_of(shape.length)
    sided = getattr(encoding, "bidirectional", False) or getattr(encoding, "future", "symmetric") != "symmetric"
    offsets = np.unique([*-offsets, *offsets]) if sided else offsets

    lines = bias_lines(encoding, newest, offsets)
    floor = floor_of([values for _, values in lines.values()])
    cut = f" Drawn down to {floor:.0f}, where a weight is 2e-9 of what it would be with bias 0." if floor else ""
    yield Lines.by_offset(
        name="bias",
        title=f"What each head adds to the score of a key, by offset{when}",
        caption=f"Before softmax, for the query at position {newest}: one unit less makes a weight e = 2.72 times smaller.{cut}",
        y="bias",
        lines=lines,
        focus=middle(lines),
        floor=floor,
    )


def bias_lines(encoding: Encoding, newest: int, offsets: np.ndarray) -> dict[str, Line]:
    """Biases of the keys at these offsets before the newest query, a line for each head; NaN for keys that are forbidden."""
    values = encoding.bias(torch.tensor([newest]), newest - torch.from_numpy(offsets))[:, 0].double().numpy()
    return heads(np.where(values > FORBIDDEN, values, np.nan), offsets)


def buckets(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """The buckets of T5 and of DeBERTa."""
    if isinstance(encoding, T5Bias):
        count, last, sided = encoding.num_buckets, encoding.max_distance, encoding.bidirectional
        row = partial(t5_bucket, num_buckets=count, max_distance=last, bidirectional=sided)
    elif isinstance(encoding, Disentangled):
        count, last, sided = 2 * encoding.span, encoding.max_distance or encoding.span, True
        row = encoding.row
    else:
        return
    length = max(shape.length, 2 * last)
    offsets = np.arange(-length + 1 if sided else 0, length)
    yield Lines.by_offset(
        name="buckets",
        title=f"Which of the {count} learned rows an offset reads",
        caption=f"Offsets with the same row look the same. All beyond {last} have the same row.",
        y="row",
        lines={"row": (offsets, row(torch.from_numpy(offsets)).numpy())},
        marks={"the last row": last},
    )


def logarithms(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """What Swin v2's network reads of an offset along an axis."""
    if not isinstance(encoding, ContinuousBias):
        return
    side = encoding.sides[0]
    offsets = np.arange(-2 * side, 2 * side + 1)
    read = encoding.logarithms(torch.from_numpy(offsets)[:, None].expand(-1, encoding.axes))[:, 0]
    yield Lines.by_offset(
        name="logarithms",
        title="What the network reads of an offset along an axis",
        caption="Near offsets differ by more than far ones, so a larger window needs few values outside the trained range.",
        y="u",
        lines={"u": (offsets, read.numpy())},
        marks={"window": side - 1},
    )


def temperature(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the temperature that multiplies queries."""
    shown, when = trained(encoding) if encoding.learned else encoding, AFTER if encoding.learned else ""
    for term in [] if shown is None else _terms(shown, Temperature):
        of_keys, step = term.of == "visible", getattr(encoding, "step", 0)
        numbers = np.unique(np.geomspace(1, max(16 * shape.length, 8 * step), 400).astype(int))
        factors = term.at(torch.from_numpy(numbers)[None, None])[0, 0].numpy()  # those of the first head
        yield Lines(
            name="temperature-by-keys" if of_keys else "temperature-by-position",
            title=f"What a query is multiplied by, by {'the keys it attends to' if of_keys else 'its position'}{when}",
            caption="A factor of 2 makes all scores of the query twice as far apart, and its attention sharper.",
            x="keys" if of_keys else "position",
            y="factor",
            lines={"factor": (numbers, factors)},
            log_x=True,
            levels={"as without it": 1.0},
        )


# ---- every encoding that reaches the scores -----------------------------------------------------------------------------
def weights(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the attention weights of the last query for equal keys: the prior of the encoding."""
    built = compose(encoding)
    acting = [member for member in built if member.overrides("queries", "keys", "terms")]
    # random or 0 before training, so there is nothing to see
    random = all(member.learned and not member.reads_tokens for member in acting)
    if random or (built.max_length or shape.length) < shape.length:
        return
    offsets = offsets_of(shape.length)
    q = torch.ones(1, shape.heads, shape.length, shape.head_dim, dtype=torch.float64)
    columns = built.context(shape.tokens())[0] if built.reads_tokens else None
    weights = attend(q[:, :, -1:], q, q, encoding=built, context=columns, return_weights=True)[1]
    lines = heads(weights[0, :, 0].flip(-1)[:, torch.from_numpy(offsets)].numpy(), offsets)
    yield Lines.by_offset(
        name="weights",
        title="Attention of the last query to keys that are all alike, by offset",
        caption=f"Weights over {shape.length} keys where all dimensions of every q and k are 1: what position alone prefers.",
        y="weight",
        lines=lines,
        levels={f"all keys alike, 1/{shape.length}": 1 / shape.length},
        focus=middle(lines),
    )
