"""Rotations and their drawings: wavelengths of the pairs, with and without scaling, and scores of a rotated query and key."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longitude.attention.operation import attend
from longitude.checkpoints.compare import frequencies_of
from longitude.drawings.build import Shape
from longitude.drawings.drawing import Drawing, Line, Lines, offsets_of
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.rotary import AxialRotary, Rotary, XPos
from longitude.positions.scaling import SCHEMES, Frequencies, Scaling
from longitude.positions.scaling.base import Follows
from longitude.registry import options_of

SEEDS = 3
"""Number of seeds for random queries and keys."""
FACTOR = 4
"""Multiple of the training length at which schemes are drawn."""
ALL = "all layers"
PLAIN = "no scaling"
"""Name of no scheme."""
NEW = 1e-9
"""Relative amount by which an angle must exceed the trained ones to count as new."""


class Stretched(NamedTuple):
    """Effect of a length on the pairs of a rotation under a scheme.

    Attributes:
        factor: The length over the trained one.
        scheme: Name of the scheme.
        unseen: The share of the rotating pairs that reach angles never seen in training.
        slowest: The longest wavelength, in positions.
        fastest: Factor by which the fastest pair rotates more slowly, which brings adjacent tokens closer together.
        temperature: Factor of cos and sin.
    """

    factor: int
    scheme: str
    unseen: float
    slowest: float
    fastest: float
    temperature: float


class Rotation(NamedTuple):
    """The rotation of some layers.

    Attributes:
        layers: Their type.
        rope: Its parameters.
        head_dim: Dimensions of a head.
        trained: Length that the weights were trained at, as far as the config says.
        window: Number of tokens that each of the layers sees at most; None if one of them sees all.
    """

    layers: str
    rope: RopeConfig
    head_dim: int
    trained: int
    window: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether no offset is longer in a longer text than in training."""
        return self.window is not None and self.window <= self.trained

    def frequencies(self, scaling: Scaling | None, length: int | None = None) -> Frequencies:
        return frequencies_of(self.rope._replace(scaling=scaling, sections=None), self.head_dim, length)

    @property
    def plain(self) -> Tensor:
        """Frequencies of the pairs that rotate, before any scheme."""
        theta = self.frequencies(None).inverse
        return theta[theta > 0]

    def after(self, scaling: Scaling | None, length: int) -> Tensor:
        """Frequencies of the same pairs under a scheme, at a length that the scheme may follow."""
        follows = isinstance(scaling, Follows) and scaling.follow != "declared"
        return self.frequencies(scaling, length if follows else None).inverse[: len(self.plain)]

    @property
    def seen(self) -> Tensor:
        """Frequencies of the same pairs in training: before its own scheme, if that names the length before it."""
        scheme = self.rope.scaling
        before = hasattr(scheme, "original_max_length") and getattr(scheme, "follow", "declared") == "declared"
        return self.plain if before else self.after(scheme, self.trained)

    @property
    def turns(self) -> Tensor:
        """Full rotations of each pair within the offsets of training."""
        return min(self.window or self.trained, self.trained) * self.seen / (2 * math.pi)

    @property
    def schemes(self) -> dict[str, Scaling]:
        """Its own scheme, by its name in drawings; empty without one."""
        return {} if self.rope.scaling is None else {f"its own {self.rope.scaling.name}": self.rope.scaling}

    def stretched(self, factor: int) -> list[Stretched]:
        """Effects of no scheme, its own, and every one defined by a factor; empty where offsets do not grow."""
        if self.bounded:
            return []
        before, effects = self.seen, []
        longest = min(self.window or math.inf, factor * self.trained) / self.trained
        for name, scheme in {PLAIN: None, **self.schemes, **schemes(factor, self.trained)}.items():
            try:
                after, temperature = (
                    self.after(scheme, factor * self.trained),
                    self.frequencies(scheme).attention_factor,
                )
            except ValueError:
                if scheme in (None, self.rope.scaling):
                    raise
                continue  # no rotation can have it, such as ntk-by-parts with a base of 1
            unseen = float(((self.turns < 1) & (longest * after > before * (1 + NEW))).double().mean())
            slowest, fastest = 2 * math.pi / float(after[-1]), float(before[0] / after[0])
            effects.append(Stretched(factor, name, unseen, slowest, fastest, temperature))
        return effects


