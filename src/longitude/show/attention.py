"""Drawings of a model's attention weights: by distance, their entropy, and the weight of the first token."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.attention.mixer import Mixer
from longitude.checkpoints.declared import trained_length
from longitude.checkpoints.load import config_of, load
from longitude.checkpoints.positions import last_position
from longitude.errors import UsageError
from longitude.hf.stock import KEY
from longitude.measure.sources import read_text
from longitude.runs.memory import available_memory
from longitude.show.drawing import Drawing, Grid, Lines, evenly

SOME = 5
"""Number of layers with a line, at most."""
POINTS = 64
"""Points of a line over positions, about: each is a mean of neighbors."""


@dataclass(frozen=True)
class Layer:
    """Causal weights of a layer, over the queries of some texts; means over the texts.

    Attributes:
        weights: Mean weight at each distance of a key before the query [H, L], over the queries of the second half that
            have such a key.
        entropy: Entropy of each query's weights in bits [H, L].
        first: Weight of the first token [H, L].
        distance: Mean distance of what is attended to [H], over the second half of the queries.
    """

    weights: np.ndarray
    entropy: np.ndarray
    first: np.ndarray
    distance: np.ndarray

    @property
    def length(self) -> int:
        return self.entropy.shape[1]

    @property
    def within(self) -> np.ndarray:
        """The share [H, L] of the weights at a distance of 0, 1, 2, ... or less."""
        queries = self.length - self.length // 2
        having = np.minimum(queries, self.length - np.arange(self.length))  # few have a key far away
        by_distance = self.weights * having
        return (by_distance / by_distance.sum(1, keepdims=True)).cumsum(1)

    @property
    def octaves(self) -> np.ndarray:
        """The share [H, n] of the weights at a distance of 0, 1, 2 to 3, 4 to 7, ..."""
        longest = self.length - 1
        ends = 2 ** np.arange(1 + longest.bit_length()) - 1
        return np.diff(self.within[:, np.minimum(ends, longest)], axis=1, prepend=0.0)

    def late(self, values: np.ndarray) -> np.ndarray:
        """Means [H] of values [H, L] over the second half of the queries; values [H] are such means."""
        return values if values.ndim == 1 else values[:, self.length // 2 :].mean(1)


def layer_of(weights: Tensor) -> Layer:
    """The data to draw for causal weights [1, H, L, L]."""
    heads, length = weights[0].double(), weights.shape[-1]
    places, half = torch.arange(length), length // 2
    late = [places[max(half, distance) :] for distance in range(length)]  # queries with a key at this distance
    by_distance = [heads[:, queries, queries - distance].mean(1) for distance, queries in enumerate(late)]
    away = torch.einsum("hij,ij->hi", heads, (places[:, None] - places).double())[:, half:].mean(1)
    entropy = torch.special.entr(heads).sum(-1) / math.log(2)
    return Layer(torch.stack(by_distance, 1).numpy(), entropy.numpy(), heads[:, :, 0].numpy(), away.numpy())


@torch.no_grad()
def read(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Layer]:
    """Layers of a causal model by name; none for a model without weights of attention.

    Texts run one by one, because the size of weights is the square of the length.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]  # of our own models
    if mixers and not any(mixer.has_weights for mixer in mixers):
        return {}
    texts: list[dict[str, Layer]] = []
    for i in range(len(next(iter(inputs.values())))):
        out = model(**{name: x[i : i + 1] for name, x in inputs.items()}, output_attentions=True)
        weights = out.get("attentions") or ()
        pairs = zip(places(model, weights), weights, strict=True)
        texts.append({f"layer {place}": layer_of(x) for place, x in pairs if x is not None})
    names = [field.name for field in fields(Layer)]
    return {
        layer: Layer(**{name: np.mean([getattr(text[layer], name) for text in texts], 0) for name in names})
        for layer in texts[0]
    }


