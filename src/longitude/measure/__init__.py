"""Measurements of any causal Hugging Face model: rows with their protocol.

`losses_by_length` measures a model on documents; `load` reads a checkpoint; `Row` is one measurement. Intervals are in
`longitude.statistics`. Names are loaded on first use, so that reading the options of
`longitude measure` does not import torch.
"""

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.measure", "study")


__getattr__, __all__ = loaded_on_use(__name__)