def rotation_of(encoding: Encoding, length: int) -> Rotation | None:
    """The rotation of an encoding, trained at the length of its scheme or else at this one.

    None without one, and for RoPE-Mixed, whose frequencies are learned and differ by head and axis.
    """
    rotary = encoding.rope if isinstance(encoding, XPos) else encoding
    if not isinstance(rotary, Rotary) or getattr(rotary, "mixed", False):
        return None
    pairs = rotary.rotary_dim // (rotary.axes if isinstance(rotary, AxialRotary) else 1)  # those of one axis
    rope = RopeConfig(rotary.base, rotary.scaling, proportion=rotary.proportion)
    return Rotation(ALL, rope, pairs, getattr(rotary.scaling, "original_max_length", None) or length)


def schemes(factor: float, original: int) -> dict[str, Scaling]:
    """Registered schemes that a factor and a training length determine, by name."""
    made = {
        name: kind.extending(float(factor), original) for name, kind in SCHEMES.items() if "factor" in options_of(kind)
    }
    return {name: scheme for name, scheme in made.items() if scheme is not None}


# ---- curves ----------------------------------------------------------------------------------------------------------
def pairs_of(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """The wavelengths of an encoding's pairs."""
    if (rotation := rotation_of(encoding, shape.length)) is not None:
        yield wavelengths([rotation])


def wavelengths(rotations: Sequence[Rotation]) -> Lines:
    """Wavelengths of the pairs of each rotation, before and after its own scheme."""
    lines: dict[str, Line] = {}
    for rotation in rotations:
        which = f"{rotation.layers}, " if len(rotations) > 1 else ""
        for name, scheme in {PLAIN: None, **rotation.schemes}.items():
            theta = rotation.after(scheme, FACTOR * rotation.trained)
            lines[which + name] = np.arange(len(theta)), (2 * math.pi / theta).double().numpy()
    windows = {f"window of {rotation.layers}": rotation.window for rotation in rotations if rotation.window}
    return Lines(
        name="wavelengths",
        title="Positions of one full rotation, by pair",
        caption="A pair whose wavelength is above the training length saw only a part of its circle: beyond that length it "
        f"meets angles that are new.{_followed(rotations)}",
        x="rotary pair",
        y="positions",
        lines=lines,
        log_y=True,
        levels={"training length": rotations[0].trained, **windows},
    )


def _followed(rotations: Sequence[Rotation]) -> str:
    """A sentence for schemes whose frequencies depend on the length of the text."""
    follow = [r for r in rotations if isinstance(r.rope.scaling, Follows) and r.rope.scaling.follow != "declared"]
    return f" At {FACTOR * follow[0].trained} tokens, which the scheme follows." if follow else ""


def scores(encoding: Encoding, shape: Shape) -> Iterator[Drawing]:
    """Scores of a rotated query and key against their offset: they depend on both vectors."""
    if not encoding.overrides("keys"):
        return
    offsets, dim = offsets_of(shape.length), shape.head_dim
    generator = torch.Generator().manual_seed(0)
    alike = torch.ones(1, dim, dtype=torch.float64)
    vectors = {"q = k, all dimensions alike": (alike, alike)}
    for seed in range(SEEDS):
        q, k = torch.randn(2, 1, dim, generator=generator, dtype=torch.float64)
        vectors[f"random q and k, {seed + 1}"] = q, k
    yield Lines.by_offset(
        name="scores",
        title="Score of one query and one key, by offset",
        caption="q.k after rotation, over the product of their lengths before it. It falls with distance for vectors whose "
        "dimensions are all alike, and not in general: which offset a head prefers is learned in its queries and keys.",
        y="cosine of q and k",
        lines={name: (offsets, rotated(encoding, q, k, offsets, shape)) for name, (q, k) in vectors.items()},
        focus="q = k, all dimensions alike",
    )


def rotated(encoding: Encoding, q: Tensor, k: Tensor, offsets: np.ndarray, shape: Shape) -> np.ndarray:
    """Cosines of the first head's query at the newest position and a key [1, head_dim] at each offset before it."""
    newest = shape.length - 1
    if not compose(encoding).regions():
        q_heads, k_heads = (x.expand(1, shape.heads, n, -1) for x, n in ((q, 1), (k, len(offsets))))
        keys = encoding.rotate_keys(k_heads, newest - torch.from_numpy(offsets))[0, 0]
        scores = keys @ encoding.rotate_queries(q_heads, torch.tensor([newest]))[0, 0, 0]
    else:  # by attention to one key alone, whose logsumexp is its score
        one_key = (x.expand(len(offsets), 1, 1, -1) for x in (q, k, k))
        at_q, at_k = ((newest - torch.from_numpy(o))[:, None] for o in (0 * offsets, offsets))
        places: dict[str, Any] = {"q_positions": at_q, "k_positions": at_k}
        scores = attend(*one_key, encoding=encoding, **places, scale=1.0, return_lse=True)[1].flatten()
    return (scores / (q.norm() * k.norm())).numpy()
