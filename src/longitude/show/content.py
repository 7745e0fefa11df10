"""Drawings of content-dependent encodings, for random tokens: gates, reflections, counted positions."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longitude.attention.operation import attend
from longitude.positions.base import Drift, Encoding, RowBias, Transport
from longitude.positions.composed import compose
from longitude.positions.contextual import CoPE
from longitude.show.drawing import Drawing, Grid, Lines, floor_of, heads, middle
from longitude.show.shape import Shape

SEEDS = 3
"""Number of seeds for random keys."""
SHOWN = 128
"""Tokens of a path, at most."""
UNTRAINED = "Random tokens and first weights, of seed 0."


def gates(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the decay of forget gates by offset."""
    for term in _terms(encoding, Drift, shape.tokens()):
        level = term.level[0].double()
        forgotten = (level[:, -1:] - level).flip(-1).numpy()
        lines = heads(forgotten, np.arange(shape.length))
        yield Lines.by_offset(
            name="gates",
            title="What each head forgets of a key, by offset",
            caption="The sum of ln f over the tokens between key and query, which is added to the score. Each token decides "
            f"its f. {UNTRAINED}",
            y="added to the score",
            lines=lines,
            focus=middle(lines),
            floor=floor_of(forgotten),
        )


def reflections(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Draw the reflection strength of each token, and the decay of a key over later tokens."""
    length = min(shape.length, SHOWN)
    for term in _terms(encoding, Transport, shape.tokens()[:, :length]):
        yield Grid(
            name="reflections",
            title="How strongly each token changes the keys before it",
            caption="b of H = I - b w w': 0 leaves a key as it is, 1 takes the direction w out of it, 2 reflects it. "
            f"{UNTRAINED}",
            x="token",
            y="head",
            values=term.b[0].numpy(),
            rows=[str(head + 1) for head in range(term.b.shape[1])],
            columns=range(length),
        )
        yield Lines(
            name="path",
            title="A key along the path of tokens after it, compared with itself",
            caption="q.k of a query equal to the key, after the reflections of all tokens between them, in the first head; "
            f"both have length 1. {UNTRAINED}",
            x="tokens between key and query",
            y="cosine",
            lines={
                f"random key {seed + 1}": (np.arange(length), carried(encoding, seed, shape)) for seed in range(SEEDS)
            },
            far=True,
            focus="random key 1",
        )


def _terms(encoding: Encoding, kind: Any, tokens: Tensor) -> list[Any]:
    """The terms of a kind that an encoding reads off tokens."""
    if not encoding.reads_tokens:
        return []
    return [term for term in encoding.terms(compose(encoding).context(tokens)[0]) if isinstance(term, kind)]


def carried(encoding: Encoding, seed: int, shape: Shape) -> np.ndarray:
    """q_i . H_i ... H_1 k_0 for equal unit vectors q_i and k_0, in the first head, from the weights of attention.

    All other keys are 0, as their scores are then, so that ln of a weight over the weight of the query's own token is the score.
    """
    length = min(shape.length, SHOWN)
    columns = compose(encoding).context(shape.tokens()[:, :length])[0]
    generator = torch.Generator().manual_seed(seed)
    vector = F.normalize(torch.randn(shape.head_dim, generator=generator, dtype=torch.float64), dim=0)
    k = torch.zeros(1, shape.heads, length, shape.head_dim, dtype=torch.float64)
    q = vector.expand(k.shape)
    k[:, :, 0] = vector
    weights = attend(q, k, k, encoding=compose(encoding), context=columns, scale=1.0, return_weights=True)[1][0, 0]
    found = (weights[1:, 0] / weights.diagonal()[1:]).log()
    return np.concatenate([[1.0], found.numpy()])


def counted(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Positions that CoPE's gates count."""
    if not isinstance(encoding, CoPE):
        return
    length = min(shape.length, 512)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(length, generator=generator, dtype=torch.float64)
    means = {"scores of mean -2": -2.0, "scores of mean 0": 0.0, "scores of mean 2": 2.0}
    yield Lines.by_offset(
        name="counted",
        title="The position that a query counts, by offset",
        caption="The sum of sigmoid(score) over the keys from here to the query, at most the last column of its table. "
        "Random scores of standard deviation 1.",
        y="position",
        lines={name: (np.arange(length), positions_of(encoding, mean + noise)) for name, mean in means.items()},
        levels={"last column": encoding.max_position - 1},
        focus="scores of mean 0",
    )


def positions_of(encoding: CoPE, scores: Tensor) -> np.ndarray:
    """The positions that it counts for scores [offsets]: what it adds if each column of its table has its own number."""
    ruler = copy.deepcopy(encoding)
    ruler.table.data.zero_()[0] = torch.arange(encoding.max_position)
    q = torch.zeros(1, 1, 1, encoding.head_dim, dtype=torch.float64)
    q[..., 0] = encoding.head_dim**0.5 if encoding.scaled else 1.0
    (term,) = ruler.terms({})
    assert isinstance(term, RowBias)
    row = scores.flip(0)[None, None, None]
    return term.of(q, row, torch.ones_like(row, dtype=torch.bool))[0, 0, 0].flip(0).numpy()
