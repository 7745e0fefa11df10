"""Keep and resume a training with Hugging Face's Trainer: its sealed checkpoints, and a log of losses.

The Trainer saves a checkpoint file by file. A checkpoint is complete if it has `COMPLETE`, which is written last. Incomplete
checkpoints, left by a killed process, are removed when the training continues.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from longitude.runs.files import (
    COMPLETE,
    append_json,
    checksums,
    cut_json_lines,
    flush,
    is_as_sealed,
    read_json_lines,
    write_json,
)

LOSSES = "losses.jsonl"


def seal(checkpoint: Path) -> None:
    """Mark a checkpoint as complete: flush all its files to the disk, then write `COMPLETE` with their checksums."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            flush(path)
    write_json(checkpoint / COMPLETE, checksums(checkpoint))


def newest(folder: Path, logged: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint with all its steps in the log of losses, and a message for each removed checkpoint."""
    messages = []
    for step, checkpoint in sorted(_checkpoints(folder), reverse=True):
        reason = f"losses are logged to step {logged} only" if step > logged else "it was not finished"
        if step <= logged and (checkpoint / COMPLETE).exists():
            if is_as_sealed(checkpoint):
                return checkpoint, messages
            reason = "its files were damaged after it was saved"
        messages.append(f"dropped {checkpoint.name}: {reason}")
        shutil.rmtree(checkpoint)
    return None, messages


def drop_unfinished(folder: Path) -> None:
    """Remove incomplete checkpoints, from which no training can continue, to free their space."""
    for _, checkpoint in _checkpoints(folder):
        if not (checkpoint / COMPLETE).exists():
            shutil.rmtree(checkpoint)


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    paths = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return [(step_of(path), path) for path in paths]


class LossLog:
    """losses.jsonl: one line per step, appended; `cut` removes later steps."""

    def __init__(self, path: Path):
        self.path = path

    def steps(self) -> int:
        """The number of steps 1, 2, ... up to the first that is missing, half-written or damaged."""
        last = 0
        for entry in read_json_lines(self.path):
            if not isinstance(entry, dict) or entry.get("step") != last + 1:
                break
            last += 1
        return last

    def cut(self, step: int) -> None:
        """Keep the entries up to and including `step`."""
        cut_json_lines(self.path, step)

    def append(self, entry: dict[str, Any]) -> None:
        append_json(self.path, entry)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a training that has ended from the Trainer's folder, except the Trainer's state."""
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        os.replace(state, folder / state.name)
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
