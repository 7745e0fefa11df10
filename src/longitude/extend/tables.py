"""Learned tables of positions, stretched: their place in a checkpoint, their rows that stand for no position, their new rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longitude.checkpoints.load import shapes_of
from longitude.checkpoints.positions import table_of
from longitude.checkpoints.source import Source
from longitude.positions.absolute import Learned


@dataclass(frozen=True)
class Table:
    """name: of the tensor, as the files call it. rows: positions it has; offset: rows before them that stand for none (2 in
    OPT, one more than the padding token's id in RoBERTa).
    """

    name: str
    rows: int
    offset: int
    dim: int


def find_table(source: Source) -> Table:
    """The learned table of a checkpoint. ValueError when its files hold none of that name, or several."""
    found = table_of(source.skeleton)
    assert found is not None, "asked of a model without a table"
    name, module = found
    offset = getattr(module, "offset", None)
    if offset is None:
        offset = 0 if module.padding_idx is None else module.padding_idx + 1
    names = [f"{name}.weight"]
    if source.pickled:  # its tensors get the model's names when they are written
        return Table(names[0], module.num_embeddings - offset, offset, module.embedding_dim)
    prefix = getattr(source.skeleton, "base_model_prefix", "")
    names.append(names[0].removeprefix(f"{prefix}."))  # saved without the head
    held = [key for shard in source.shards for key in shapes_of(shard) if key in names]
    if len(held) != 1:
        raise ValueError(f"{source.name}: expected one tensor {names[0]}, the table of positions, got {held or 'none'}")
    return Table(held[0], module.num_embeddings - offset, offset, module.embedding_dim)


def stretched(table: Tensor, offset: int, length: int) -> Tensor:
    """Table [offset + rows, dim] -> [offset + length, dim]: linear along positions, first and last row where they were; the
    rows before `offset` stay. The same table where length is rows.
    """
    rows = len(table) - offset
    if length == rows:
        return table
    encoding = Learned(rows, table.shape[1], row_offset=offset, beyond="interpolate", length=length)
    encoding.table = nn.Parameter(table, requires_grad=False)
    return torch.cat([table[:offset], encoding.codes(torch.arange(length)).to(table.dtype)])
