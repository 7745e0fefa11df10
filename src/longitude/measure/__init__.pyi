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
    losses_by_length as losses_by_length,
)
