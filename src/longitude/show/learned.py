"""Drawings of a study's trained models: biases before and after training, attention by distance, and its reach."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.attention.mixer import Mixer
from longitude.checkpoints.quiet import quiet
from longitude.errors import unknown
from longitude.report.wording import named
from longitude.show.drawing import Drawing, Grid, Lines, floor_of, middle
from longitude.study.biases import panels_of
from longitude.study.data import StudyData
from longitude.study.results import Run, TrialResult, read_run

TEXTS = 8
"""Windows of held-out text that attention is averaged over."""
STACKS = {"": "attentions", "encoder, ": "encoder_attentions", "decoder, ": "decoder_attentions"}
"""Layers -> what a model returns their weights as."""


def opened(path: Path, encoding: Sequence[str]) -> tuple[Run, dict[str, TrialResult]]:
    """Open a study, and select the first completed trial of each label.

    Args:
        path: Folder of the study.
        encoding: Labels; none: all.

    Raises:
        ValueError: For a label that the study does not have, or for a missing model.
    """
    run = read_run(path)
    for label in encoding:
        if label not in run.labels:
            raise unknown("label of --encoding", label, run.labels, f"Those of {path}.")
    done = {}
    for label in encoding or run.labels:
        trials = [trial for trial in run.of(label) if trial.status == "done"]
        if not trials:
            why = "; ".join(f"seed {trial.seed}: {trial.status}" for trial in run.of(label))
            raise ValueError(
                f"{path} has no trained model of {named(label)} ({why}); run the same `longitude study` again, it continues"
            )
        lost = [name for name in ("config.json", "model.safetensors") if not (trials[0].folder / name).exists()]
        if lost:
            raise ValueError(
                f"{trials[0].folder} holds no model of {named(label)}: {' and '.join(lost)} missing; copy the units "
                "of the study, too, or train it again with `longitude study`"
            )
        done[label] = trials[0]
    return run, done


def facts(run: Run, trial: TrialResult) -> dict[str, Any]:
    """Plain data about a trained model."""
    return {
        "label": trial.label,
        "folder": str(trial.folder),
        "seed": trial.seed,
        "steps": run.steps(trial.label),
        "train_length": run.train_length,
        "parameters": trial.parameters,
    }


def words(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers."""
    yield "model", about["folder"]
    yield "trained", f"{about['steps']} steps at length {about['train_length']}, seed {about['seed']}"
    yield "parameters", f"{about['parameters']:,}" if about["parameters"] else "unknown"


def drawings(run: Run, trial: TrialResult, data: StudyData, length: int) -> list[Drawing]:
    """Drawings of a trained model: its biases, and the attention of its heads in held-out text of this length."""
    with quiet():
        model = run.task.model.from_pretrained(trial.folder).eval()
    return [*biases(run, trial), *attention(model, windows(run, data, length))]


def biases(run: Run, trial: TrialResult) -> Iterator[Drawing]:
    """Biases by offset of the first and the last layer that has its own, before and after training."""
    for place, (which, points) in enumerate(panels_of(run, trial), 1):
        lines = {
            f"head {each['head']}" + (", before" if each["state"] == "before" else ""): (each["offset"], each["bias"])
            for each in sorted(points, key=lambda each: each["state"])
        }
        yield Lines(
            name=f"bias-{place}",
            title="What each head adds to the score of a key, by offset" + (f": {which}" if which else ""),
            caption=f"Before softmax, after training at length {run.train_length}, and before it where it is learned.",
            x="offset (query - key)",
            y="bias",
            lines=lines,
            log_x=True,
            marks={"training length": run.train_length},
            focus=middle({name: 0 for name in lines if not name.endswith("before")}),
            floor=floor_of(np.concatenate([np.asarray(y, float) for _, y in lines.values()])),
        )


# ---- attention -------------------------------------------------------------------------------------------------------
def windows(run: Run, data: StudyData, length: int) -> dict[str, Tensor]:
    """Inputs of a batch of held-out windows. ValueError where no document is so long, or the task has one length alone."""
    texts = [text[:length] for text in data.validation if len(text) >= length][:TEXTS]
    if texts and run.task.stack == "decoder":
        return {"input_ids": torch.stack(texts).long()}
    if length != run.train_length:
        free = run.task.stack == "decoder" and data.validation
        there = (
            f"windows of at most {max(map(len, data.validation))}" if free else f"examples of {run.train_length} alone"
        )
        raise ValueError(f"--length {length}: what this study held out has {there}; leave it out")
    examples = run.task.selection(run.config, data)
    batch = [examples[index] for index in range(min(TEXTS, len(examples)))]
    read = [name for name in batch[0] if "labels" not in name or run.task.stack == "encoder-decoder"]  # targets, too
    return {name: torch.stack([each[name] for each in batch]) for name in read}


