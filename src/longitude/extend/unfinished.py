"""What a killed search or training leaves next to `out`, a folder for each question, so that the same command continues."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longitude.runs.store import key_of


def staged(out: Path) -> Path:
    """Where the extended checkpoint is until it is trained."""
    return out.with_name(f".{out.name}.extended")


def search_folder(out: Path) -> Path:
    """Where searches keep what they tried."""
    return out.with_name(f".{out.name}.search")


def training_folder(out: Path) -> Path:
    """Where trainings keep their newest checkpoint."""
    return out.with_name(f".{out.name}.training")


def folder_of(question: dict[str, Any], parent: Path) -> Path:
    """The folder of a question in `parent`: another length, text, model or option is another question."""
    return parent / key_of(question)


def digest_of_weights(model: nn.Module) -> str:
    """Of names, shapes, dtypes and about 1024 numbers of each tensor."""
    weights = sha256()
    for name, weight in model.state_dict().items():
        sample = weight.flatten()[:: max(1, weight.numel() // 1024)].float().cpu()
        weights.update(f"{name} {[*weight.shape]} {weight.dtype}".encode() + sample.numpy().tobytes())
    return weights.hexdigest()


def digest_of_tokens(*windows: Tensor) -> str:
    """Of the tokens that are read."""
    return sha256(torch.cat([window.cpu() for window in windows]).numpy().tobytes()).hexdigest()
