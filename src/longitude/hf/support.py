"""Check of Transformers models for support of our attention, with a clear error on creation."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers import PreTrainedModel

INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
"""Source text by which a Transformers layer looks up the attention function that attn_implementation names."""
BY_CLASS = re.compile(r"_ATTENTION_CLASSES\[")
"""Source text of layers that choose among attention classes of their model file instead."""
LAYER = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


@cache
def why_not(kind: type[PreTrainedModel]) -> str | None:
    """Why a class of models cannot run attention that is registered; None where nothing is known against it."""
    module = next((one.__module__ for one in kind.__mro__ if one.__module__.startswith("transformers.models.")), None)
    if module is None:  # a class that is not theirs
        return None
    try:
        code = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return None
    if BY_CLASS.search(code):
        return "it chooses among attention classes of its own"
    if LAYER.search(code) and INTERFACE not in code:
        return "it computes attention itself, and asks for no other"
    return None


def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of PreTrainedModel that takes attn_implementation: it knows names only, and this which models can run ours."""

    @wraps(method)
    def checked(self: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
        asked = arguments[0] if arguments else next(iter(named.values()), None)
        if asked == "longitude" and (why := why_not(type(self))) is not None:
            who = type(self).__name__
            raise ValueError(f"attn_implementation='longitude': {who} cannot use it, {why}; load it with 'eager'")
        return method(self, *arguments, **named)

    return checked
