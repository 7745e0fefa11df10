"""Biases by offset, before and after training: what an encoding adds to the scores. `longitude show` draws them."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from longitude.checkpoints.quiet import quiet
from longitude.positions.base import Encoding
from longitude.positions.bias import FORBIDDEN
from longitude.positions.composed import Composed
from longitude.study.results import Run, TrialResult
from longitude.study.train import build_model

POINTS = 120
"""Offsets of a line, about."""


def panels_of(run: Run, trial: TrialResult) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(Where in the model, in words; lines of the trained model and of what its seed draws) of each panel."""
    before = _encodings(build_model(run.config, trial.label, trial.seed))
    with quiet():
        after = _encodings(run.task.model.from_pretrained(trial.folder))
    for kind, layers in before.items():
        causal = run.task.stack == "decoder" or "decoder" in kind[0]
        for place in sorted({0, len(layers) - 1}):
            fixed = not any(True for _ in after[kind][place].parameters())
            began = {} if run.config.start else {"before": layers}  # of --start, another study has it
            states = {"after": layers} if fixed else {**began, "after": after[kind]}
            points = [
                {"state": state, **point}
                for state, modules in states.items()
                for point in _lines(modules[place], run, causal)
            ]
            if points:
                words = kind[1] if len({kind for _, kind in before}) > 1 else ""
                layer = f"layer {place + 1} of {len(layers)}" if len(layers) > 1 else ""
                yield ", ".join(filter(None, (words + kind[0], layer))), points


def _encodings(model: Any) -> dict[tuple[str, str], list[Encoding]]:
    """(" in the encoder" or so, class) -> modules in the order of layers; one that all layers share is there once."""
    found = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, Encoding) and not isinstance(module, Composed):
            stack = next((f" in the {part}" for part in name.split(".") if part in ("encoder", "decoder")), "")
            found[stack, type(module).__name__].append(module)
    return found


@torch.no_grad()
def _lines(module: Encoding, run: Run, causal: bool) -> list[dict[str, Any]]:
    """Its bias for the last query of the longest window, a line for each head; none where tokens decide it, or it has none."""
    longest = max(run.task.positions(length) for length in (run.lengths[-1], run.train_length))
    offsets = np.unique(np.geomspace(1, longest, POINTS).astype(int) - 1)
    if not causal:
        offsets = np.unique([*-offsets, *offsets])
    try:
        bias = module.bias(torch.tensor([longest - 1]), longest - 1 - torch.from_numpy(offsets))
    except ValueError:
        return []
    drawn = []
    for head, values in enumerate(bias[:, 0].double().numpy(), 1):
        finite = np.isfinite(values) & (values > FORBIDDEN)  # a one-sided bias forbids the rest
        drawn.append({"head": head, "offset": offsets[finite].tolist(), "bias": values[finite].round(4).tolist()})
    return drawn
