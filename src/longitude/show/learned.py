"""What the models of a study learned, drawn: biases before and after, attention by distance, how far it reaches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longitude.checkpoints.quiet import quiet
from longitude.errors import unknown
from longitude.show.drawing import Drawing, Lines, floor_of, middle
from longitude.study.data import StudyData
from longitude.study.pictures.biases import panels_of
from longitude.study.results import Run, TrialResult, read_run

TEXTS = 8
"""Windows of held-out text that attention is averaged over."""


def opened(path: Path, encoding: Sequence[str]) -> tuple[Run, dict[str, TrialResult]]:
    """A study, and of each label the first trial that is done.

    Args:
        path: Its folder.
        encoding: Labels; none: all.

    Raises:
        ValueError: For a label that it does not have, or whose model is not there, with what is missing.
    """
    run = read_run(path)
    for label in encoding:
        if label not in run.labels:
            raise unknown("label of --encoding", label, run.labels, f"{path}/study.json lists them.")
    done = {}
    for label in encoding or run.labels:
        trials = [trial for trial in run.of(label) if trial.status == "done"]
        if not trials:
            why = "; ".join(f"seed {trial.seed}: {trial.status}" for trial in run.of(label))
            raise ValueError(
                f"{path} has no trained model of {label} ({why}); run the same `longitude study` again, it continues"
            )
        lost = [name for name in ("config.json", "model.safetensors") if not (trials[0].folder / name).exists()]
        if lost:
            raise ValueError(
                f"{trials[0].folder} holds no model of {label}: {' and '.join(lost)} missing; copy the cells of the study, too, "
                "or train it again with `longitude study`"
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
    """Of one trained model: its biases, and where its heads look in held-out text of this length."""
    with quiet():
        model = run.task.model.from_pretrained(trial.folder).eval()
    return [*biases(run, trial), *attention(model, windows(run, data, length))]


def biases(run: Run, trial: TrialResult) -> Iterator[Drawing]:
    """Biases by offset of the first and the last layer that has its own, before and after training."""
    for place, (title, points) in enumerate(panels_of(run, trial), 1):
        lines = {
            f"head {each['head']}" + (", before" if each["state"] == "before" else ""): (each["offset"], each["bias"])
            for each in sorted(points, key=lambda each: each["state"])
        }
        yield Lines(
            name=f"bias-{place}",
            title=f"What each head adds to the score of a key, by offset: {title}",
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
        longest = max(map(len, data.validation), default=run.train_length)
        raise ValueError(
            f"--length {length}: the held-out text of this study has windows of at most {longest}; leave it out"
        )
    examples = run.task.selection(run.config, data)
    batch = [examples[index] for index in range(min(TEXTS, len(examples)))]
    return {name: torch.stack([each[name] for each in batch]) for name in batch[0] if "labels" not in name}


@torch.no_grad()
def attention(model: Any, inputs: dict[str, Tensor]) -> Iterator[Drawing]:
    """Mean weights by offset, by layer and head, and within how many tokens they are."""
    try:
        out = model(**inputs, output_attentions=True)
    except ValueError:  # no mixer of it has weights
        return
    weights = getattr(out, "attentions", None) or getattr(out, "decoder_attentions", None) or ()
    found = {layer: by_offset(one) for layer, one in enumerate(weights, 1) if one is not None}
    if not found:
        return
    texts, length = next(one for one in weights if one is not None).shape[::3]
    where = f"Mean over the second half of {texts} held-out windows of {length} tokens."
    offsets = np.arange(length)
    for layer, mean in found.items():
        lines = {f"head {head}": (offsets, line) for head, line in enumerate(mean, 1)}
        yield Lines(
            name=f"attention-{layer}",
            title=f"Attention by offset, layer {layer}",
            caption=f"The weight of the key at this offset before the query. {where}",
            x="offset (query - key)",
            y="weight",
            lines=lines,
            log_x=True,
            focus=middle(lines),
        )
    within = {layer: (mean / mean.sum(1, keepdims=True)).cumsum(1) for layer, mean in found.items()}
    yield Lines(
        name="field",
        title="Receptive field: the share of attention within this many tokens, by layer",
        caption=f"The mean of the heads of a layer. {where}",
        x="tokens before the query",
        y="share of attention",
        lines={f"layer {layer}": (offsets, share.mean(0)) for layer, share in within.items()},
        log_x=True,
        focus=f"layer {max(within)}",
    )
    half = {f"layer {layer}": 1 + (share < 0.5).sum(1) for layer, share in within.items()}
    yield Lines(
        name="heads",
        title="Nearest tokens that hold half of a head's attention",
        caption=f"Few are a local head, many a global one; the query's own token is one of them. {where}",
        x="head",
        y="tokens",
        lines={layer: (np.arange(1, len(tokens) + 1), tokens) for layer, tokens in half.items()},
        log_y=True,
        focus=f"layer {max(within)}",
    )


def by_offset(weights: Tensor) -> np.ndarray:
    """Weights [B, H, L, L] -> means [H, L] at each offset from 0, over the queries of the second half that have it."""
    length = weights.shape[-1]
    mean = weights.double().mean(0)
    rows = torch.arange(length // 2, length)
    found = [mean[:, rows[rows >= d], rows[rows >= d] - d].mean(1) for d in range(length)]
    return torch.stack(found, 1).numpy()
