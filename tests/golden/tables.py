"""What the scripts of this folder share: tensors that a seed decides, as lists of numbers, in files of one form.

Only numbers are taken. Longitude itself is not imported: what tests compare with must not depend on it.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers of three decimals."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).round(decimals=3)


def listed(x: Tensor) -> list:
    """As nested lists, in nine digits: those of float32."""
    return [float(f"{n:.9g}") for n in x.tolist()] if x.dim() == 1 else [listed(row) for row in x]


def save(name: str, packages: str, **tables: object) -> None:
    """NAME.json, beside this file: the versions of the packages, then the tables, a line each."""
    found = {"source": {package: version(package) for package in packages.split()}} | tables
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(table)}" for key, table in found.items())
    Path(__file__).with_name(f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
