"""Learned tables of positions, stretched: their place in a checkpoint, their rows for no position, their new rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longitude.checkpoints.load import shapes_of
from longitude.checkpoints.positions import table_of
from longitude.checkpoints.source import Source
from longitude.positions.absolute import Learned


@dataclass(frozen=True)
class LearnedTable:
    """A table in the files of a checkpoint.

    Attributes:
        name: The tensor's name.
        rows: Positions it has.
        offset: Rows before them for no position (2 in OPT, one more than the padding token's id in RoBERTa).
        dim: Width of a row.
    """

    name: str
    rows: int
    offset: int
    dim: int


def find_table(source: Source) -> LearnedTable:
    """The learned table of a checkpoint. ValueError when its files hold none of that name, or several."""
    table = table_of(source.skeleton)
    assert table is not None, "called for a model without a table"
    name, module = table
    offset = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    names = [f"{name}.weight", f"{name}.weight".removeprefix(f"{prefix}.")]  # the latter where saved without the head
    held = [key for shard in source.shards for key in shapes_of(shard) if key in names]
    if source.pickled:  # its tensors get the model's names when they are written
        held = names[:1]
    if len(held) != 1:
        raise ValueError(f"{source.name}: expected one tensor {names[0]}, the table of positions, got {held or 'none'}")
    return LearnedTable(held[0], module.num_embeddings - offset, offset, module.embedding_dim)


def stretched(table: Tensor, offset: int, length: int) -> Tensor:
    """Table [offset + rows, dim] -> [offset + length, dim], linear along positions; first, last and offset rows unchanged."""
    rows = len(table) - offset
    if length == rows:
        return table
    encoding = Learned(rows, table.shape[1], row_offset=offset, beyond="interpolate", length=length)
    encoding.table = nn.Parameter(table, requires_grad=False)
    return torch.cat([table[:offset], encoding.codes(torch.arange(length)).to(table.dtype)])
