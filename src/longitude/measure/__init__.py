"""Measurements of any causal Hugging Face model: rows with their protocol, and intervals over documents.

`by_length` measures a model on documents; `load` reads a checkpoint; `Row` is one measurement; `interval`,
`paired_difference` and `paired_ratio` put error bars on sums over documents, `t_interval` and `seed_difference` on training
seeds. Names are loaded on first use, so that reading the options of `longitude measure` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longitude.errors import require_extra

if TYPE_CHECKING:  # the same names for type checkers and editors
    from longitude.checkpoints.load import Checkpoint as Checkpoint, load as load
    from longitude.measure.rows import (
        SCHEMA as SCHEMA,
        Row as Row,
        from_frame as from_frame,
        read_rows as read_rows,
        to_frame as to_frame,
        write_rows as write_rows,
    )
    from longitude.measure.text import (
        DocumentLosses as DocumentLosses,
        by_length as by_length,
        default_bins as default_bins,
        losses_by_length as losses_by_length,
    )
    from longitude.statistics.documents import (
        Difference as Difference,
        Interval as Interval,
        document_difference as document_difference,
        interval as interval,
        paired_difference as paired_difference,
        paired_ratio as paired_ratio,
    )
    from longitude.statistics.seeds import (
        holm as holm,
        seed_difference as seed_difference,
        t_interval as t_interval,
    )

require_extra("longitude.measure", "study")

_NAMES = {
    "statistics.documents": "Difference Interval document_difference interval paired_difference paired_ratio",
    "measure.rows": "SCHEMA Row from_frame read_rows to_frame write_rows",
    "statistics.seeds": "holm seed_difference t_interval",
    "measure.text": "DocumentLosses by_length default_bins losses_by_length",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULE_OF |= {"Checkpoint": "checkpoints.load", "load": "checkpoints.load"}

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'longitude.measure' has no attribute {name!r}; dir(longitude.measure) lists its names"
        )
    value = globals()[name] = getattr(import_module(f"longitude.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
