"""The processes of `torchrun` or `accelerate launch`, from environment variables. Importing this does not load torch."""

import os
from datetime import timedelta

WAIT = timedelta(hours=24)
"""How long processes wait for the first one, which may search and measure before they train."""


def launched() -> bool:
    """Whether a launcher started this process, perhaps with others."""
    return int(os.environ.get("LOCAL_RANK", "-1")) >= 0


def processes() -> int:
    """Number of processes that the launcher started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1


def is_first_process() -> bool:
    """Whether this process writes: the only one, or the first of those that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0
