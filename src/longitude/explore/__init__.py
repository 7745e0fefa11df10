"""One offline page on which readers try what encodings do with position: `longitude explore`."""

from longitude.explore.page import write

__all__ = ["write"]
