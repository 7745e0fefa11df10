"""How a killed training resumes: checkpoints that are complete or dropped, and the log of losses that goes with them.

Trainer saves a checkpoint file by file. One is complete when `COMPLETE` is there, which is written last; whatever else a killed
process left is removed when the run continues.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from longitude.runs.files import COMPLETE, atomic, checksums, flush, is_as_sealed, write_json


def seal(checkpoint: Path) -> None:
    """Declare a checkpoint complete: all its files are on the disk, and then its mark is, with their checksums."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            flush(path)
    write_json(checkpoint / COMPLETE, checksums(checkpoint))


def newest(folder: Path, logged: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint whose steps are all in the log of losses, and a message for each one removed."""
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
    """Remove the checkpoints that nothing can continue from, for the space that they take."""
    for _, checkpoint in _checkpoints(folder):
        if not (checkpoint / COMPLETE).exists():
            shutil.rmtree(checkpoint)


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    paths = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return [(step_of(path), path) for path in paths]


class LossLog:
    """losses.jsonl: one line per step, appended; opening it at a step cuts what came after."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """The entries of steps 1, 2, ... up to the first that is missing or half-written."""
        entries = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").split("\n"):
                try:
                    entry = json.loads(line)
                except ValueError:
                    break
                if not isinstance(entry, dict) or entry.get("step") != len(entries) + 1:
                    break
                entries.append(entry)
        return entries

    def cut(self, step: int) -> None:
        """Keep the entries up to and including `step`."""
        entries = self.read()[:step]
        with atomic(self.path) as unfinished:
            unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")

    def append(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def flush(self) -> None:
        with open(self.path, "a") as file:
            os.fsync(file.fileno())
