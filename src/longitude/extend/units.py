"""Store of units next to `out` for the results of an extension, so that the same command continues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from longitude.runs.files import LOCK, lock, make_folder, opened, require_plain
from longitude.runs.store import Store

TRAINING = "training"
"""Before a hyphen and a key: the folder of a training's saved states."""
SAMPLE = "sample"
"""The kind of units that store how fast this machine is: not worth keeping alone."""


def work_of(out: Path) -> Path:
    """The folder of intermediate results for `out`, until `out` exists."""
    return out.with_name(f".{out.name}.work")


@contextmanager
def working(out: Path) -> Iterator[Store]:
    """The store of intermediate results for `out`. The last process removes it, unless the same command can continue it."""
    folder, kept = work_of(out), True
    made = [path for path in out.parents if not path.exists()]
    make_folder(folder)
    require_plain(folder)  # a link would lead what is written or removed elsewhere
    store = Store(folder)
    try:
        with opened(folder) as descriptor:
            lock(descriptor, shared=True)
            # Another process may have finished since the caller looked, and have removed what it had computed.
            if out.exists():
                raise ValueError(f"--out {out} was created meanwhile, and is not overwritten; choose another --out")
            yield store
        kept = False
    except ValueError:  # the same command would fail again: only finished results are of use
        finished = [*store.units.glob("[!.]*"), *folder.glob(f"{TRAINING}-*")]
        kept = any(not path.name.startswith(SAMPLE) for path in finished)
        raise
    except BaseException:
        kept = any(path.is_file() and path.name != LOCK for path in folder.rglob("*"))
        raise
    finally:
        if not kept or out.exists():
            # Our shared lock is gone by now: of two processes that end at once, one gets the folder.
            with suppress(BlockingIOError, FileNotFoundError), opened(folder) as descriptor:
                lock(descriptor)
                shutil.rmtree(folder)
                for parent in made:
                    if not any(parent.iterdir()):
                        parent.rmdir()


def digest_of_weights(model: nn.Module) -> str:
    """A hash of names, shapes, dtypes and about 1024 numbers of each tensor."""
    weights = sha256()
    for name, weight in model.state_dict().items():
        sample = weight.flatten()[:: max(1, weight.numel() // 1024)].float().cpu()
        weights.update(f"{name} {[*weight.shape]} {weight.dtype}".encode() + sample.numpy().tobytes())
    return weights.hexdigest()


def digest_of_tokens(*windows: Tensor) -> str:
    """A hash of the tokens that are read."""
    return sha256(torch.cat([window.cpu() for window in windows]).numpy().tobytes()).hexdigest()
