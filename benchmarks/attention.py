"""Where trained models look, by length, and what decides it: rows for every model of a study of text.

    python benchmarks/attention.py RUN [--labels nope rope:base=72] [--texts 8] [--out FILE.json]

reach       At each length the study measured, means over layers, heads, the queries of the second half and --texts held-out
            windows: the mean distance of what is attended to, the share of the weights beyond the training length, the entropy
            of the weights in bits, and the weight of the first token (a sink).
scores      At the training length, the mean score (before the softmax) of keys at a distance, by octaves of the distance: of
            queries and keys as they are; and with both shuffled among the positions before the encoding acts, each by itself.
            What is left of a fall with distance then is due to the encoding and to the mean query and key, not to what stands
            where. Without biases. Of models before their training with --untrained.

Prints two tables, as docs/showing.md has them, and writes rows with their protocol, by default as
benchmarks/results/DATE-attention.json; claim 16 reads them.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from torch import Tensor

from fill_numbers import RESULTS
from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.errors import UsageError
from longitude.models import LongitudeForCausalLM
from longitude.positions.composed import Composed
from longitude.runs.files import write_json
from longitude.runs.machine import provenance
from longitude.runs.terminal import Progress
from longitude.study.results import Run, read_run
from longitude.study.tasks.base import task_for
from longitude.study.train import build_model

SHUFFLES = 16
"""Permutations of the queries and keys of a window."""


def windows(documents: list[Tensor], length: int, texts: int) -> Tensor:
    """Windows [texts, length], each from the middle of a document; fewer where fewer documents are as long."""
    long = [document for document in documents if len(document) >= length][:texts]
    middles = [(len(document) - length) // 2 for document in long]
    return torch.stack([document[at : at + length] for document, at in zip(long, middles, strict=True)])


@torch.no_grad()
def reach(model: Any, ids: Tensor, trained: int) -> dict[str, float]:
    """Means over the layers and texts of windows [B, L]; empty for a model without weights of attention."""
    if not any(mixer.has_weights for mixer in model.model.mixers):
        return {}
    passes = (model(input_ids=text[None], output_attentions=True) for text in ids)  # their size is L squared
    layers = [look(x[0].double(), trained) for one in passes for x in one.attentions if x is not None]
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}


def look(weights: Tensor, trained: int) -> dict[str, float]:
    """Means over heads and the queries of the second half, of causal weights [H, L, L]."""
    places = torch.arange(weights.shape[1])
    distance, late = places[:, None] - places, slice(weights.shape[1] // 2, None)
    of_queries = {
        "distance": (weights * distance).sum(-1),
        "beyond": (weights * (distance >= trained)).sum(-1),
        "entropy": torch.special.entr(weights).sum(-1) / math.log(2),
        "first": weights[:, :, 0],
    }
    return {name: float(values[:, late].mean()) for name, values in of_queries.items()}


@torch.no_grad()
def scores(model: Any, ids: Tensor) -> Iterator[dict[str, Any]]:
    """Mean score over heads, of each layer: for windows [B, L] a list [B, octaves], as they are and shuffled."""
    # A layer holds no encoding of its own: the model gives each the one of its block.
    blocks = zip(model.model.mixers, model.model.encoding_of_layer, strict=True)
    layers = [(mixer, encoding) for mixer, encoding in blocks if isinstance(mixer, MultiHeadAttention)]
    for layer, _ in layers:
        if layer.q_norm is not None or layer.short_conv:
            got = "QK-norm" if layer.q_norm is not None else "a short convolution"
            raise UsageError(
                "labels", "layers whose queries and keys are projections alone", got, "leave such a label out"
            )
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(place: int, name: str) -> Any:
        return lambda module, inputs, output: kept.__setitem__((place, name), output)

    hooks = [
        getattr(layer, name).register_forward_hook(keep(place, name))
        for place, (layer, _) in enumerate(layers)
        for name in ("q_proj", "k_proj")
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(0)
    for place, (layer, encoding) in enumerate(layers):
        q, k = (
            kept[place, name].double().unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj")
        )
        k = k.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
        yield {"layer": place + 1, "shuffled": False, "octaves": octaves(placed(layer, encoding, q, k))}
        orders = [[torch.randperm(ids.shape[1], generator=generator) for _ in range(2)] for _ in range(SHUFFLES)]
        mean = torch.stack([placed(layer, encoding, q[:, :, one], k[:, :, other]) for one, other in orders]).mean(0)
        yield {"layer": place + 1, "shuffled": True, "octaves": octaves(mean)}


def placed(layer: MultiHeadAttention, encoding: Composed, q: Tensor, k: Tensor) -> Tensor:
    """Products of queries and keys as the encoding turns them, a mean over heads [B, L, L]; without biases."""
    length = q.shape[2]
    if encoding.transforms:
        tables = encoding.prepare(torch.arange(length)[None], None, q.dtype)
        q, k = encoding.queries_and_keys(q, k, tables)
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    return (q @ k.transpose(-1, -2) * scale).mean(1)


def octaves(scores: Tensor) -> list[list[float]]:
    """Means [B, octaves] of scores [B, L, L] at distances 0, 1, 2 to 3, 4 to 7, ... before the query."""
    length, ends = scores.shape[-1], [0, 1]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    by_distance = torch.stack([scores.diagonal(-distance, -2, -1).mean(-1) for distance in range(length)], 1)
    return torch.stack([by_distance[:, low:high].mean(1) for low, high in pairwise(ends)], 1).tolist()


def rows(run: Run, labels: list[str], texts: int, untrained: bool = False) -> Iterator[dict[str, Any]]:
    task = task_for(run.config)
    documents = task.prepare(run.config).validation
    for label in labels:
        for trial in run.of(label):
            saved = None if untrained else LongitudeForCausalLM.from_pretrained(trial.folder)
            model = (saved or build_model(run.config, label, trial.seed)).eval()
            own = {"label": label, "seed": trial.seed}
            for length in [] if untrained else run.lengths:
                if means := reach(model, windows(documents, length, texts), run.train_length):
                    yield own | {"of": "reach", "length": length, **means}
            for each in scores(model, windows(documents, run.train_length, texts)):
                yield own | {"of": "scores", "length": run.train_length, **each}


def tables(found: list[dict[str, Any]]) -> tuple[str, str]:
    """Means over seeds, layers and windows: distance, share beyond, entropy and sink by length; scores by octave."""
    every = pd.DataFrame(found)
    near = every[every["of"] == "reach"]
    if len(near):
        near = near.pivot_table(index="label", columns="length", values=["distance", "beyond", "entropy", "first"])
    octaves = every[every["of"] == "scores"].groupby(["label", "shuffled"])["octaves"]
    falls = octaves.agg(lambda each: np.mean(np.concatenate(each.tolist()), 0)).apply(pd.Series)
    return near.round(3).to_string(), falls.round(2).to_string()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a study of text, with its models")
    parser.add_argument("--labels", nargs="*", help="some of its labels; by default all")
    parser.add_argument(
        "--untrained", action="store_true", help="the scores of its models before training, of a kept study, too"
    )
    parser.add_argument("--texts", type=int, default=8, help="held-out windows, each of another document")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-attention.json")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    run = read_run(options.run)
    found = []
    with Progress() as bar:
        for row in rows(run, options.labels or run.labels, options.texts, options.untrained):
            found.append(row)
            bar.update(f"{row['label']} seed {row['seed']}", len(found), None)
    steps = 0 if options.untrained else run.config.steps
    protocol = {"trained": run.train_length, "texts": options.texts, "shuffles": SHUFFLES, "steps": steps}
    whole = {"schema": 1, "made": str(date.today()), **provenance(), "protocol": protocol, "rows": found}
    write_json(options.out, whole)
    print(*tables(whole["rows"]), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
