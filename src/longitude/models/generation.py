"""What generate() asks before it writes anything."""

from __future__ import annotations

from typing import Any


def require_assistant(assistant: Any) -> None:
    """ValueError for an assistant whose guesses could not be taken back from its own cache: transformers asks only the model
    itself, and the assistant's cache would refuse in the middle of a text.
    """
    if getattr(assistant, "_is_stateful", False):
        raise ValueError(
            f"assistant_model: expected one whose cache can take tokens back, got a {type(assistant).__name__} with a state that "
            "runs along the tokens; use attention, and an encoding that carries none, in it"
        )
