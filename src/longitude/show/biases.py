"""Biases by offset of a study's models, before and after training: what an encoding adds to the scores."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch

from longitude.positions.base import Encoding
from longitude.positions.bias import FORBIDDEN
from longitude.positions.composed import Composed
from longitude.runs.quiet import quiet
from longitude.show.drawing import Line, Lines, floor_of, middle
from longitude.study.results import Run, TrialResult
from longitude.study.train import build_model

POINTS = 120
"""Offsets of a line, about."""


def model_of(run: Run, trial: TrialResult) -> Any:
    """A trained model."""
    with quiet():
        return run.task.model.from_pretrained(trial.folder).eval()


def biases(run: Run, trial: TrialResult) -> Iterator[Lines]:
    """Drawings of the biases of the first and the last layer that has its own, before and after training."""
    number = count(1)
    before = _encodings(build_model(run.config, trial.label, trial.seed))
    after = _encodings(model_of(run, trial))
    for (stack, kind), layers in before.items():
        causal = run.task.stack == "decoder" or "decoder" in stack
        for place in sorted({0, len(layers) - 1}):
            first, trained = layers[place], after[stack, kind][place]
            lines = _lines(trained, run, causal)
            learns = any(True for _ in trained.parameters())
            if learns and not run.config.start:  # with --start, another study trained the initial weights
                lines |= {f"{head}, before": line for head, line in _lines(first, run, causal).items()}
            if not lines:
                continue
            layer = f"layer {place + 1} of {len(layers)}" if len(layers) > 1 else ""
            where = kind * (len({each for _, each in before}) > 1) + stack
            which = ", ".join(filter(None, (where, layer)))
            yield Lines.by_offset(
                name=f"bias-{next(number)}",
                title="What each head adds to the score of a key, by offset" + (f": {which}" if which else ""),
                caption=f"Before softmax, after training at length {run.train_length}, and before it where it is learned.",
                y="bias",
                lines=lines,
                marks={"training length": run.train_length},
                focus=middle({name: 0 for name in lines if not name.endswith("before")}),
                floor=floor_of(np.concatenate([np.asarray(y, float) for _, y in lines.values()])),
            )


def _encodings(model: Any) -> dict[tuple[str, str], list[Encoding]]:
    """(" in the encoder" or so, class) -> modules in the order of layers; one that all layers share is there once."""
    found = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, Encoding) and not isinstance(module, Composed):
            stack = next((f" in the {part}" for part in name.split(".") if part in ("encoder", "decoder")), "")
            found[stack, type(module).__name__].append(module)
    return found


@torch.no_grad()
def _lines(module: Encoding, run: Run, causal: bool) -> dict[str, Line]:
    """Biases for the last query of the longest window, a line for each head; none if they depend on tokens or do not exist."""
    longest = max(run.task.positions(length) for length in (run.lengths[-1], run.train_length))
    offsets = np.unique(np.geomspace(1, longest, POINTS).astype(int) - 1)
    if not causal:
        offsets = np.unique([*-offsets, *offsets])
    try:
        bias = module.bias(torch.tensor([longest - 1]), longest - 1 - torch.from_numpy(offsets))
    except ValueError:
        return {}
    lines = {}
    for head, values in enumerate(bias[:, 0].double().numpy(), 1):
        finite = np.isfinite(values) & (values > FORBIDDEN)  # a one-sided bias forbids the rest
        lines[f"head {head}"] = offsets[finite].tolist(), values[finite].round(4).tolist()
    return lines