@torch.no_grad()
def attention(model: Any, inputs: dict[str, Tensor]) -> Iterator[Drawing]:
    """Mean weights by offset, by layer and head, and within how many tokens they are; of cross-attention by place."""
    if not any(module.has_weights for module in model.modules() if isinstance(module, Mixer)):
        return
    out = model(**inputs, output_attentions=True)
    yield from crossing(out.get("cross_attentions") or ())
    layers = {
        f"{stack}layer {place}": one
        for stack, name in STACKS.items()
        for place, one in enumerate(out.get(name) or (), 1)
        if one is not None
    }
    found = {layer: by_offset(one) for layer, one in layers.items()}
    where = {layer: _where(one) for layer, one in layers.items()}
    for layer, (offsets, mean) in found.items():
        lines = {f"head {head}": (offsets, line) for head, line in enumerate(mean, 1)}
        yield Lines(
            name="attention-" + layer.replace("layer ", "").replace(", ", "-"),
            title=f"Attention by offset, {layer}",
            caption="The weight of the key at this offset before the query"
            + (", after it where the offset is below 0. " if offsets[0] < 0 else ". ")
            + where[layer],
            x="offset (query - key)",
            y="weight",
            lines=lines,
            log_x=True,
            focus=middle(lines),
        )
    within = {layer: _within(*each) for layer, each in found.items()}
    every, last = " ".join(dict.fromkeys(where.values())), [*found][-1]
    yield Lines(
        name="field",
        title="Receptive field: the share of attention within this many tokens, by layer",
        caption=f"The mean of the heads of a layer. {every}",
        x="tokens before the query" + (" or after it" if any(offsets[0] < 0 for offsets, _ in found.values()) else ""),
        y="share of attention",
        lines={layer: (np.arange(share.shape[1]), share.mean(0)) for layer, share in within.items()},
        log_x=True,
        focus=last,
    )
    half = {layer: 1 + (share < 0.5).sum(1) for layer, share in within.items()}
    yield Lines(
        name="heads",
        title="Nearest tokens that hold half of a head's attention",
        caption=f"Few are a local head, many a global one; the query's own token is one of them. {every}",
        x="head",
        y="tokens",
        lines={layer: (np.arange(1, len(tokens) + 1), tokens) for layer, tokens in half.items()},
        log_y=True,
        focus=last,
    )


def crossing(layers: Sequence[Tensor]) -> Iterator[Grid]:
    """Cross-attention of each layer [B, H, L, S], by place in answer and source; no offset is defined between the two."""
    for place, weights in enumerate(layers, 1):
        mean = weights.double().mean((0, 1)).numpy()
        yield Grid(
            name=f"cross-{place}",
            title=f"Cross-attention by place, decoder, layer {place}",
            caption=f"Mean weight over the heads and {len(weights)} held-out examples; each row adds up to 1.",
            x="place in the source",
            y="place in the answer",
            values=mean,
            rows=[str(row) for row in range(1, len(mean) + 1)],
            columns=range(1, mean.shape[1] + 1),
            floor=0.0,
        )


def by_offset(weights: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Weights [B, H, L, L] -> (offsets [n], their mean weights [H, n]).

    Causal ones from offset 0, over the queries of the second half that have the key; others, over all queries that have it.
    """
    length, mean, both = weights.shape[-1], weights.double().mean(0), _both(weights)
    offsets, rows = range(1 - length if both else 0, length), torch.arange(0 if both else length // 2, length)
    have = {d: rows[(rows >= d) & (rows - d < length)] for d in offsets}
    return np.array(offsets), torch.stack([mean[:, own, own - d].mean(1) for d, own in have.items()], 1).numpy()


def _both(weights: Tensor) -> bool:
    """Whether queries attend to later keys, too."""
    return bool(weights.triu(1).any())


def _where(weights: Tensor) -> str:
    part = "all queries" if _both(weights) else "the second half"
    return f"Mean over {part} of {len(weights)} held-out windows of {weights.shape[-1]} tokens."


def _within(offsets: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The share [H, L] of the weights at a distance of 0, 1, 2, ... or less, on both sides."""
    by_distance = np.zeros((len(mean), offsets[-1] + 1))
    for offset, column in zip(np.abs(offsets), mean.T, strict=True):
        by_distance[:, offset] += column
    return (by_distance / by_distance.sum(1, keepdims=True)).cumsum(1)
