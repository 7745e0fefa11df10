"""Measurements of any causal Hugging Face model: rows with their protocol, and intervals over documents.

`by_length` measures a model on documents; `Row` says what a measurement holds; `interval`, `paired_difference` and
`paired_ratio` put error bars on sums over documents.
"""

from longitude.measure.intervals import Interval, interval, paired_difference, paired_ratio
from longitude.measure.rows import SCHEMA, Row, from_frame, read_rows, to_frame, write_rows
from longitude.measure.text import DocumentLosses, by_length, default_bins, document_losses, losses_by_length

__all__ = [
    "SCHEMA",
    "DocumentLosses",
    "Interval",
    "Row",
    "by_length",
    "default_bins",
    "document_losses",
    "from_frame",
    "interval",
    "losses_by_length",
    "paired_difference",
    "paired_ratio",
    "read_rows",
    "to_frame",
    "write_rows",
]