def places(model: Any, weights: Sequence[Any]) -> Sequence[int]:
    """Layer number, from 1, of each of the weights: many hybrids return only those of their attention layers."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    attending = [n for n, kind in enumerate(kinds, 1) if kind.endswith("attention") and not kind.startswith("linear")]
    return attending if len(attending) == len(weights) else range(1, len(weights) + 1)


# ---- a checkpoint ----------------------------------------------------------------------------------------------------
TOPICS = ("objects", "naming", "types", "specialnames")
"""Chapters of Python's own documentation, which every Python has: the text if none is given."""
LENGTH, TRIED = 256, 64
"""Tokens that are read by default, and those that tell how long that takes."""
WORTH_SAYING = 3.0
"""Seconds from which on the time is printed first."""


def of_checkpoint(path: str, text: Path | None, length: int | None, note: Callable[[str], object]) -> list[Drawing]:
    """Drawings of the attention of a checkpoint in one text, by its own eager attention.

    Args:
        path: Folder or name of a causal model of transformers.
        text: A file; None: a part of Python's documentation.
        length: Tokens of the text that are read; None: `LENGTH`, as far as the text goes.
        note: Called with the expected time, if it is long.

    Raises:
        UsageError: The text is shorter, the weights do not fit into memory, or the model gives none.
    """
    if length is not None and length < 2:
        raise UsageError("--length", "2 tokens or more", length)
    config = config_of(path)
    ours = config.model_type == "longitude" or getattr(config, KEY, None) is not None
    checkpoint = load(path, attn_implementation=None if ours else "eager")
    last = last_position(checkpoint.model)
    if length and last and length > last:
        raise UsageError("--length", f"at most {last}, where its table of positions ends", length, "take less")
    content = "\n".join(topics[name] for name in TOPICS) if text is None else content_of(text).decode()
    ids = checkpoint.tokenizer(content, return_tensors="pt", verbose=False).input_ids
    ids = ids[:, : length or min(LENGTH, last or LENGTH)]
    if ids.shape[1] < (length or 2):
        option, expected = f"--text {text}" if text else "--length without --text", f"at least {length or 2} tokens"
        raise UsageError(option, expected, ids.shape[1], "give a longer text or a shorter --length")
    part = checkpoint.config.get_text_config()
    heads, depth = getattr(part, "num_attention_heads", None) or 1, getattr(part, "num_hidden_layers", None) or 1
    need, free = 4 * heads * (depth + 6) * ids.shape[1] ** 2, available_memory("cpu")
    if need > free:
        needed = f"{need / 1e9:.1f} GB for the attention weights to fit into the {free / 1e9:.1f} GB that are free"
        raise UsageError("--length", needed, ids.shape[1], "take less")
    begun = time.perf_counter()
    layers = read(checkpoint.model, {"input_ids": ids[:, :TRIED]})
    if not layers:
        expected, got = "a model that gives attention weights", f"none from {type(checkpoint.model).__name__}"
        raise UsageError("--attention", expected, got, "leave --attention out")
    seconds = (time.perf_counter() - begun) * (ids.shape[1] / TRIED) ** 2
    if ids.shape[1] > TRIED and seconds > WORTH_SAYING:
        note(f"reading {ids.shape[1]} tokens with all attention weights takes about {seconds:.0f} s")
    layers = read(checkpoint.model, {"input_ids": ids})
    texts = f"{ids.shape[1]} tokens of {text.name if text else 'the documentation of Python'}"
    return [*grids(layers, texts), *by_distance(layers, texts), *by_length(layers, texts, trained_length(config))]


def content_of(text: Path) -> bytes:
    """Content of a text that a user names. ValueError if it cannot be read, or is not UTF-8."""
    return b"\n".join(content for _, content in read_text(str(text.expanduser()), "--text").documents)


