"""Measurements of any causal Hugging Face model: rows with their protocol.

`by_length` measures a model on documents; `load` reads a checkpoint; `Row` is one measurement. Intervals are in
`longitude.statistics`. Names are loaded on first use, so that reading the options of
`longitude measure` does not import torch.
"""

from typing import TYPE_CHECKING

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.measure", "study")

if TYPE_CHECKING:  # the same names for type checkers and editors
    from longitude.checkpoints.load import load as load
    from longitude.measure import retrieval as retrieval
    from longitude.measure.rows import (
        Row as Row,
        read_rows as read_rows,
        to_frame as to_frame,
        write_rows as write_rows,
    )
    from longitude.measure.text import (
        DocumentLosses as DocumentLosses,
        by_length as by_length,
        losses_by_length as losses_by_length,
    )

__getattr__, __all__ = loaded_on_use(
    __name__,
    {
        "checkpoints.load": "load",
        "measure.retrieval": "retrieval",
        "measure.rows": "Row read_rows to_frame write_rows",
        "measure.text": "DocumentLosses by_length losses_by_length",
    },
)
