"""One operation, its masks, backends, caches and layers. It depends on terms, and on no single encoding."""

from longitude import loaded_on_use

__getattr__, __all__ = loaded_on_use(__name__)
