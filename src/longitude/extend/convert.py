"""`convert`: weights of queries and keys from one rotary layout to the other, and a check that the model is unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.layout import FUSED_BY_HEAD, FUSED_BY_KIND, SEPARATE, Change, layout_changes
from longitude.checkpoints.load import differences, load, shapes_of
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.source import Source, open_source
from longitude.extend.weights import write_checkpoint
from longitude.positions.layouts import Layout
from longitude.positions.rotation import RotaryTable, apply_rotary
from longitude.runs.quiet import quiet

CLOSE = 1e-4
"""Largest difference of logits that count as equal, relative to their spread: float32 sums in another order stay below."""
TOKENS = 64
ROTATION = "apply_rotary_pos_emb"
"""Name of the function in Transformers model files that rotates queries and keys."""


@dataclass(frozen=True)
class Parity:
    """Differences of logits before and after a conversion, relative to the spread of the logits.

    Attributes:
        error: Difference between the converted weights and the original weights, each with the rotation of its layout.
        wrong_rotation: Difference between the original weights with the wrong and with the right rotation.
        native: The layout in which transformers rotates this model.
        notes: Remarks on tensors that were copied and that the model does not read.
    """

    error: float
    wrong_rotation: float
    native: Layout
    notes: tuple[str, ...] = ()


def convert(model: str | Path, to: Layout, out: Path | None = None, *, allow_pickle: bool = False) -> Parity:
    """Permute the weights of queries and keys into another rotary layout; with that rotation the model is unchanged.

    Args:
        model: Folder of a Hugging Face checkpoint, or a name on the hub; weights in safetensors.
        to: The new layout, "half" or "interleaved"; the weights must be in the other one.
        out: Folder of the new checkpoint, written whole or not at all; None: check only.
        allow_pickle: Read a checkpoint that has pickled weights (which cannot be converted).

    Returns:
        The differences of the logits, and the layout that transformers assumes for the model.

    Raises:
        ValueError: For a model with unknown weights of queries and keys, or if the logits change.
    """
    source = open_source(str(model), allow_pickle)
    changes = changes_of(source, to)
    parity = compare(source, changes, to)
    if out is not None:
        write_checkpoint(source, out, changes)
    return parity


def changes_of(source: Source, to: str) -> dict[str, Change]:
    """Conversions by tensor name. ValueError for a model with unknown weights of queries and keys."""
    module, config = rotary_of(source.skeleton), source.config
    if module is None:
        raise ValueError(f"--convert-layout: {source.name} has no rotary parameters, and no layout")
    if source.pickled:
        raise ValueError("--convert-layout: expected weights in safetensors, got a pickle; save it as such first")
    if source.quantization is not None:
        raise ValueError(f"--convert-layout: the weights of {source.name} are quantized; convert the original weights")
    widths = {2 * len(x) for name, x in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    if len(widths) != 1:
        raise ValueError(f"--convert-layout: expected heads of one size, got rotary dimensions {sorted(widths)}")
    names = [name for shard in source.shards for name in shapes_of(shard)]
    if not (changes := layout_changes(names, config, head_dim_of(config), widths.pop(), to)):
        raise ValueError(
            f"--convert-layout: expected weights named {', '.join(SEPARATE)}, {FUSED_BY_KIND} or GPT-NeoX's "
            f"{FUSED_BY_HEAD}, got none in {source.name} ({config.model_type})"
        )
    return changes


# ---- parity ----------------------------------------------------------------------------------------------------------
def compare(source: Source, changes: Mapping[str, Change], to: Layout) -> Parity:
    """Both models on the same random tokens, in float32. ValueError unless their logits agree."""
    model = load(source.folder, dtype="float32", tokenizer=False).model
    other: Layout = "interleaved" if to == "half" else "half"
    length = min(TOKENS, source.declared or TOKENS)
    ids = torch.randint(0, source.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))

    def logits() -> Tensor:
        with torch.inference_mode(), quiet():
            return model(input_ids=ids, use_cache=False).logits

    plain = logits()
    with rotating_in(model, other):
        before = logits()
    with rotating_in(model, to):
        wrong = logits()
    spread = float(before.std())

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max()) / spread

    state, prefix = model.state_dict(), f"{model.base_model_prefix}."
    with torch.no_grad():
        for name, change in changes.items():
            tensor = state.get(name, state.get(prefix + name))
            if tensor is None:
                raise ValueError(f"--convert-layout: the model has no tensor {name}; it cannot be checked")
            tensor.copy_(change(tensor.clone()))
    with rotating_in(model, to):
        error = distance(logits(), before)
    native = to if distance(plain, wrong) < distance(plain, before) else other
    if min(distance(plain, wrong), distance(plain, before)) > CLOSE:
        raise ValueError(f"--convert-layout: {source.name} rotates neither half nor interleaved; nothing was converted")
    if not error <= CLOSE:
        apart = f"{error:.1e} of their spread apart"
        raise ValueError(f"--convert-layout: the converted weights give other logits, {apart}; nothing was written")
    notes = differences(model, source.unread)[1]
    return Parity(
        error, distance(wrong, before), native, tuple(f"{each}: they are copied as they are." for each in notes)
    )


@contextmanager
def rotating_in(model: nn.Module, layout: str) -> Iterator[None]:
    """Context in which the model rotates by its angles in this layout. ValueError if its rotation cannot be replaced."""
    files = [sys.modules[name] for name in sorted({type(m).__module__ for m in model.modules()})]
    calls = 0

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        width = cos.shape[-1]
        halves = torch.equal(cos[..., : width // 2], cos[..., width // 2 :])
        pairs = slice(None, width // 2) if halves else slice(None, None, 2)
        table = RotaryTable(cos[..., pairs].unsqueeze(1).float(), sin[..., pairs].unsqueeze(1).float())
        return apply_rotary(q, table, layout), apply_rotary(k, table, layout)

    originals = {file: getattr(file, ROTATION) for file in files if hasattr(file, ROTATION)}
    try:
        for file in originals:
            setattr(file, ROTATION, rotate)
        yield
    finally:
        for file, original in originals.items():
            setattr(file, ROTATION, original)
    if not calls:
        raise ValueError(
            f"--convert-layout: {type(model).__name__}'s rotation cannot be replaced, and nothing be checked"
        )
