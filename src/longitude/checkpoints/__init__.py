"""Checkpoints: the positions that a config.json declares, and how a model is loaded. Nothing here measures or writes."""

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.checkpoints", "models")


__getattr__, __all__ = loaded_on_use(__name__)
