"""The offline page of `longitude explore`, on which readers try encodings."""

from longitude.explore.page import write

__all__ = ["write"]
