"""Drawings of mixers: the keys of a query, and the reach of a token."""

from collections.abc import Iterator

import numpy as np
import torch

from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.attention.masks import Causal
from longitude.attention.mixer import Mixer, MixerInputs
from longitude.drawings.build import Shape
from longitude.drawings.drawing import Drawing, Grid, Lines, evenly

QUERIES, KEYS = 36, 72
"""Approximate numbers of queries and keys in a grid."""
LEAST = 1e-8
"""Smallest influence that is drawn, relative to the largest."""


def drawings(mixer: Mixer, shape: Shape) -> list[Drawing]:
    """All drawings of a mixer.

    Args:
        mixer: Built for the shape, in float64.
        shape: Sizes of the layer.
    """
    return [drawing for draw in (keys, influence) for drawing in draw(mixer, shape)]


def keys(mixer: Mixer, shape: Shape) -> Iterator[Drawing]:
    """Draw the visible keys of each query, if the mixer has a mask of its own."""
    if not isinstance(mixer, MultiHeadAttention) or type(mixer).mask_of is MultiHeadAttention.mask_of:
        return
    mask = mixer.mask_of(MixerInputs(Causal()))
    reach = mask.reach[1]
    span = min(shape.length, KEYS if reach is not None and reach < KEYS // 2 else 2 * shape.length)
    queries, columns = evenly(range(span), QUERIES), evenly(range(span), KEYS)
    values = mask.allowed(torch.tensor(queries), torch.arange(span)).double().numpy()
    yield Grid(
        name="keys",
        title="Which keys each query attends to",
        caption=f"Full: attends to it. Empty: the future. A cache keeps {mixer.growth} for N tokens.",
        x="key",
        y="query",
        values=values[:, columns],
        rows=[str(query) for query in queries],
        columns=columns,
        floor=0.0,
    )


def influence(mixer: Mixer, shape: Shape) -> Iterator[Drawing]:
    """Draw the influence of each earlier token on the newest output."""
    x = shape.tokens().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    out = mixer(x)[0, -1] @ torch.randn(shape.dim, generator=generator, dtype=torch.float64)
    [gradient] = torch.autograd.grad(out, x)
    size = gradient[0].norm(dim=-1).flip(0).numpy()
    share = size / size.max()
    yield Lines.by_offset(
        name="influence",
        title="How far a change of one token reaches, by offset",
        caption="The length of the newest output's gradient, over the greatest, for one random direction of the output. Random "
        "tokens and first weights, of seed 0.",
        y="share of the greatest",
        lines={"influence": (np.arange(shape.length), np.where(share > LEAST, share, np.nan))},
        log_y=True,
    )
