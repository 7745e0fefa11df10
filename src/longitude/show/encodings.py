"""What an encoding does, drawn: each function takes a built encoding, and draws nothing where it does not apply.

Every number comes from the methods that attention calls (`embed`, `rotate_queries`, `terms`, `lg.attend`), never from a formula here.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from longitude.attention.operation import attend
from longitude.positions.base import Drift, Encoding, OffsetBias, OffsetVectors, PairBias
from longitude.positions.bias import FORBIDDEN
from longitude.positions.buckets import T5Bias, t5_bucket
from longitude.positions.composed import Composed, compose
from longitude.positions.contextual import CoPE, PaTH
from longitude.positions.rotary import Rotary
from longitude.positions.scaling import rope_frequencies
from longitude.show.drawing import Drawing, Grid, Lines
from longitude.show.shape import Shape

DRAWERS: list[Callable[[Encoding, Shape], Iterator[Drawing]]] = []
"""In the order of the page."""
POINTS = 160
"""Of a curve over offsets, about."""
SEEDS = 3
"""Of random queries and keys."""


def drawer(function: Callable[[Encoding, Shape], Iterator[Drawing]]) -> Callable[[Encoding, Shape], Iterator[Drawing]]:
    """One kind of drawing, made for every encoding that it applies to."""
    DRAWERS.append(function)
    return function


@torch.no_grad()
def drawings(encoding: Encoding, shape: Shape) -> list[Drawing]:
    """All that is drawn of an encoding, its parts one after the other.

    Args:
        encoding: Built for the shape, in float64.
        shape: Of the attention that it is drawn in.

    Returns:
        Drawings with names of their own.
    """
    members = list(encoding) if isinstance(encoding, Composed) else [encoding]
    found = [drawing for member in members for draw in DRAWERS if draw is not weights for drawing in draw(member, shape)]
    return [*found, *weights(encoding, shape)]


def offsets_of(length: int, also: tuple[int, ...] = ()) -> np.ndarray:
    """Offsets from 0 to below the length, close together where they are small."""
    spread = np.geomspace(1, length, POINTS).astype(int) - 1
    return np.unique([*spread, *(each for each in also if 0 <= each < length)])


# ---- at the input ----------------------------------------------------------------------------------------------------
@drawer
def table(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """What is added to each token."""
    if not encoding.at_input:
        return
    length = min(shape.length, encoding.max_length or shape.length)
    shown = min(length, 128)
    added = encoding.embed(torch.zeros(1, length, shape.dim, dtype=torch.float64), torch.arange(length)[None])[0]
    yield Grid(
        name="table",
        title=f"What is added to the token at each position, the first {shown}",
        caption="A row for each position, a column for each dimension of the token."
        + (" Numbers as they are before training, from seed 0." if encoding.learned else ""),
        x="dimension",
        y="position",
        values=added[:shown].numpy(),
        rows=[str(position) for position in range(shown)],
        columns=range(shape.dim),
    )
    unit = added / added.norm(dim=-1, keepdim=True)
    far = length - 1
    offsets = offsets_of(length)
    cosine = (unit[far - torch.from_numpy(offsets)] * unit[far]).sum(-1).numpy()
    yield Lines(
        name="codes",
        title=f"How alike the codes of two positions are: that of {far} and one so many before it",
        caption="The cosine of what is added at both. Near positions are told apart by small differences.",
        x="offset (query - key)",
        y="cosine",
        lines={"cosine": (offsets, cosine)},
        log_x=True,
    )


# ---- rotations -------------------------------------------------------------------------------------------------------
@drawer
def wavelengths(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Positions of one full rotation of each rotary pair, before and after its scheme."""
    if not isinstance(encoding, Rotary) or encoding.axes > 1:
        return
    now = 2 * math.pi / encoding.frequencies().inverse
    lines = {"wavelength": now}
    trained = getattr(encoding.scaling, "original_max_length", None)
    if encoding.scaling is not None:
        same = encoding.head_dim, encoding.base, None, encoding.rotary_dim, None, encoding.proportion
        before = 2 * math.pi / rope_frequencies(*same).inverse
        lines = {"without the scheme": before, encoding.scaling.name: now}
    pairs = np.arange(len(now))
    yield Lines(
        name="wavelengths",
        title="Positions of one full rotation, by pair",
        caption="Pairs whose wavelength is above the trained length never finished a rotation in training: beyond it they meet angles "
        "that are new.",
        x="rotary pair",
        y="positions",
        lines={name: (pairs, values.double().numpy()) for name, values in lines.items()},
        log_y=True,
        levels={"trained length": trained} if trained else {f"length {shape.length}": shape.length},
    )