# ---- by distance -----------------------------------------------------------------------------------------------------
def by_distance(layers: Mapping[str, Layer], texts: str) -> Iterator[Drawing]:
    """Mean weights by offset and receptive field of some layers; means of their heads.

    Args:
        layers: Result of `read`.
        texts: Description of their texts, such as "8 held-out windows of 64 tokens".
    """
    means = f"A mean of the heads, over the second half of {texts}."
    deepest, shown = [*layers][-1], {name: layers[name] for name in evenly([*layers], SOME)}
    yield Lines.by_offset(
        name="attention",
        title="Attention by distance, by layer",
        caption=f"The weight of the key this far before the query. {means}",
        y="weight",
        lines={name: (np.arange(layer.length), layer.weights.mean(0)) for name, layer in shown.items()},
        log_y=True,
        focus=deepest,
    )
    yield Lines(
        name="field",
        title="Receptive field: the share of attention within this many tokens, by layer",
        caption=means,
        x="tokens before the query",
        y="share of attention",
        lines={name: (np.arange(layer.length), layer.within.mean(0)) for name, layer in shown.items()},
        far=True,
        focus=deepest,
    )


# ---- heads and positions ---------------------------------------------------------------------------------------------
ABOUT = {
    "distance": (
        "Mean distance of what is attended to",
        "In tokens: a head with little is local, and a sink at the first token counts as far.",
        "tokens",
    ),
    "entropy": (
        "Entropy of attention",
        "In bits: with little, a few tokens have all of it. At most it is log2 of the tokens seen, all of them alike.",
        "entropy, bits",
    ),
    "first": (
        "Share of attention at the first token",
        "A head that finds nothing leaves its attention there: an attention sink.",
        "weight of the first token",
    ),
}
"""Attribute of `Layer` -> title, caption and unit."""


def by_length(layers: Mapping[str, Layer], texts: str, trained: int | None) -> Iterator[Drawing]:
    """Entropy of the weights and the weight of the first token, by the tokens that a query sees.

    Args:
        layers: Result of `read`.
        texts: Description of their texts.
        trained: The training length, which is marked.
    """
    seen = np.arange(1, next(iter(layers.values())).length + 1)
    for name in ("entropy", "first"):
        title, caption, unit = ABOUT[name]
        lines = {layer: getattr(layers[layer], name).mean(0) for layer in evenly([*layers], SOME)}
        deepest = [*lines][-1]
        lines |= {"all tokens alike, log2": np.log2(seen)} if name == "entropy" else {}
        yield Lines(
            name=name,
            title=f"{title}, by layer",
            caption=f"{caption} A mean of the heads, over {texts}.",
            x="tokens up to the query",
            y=unit,
            lines={layer: binned(seen, line) for layer, line in lines.items()},
            marks={"training length": trained} if trained else {},
            focus=deepest,
        )


def binned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """About `POINTS` means of neighbors."""
    parts = np.array_split(np.arange(len(x)), min(len(x), POINTS))
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def grids(layers: Mapping[str, Layer], texts: str) -> Iterator[Drawing]:
    """Mean distance, entropy, sink and shares by distance of every head of every layer."""
    if len({len(layer.distance) for layer in layers.values()}) > 1:
        return
    places: dict[str, Any] = {"x": "head", "y": "layer", "rows": [name.removeprefix("layer ") for name in layers]}
    heads, mean = len(next(iter(layers.values())).distance), f"Mean over the second half of {texts}."
    for name, (title, caption, _) in ABOUT.items():
        yield Grid(
            name=f"{name}-by-head",
            title=f"{title}, every head",
            caption=f"{caption} {mean}",
            values=np.stack([layer.late(getattr(layer, name)) for layer in layers.values()]),
            columns=range(1, heads + 1),
            **places,
        )
    octaves = np.stack([layer.octaves for layer in layers.values()])
    strips = np.concatenate([octaves, np.full((*octaves.shape[:2], 1), np.nan)], 2)  # a gap after each head
    yield Grid(
        name="distances",
        title="Attention by distance, every layer and head",
        caption="A strip for each head: from left to right the shares of its attention at a distance of 0, 1, 2 to 3, 4 to 7, "
        f"and so on by doubling, to {2 ** (octaves.shape[2] - 2)} and more. {mean}",
        values=strips.reshape(len(layers), -1)[:, :-1],
        columns=1 + np.arange(heads * strips.shape[2] - 1) / strips.shape[2],  # head 2 begins at 2
        **places,
    )
