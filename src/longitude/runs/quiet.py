"""Silence transformers and the hub, here only: Longitude itself reports what matters about a checkpoint."""

import logging as python
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import logging as hub
from transformers import GenerationConfig
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Context without log lines and progress bars of transformers, accelerate and the hub; settings are restored."""
    level, hub_level, bar = logging.get_verbosity(), hub.get_verbosity(), logging.is_progress_bar_enabled()
    placing = python.getLogger("accelerate.big_modeling")
    of_placing = placing.level
    placing.setLevel(python.CRITICAL)
    logging.set_verbosity(python.CRITICAL)
    hub.set_verbosity(python.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        placing.setLevel(of_placing)
        logging.set_verbosity(level)
        hub.set_verbosity(hub_level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def greedy(model: Any, **options: Any) -> Iterator[None]:
    """generate() is greedy, silent, and set by these options alone: a checkpoint's penalties and lengths are not part of it."""
    settings = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, **options)
    try:
        with quiet():
            yield
    finally:
        model.generation_config = settings