@drawer
def rotated_scores(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Scores of a rotated query and key against their offset: they depend on both vectors."""
    if not encoding.overrides("keys") or encoding.axes > 1:
        return
    offsets, dim = offsets_of(shape.length), shape.head_dim
    generator = torch.Generator().manual_seed(0)
    alike = torch.ones(1, dim, dtype=torch.float64)
    draws = {"q = k, all dimensions alike": (alike, alike)}
    for seed in range(SEEDS):
        q, k = torch.randn(2, 1, dim, generator=generator, dtype=torch.float64)
        draws[f"random q and k, {seed + 1}"] = q, k
    newest = shape.length - 1
    lines = {}
    for name, (q, k) in draws.items():
        keys = encoding.rotate_keys(k.expand(len(offsets), dim), newest - torch.from_numpy(offsets))
        scores = keys @ encoding.rotate_queries(q, torch.tensor([newest]))[0] / (q.norm() * k.norm())
        lines[name] = offsets, scores.numpy()
    yield Lines(
        name="scores",
        title="Score of one query and one key, by offset",
        caption="q.k after rotation, over the product of their lengths. It falls with distance for vectors whose dimensions are all alike, "
        "and not in general: which offset a head prefers is learned in its queries and keys.",
        x="offset (query - key)",
        y="cosine of q and k",
        lines=lines,
        log_x=True,
    )


# ---- biases ----------------------------------------------------------------------------------------------------------
@drawer
def bias(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """What is added to scores, where positions alone decide it."""
    terms = [] if encoding.reads_tokens else encoding.terms({})
    if not terms or not all(isinstance(term, OffsetBias | PairBias) for term in terms):
        return
    newest, offsets = shape.length - 1, offsets_of(shape.length)
    values = encoding.bias(torch.tensor([newest]), newest - torch.from_numpy(offsets))[:, 0].numpy()
    values = np.where(values > FORBIDDEN, values, np.nan)
    started = " Its numbers are learned; these are from before training, seed 0." if encoding.learned else ""
    heads = [f"head {head + 1}" for head in range(len(values))]
    yield Lines(
        name="bias",
        title="What each head adds to the score of a key, by offset",
        caption=f"Before softmax, for the query at position {newest}: one unit less makes a weight e = 2.72 times smaller.{started}",
        x="offset (query - key)",
        y="bias",
        lines={head: (offsets, line) for head, line in zip(heads, values, strict=True)},
        log_x=True,
    )
    near = min(shape.length, 256)
    steps = torch.arange(near)
    dense = encoding.bias(torch.tensor([newest]), newest - steps)[:, 0].numpy()
    yield Grid(
        name="bias-by-head",
        title=f"The same for the nearest {near} keys",
        caption="A row for each head, a column for each offset.",
        x="offset (query - key)",
        y="head",
        values=np.where(dense > FORBIDDEN, dense, np.nan),
        rows=heads,
        columns=steps.tolist(),
    )


@drawer
def buckets(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """T5's buckets."""
    if not isinstance(encoding, T5Bias):
        return
    length = max(shape.length, 2 * encoding.max_distance)
    offsets = np.arange(-length + 1 if encoding.bidirectional else 0, length)
    found = t5_bucket(torch.from_numpy(offsets), encoding.num_buckets, encoding.max_distance, encoding.bidirectional)
    yield Lines(
        name="buckets",
        title=f"Which of the {encoding.num_buckets} learned numbers an offset reads",
        caption=f"The nearest offsets have one each; the others share logarithmic buckets, and all from {encoding.max_distance} on share the "
        "last: longer contexts have nothing new to read.",
        x="offset (query - key)",
        y="bucket",
        lines={"bucket": (offsets, found.numpy())},
        log_x=not encoding.bidirectional,
        marks={"max_distance": encoding.max_distance},
    )


@drawer
def vectors(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Scores that vectors per offset bring, for random queries."""
    terms = [] if encoding.reads_tokens else encoding.terms({})
    for term in terms:
        if not isinstance(term, OffsetVectors):
            continue
        offsets = offsets_of(shape.length)
        keys = term.keys(torch.from_numpy(offsets))
        keys = keys if keys.dim() == 2 else keys[0]  # those of the first head
        generator = torch.Generator().manual_seed(0)
        lines = {}
        for seed in range(SEEDS):
            query = torch.randn(shape.head_dim, generator=generator, dtype=torch.float64)
            lines[f"random query {seed + 1}"] = offsets, (keys @ query * shape.head_dim**-0.5).numpy()
        yield Lines(
            name="vectors",
            title="What the vector of an offset adds to the score, for three random queries",
            caption="scale q . K[offset], of the first head: the query decides which offsets it prefers."
            " The vectors are learned; these are from before training, seed 0.",
            x="offset (query - key)",
            y="added to the score",
            lines=lines,
            log_x=True,
            marks={} if term.reach is None else {"last offset of its own": term.reach},
        )


# ---- content ---------------------------------------------------------------------------------------------------------
@drawer
def gates(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """What gates that read tokens forget, for random tokens."""
    if not encoding.reads_tokens or isinstance(encoding, PaTH):
        return
    columns = encoding.context(shape.tokens())[0]
    for term in encoding.terms(columns):
        if isinstance(term, Drift):
            level = term.level[0].double()
            offsets = np.arange(shape.length)
            lost = (level[:, -1:] - level).flip(-1).numpy()
            yield Lines(
                name="gates",
                title="What each head forgets of a key, by offset, for random tokens",
                caption="The sum of ln f over the tokens between key and query, added to the score. Each token decides f, so that other tokens "
                "give other curves; these come from seed 0, before training.",
                x="offset (query - key)",
                y="added to the score",
                lines={f"head {head + 1}": (offsets, line) for head, line in enumerate(lost)},
                log_x=True,
            )


@drawer
def reflections(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """PaTH: how strongly each token reflects, and what remains of the score of one key as tokens go by."""
    if not isinstance(encoding, PaTH):
        return
    length = min(shape.length, 128)
    columns = encoding.context(shape.tokens()[:, :length])[0]
    w, strength = columns["reflection"][0].double(), columns["strength"][0].double()
    yield Grid(
        name="reflections",
        title="How strongly each token changes the keys before it",
        caption="b of H = I - b w w': 0 leaves a key as it is, 1 takes the direction w out of it, 2 reflects it. Random tokens of seed 0, before training.",
        x="token",
        y="head",
        values=strength.numpy(),
        rows=[f"head {head + 1}" for head in range(len(strength))],
        columns=range(length),
    )
    generator = torch.Generator().manual_seed(0)
    lines = {}
    for seed in range(SEEDS):
        key = torch.nn.functional.normalize(torch.randn(shape.head_dim, generator=generator, dtype=torch.float64), dim=0)
        carried, cosines = key.clone(), [1.0]
        for t in range(1, length):
            carried = carried - strength[0, t] * w[0, t] * (w[0, t] @ carried)
            cosines.append(float(key @ carried))
        lines[f"random key {seed + 1}"] = np.arange(length), np.array(cosines)
    yield Lines(
        name="path",
        title="A key along the path of tokens after it, against itself at first",
        caption="q.k for a query equal to the key, after the reflections of all tokens between them, in the first head.",
        x="tokens between key and query",
        y="cosine",
        lines=lines,
        log_x=True,
    )


@drawer
def counted(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """CoPE: positions that its gates count."""
    if not isinstance(encoding, CoPE):
        return
    generator = torch.Generator().manual_seed(0)
    offsets, lines = np.arange(min(shape.length, 512)), {}
    for name, mean in (("scores of mean -2", -2.0), ("mean 0", 0.0), ("mean 2", 2.0)):
        scores = mean + torch.randn(len(offsets), generator=generator, dtype=torch.float64)
        lines[name] = offsets, torch.sigmoid(scores).cumsum(0).clamp(max=encoding.max_position - 1).numpy()
    yield Lines(
        name="counted",
        title="The position that a query counts, by offset",
        caption="The sum of sigmoid(score) over the keys from here to the query, up to the last column of its table.",
        x="offset (query - key)",
        y="counted position",
        lines=lines,
        levels={"last column": encoding.max_position - 1},
    )


# ---- every encoding --------------------------------------------------------------------------------------------------
def weights(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Where the last query looks when content gives it no reason to look anywhere."""
    built = compose(encoding)
    if built.axes > 1 or (built.max_length or shape.length) < shape.length:
        return
    offsets = offsets_of(shape.length)
    x = shape.tokens()
    q = torch.ones(1, shape.heads, shape.length, shape.head_dim, dtype=torch.float64) / math.sqrt(shape.head_dim)
    if all(member.at_input for member in built):
        return  # it reaches the scores through the weights of a model
    found: Tensor = attend(
        q[:, :, -1:], q, q, encoding=built, context=built.context(x)[0] if built.reads_tokens else None, return_weights=True
    )[1]
    by_offset = found[0, :, 0].flip(-1)[:, torch.from_numpy(offsets)].numpy()
    yield Lines(
        name="weights",
        title="Attention of the last query to keys that are all alike, by offset",
        caption=f"Each head's weights over {shape.length} keys, where q and k are everywhere the same: what position alone prefers. The weight "
        f"without an encoding is 1/{shape.length}.",
        x="offset (query - key)",
        y="weight",
        lines={f"head {head + 1}": (offsets, line) for head, line in enumerate(by_offset)},
        log_x=True,
        levels={"all alike": 1 / shape.length},
    )
