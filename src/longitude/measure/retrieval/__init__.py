"""Retrieval by length: can a model still find and use what stands in its context? Passkey, needles, tracking, word counts.

`run` yields a row per length and depth; `TASKS` are the published tasks by name; `effective_length` and `heat_map` sum rows up.
Names are loaded on first use, so that the names of the tasks cost no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors
    from longitude.measure.retrieval.measurement import Estimate as Estimate, estimate as estimate, run as run
    from longitude.measure.retrieval.summary import (
        THRESHOLD as THRESHOLD,
        definition as definition,
        depth_of as depth_of,
        effective_length as effective_length,
        heat_map as heat_map,
        scores_by_length as scores_by_length,
    )
    from longitude.measure.retrieval.tasks import TASKS as TASKS, Task as Task

_NAMES = {
    "measurement": "Estimate estimate run",
    "summary": "THRESHOLD definition depth_of effective_length heat_map scores_by_length",
    "tasks": "TASKS Task",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; dir({__name__}) lists its names")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
