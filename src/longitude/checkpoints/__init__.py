"""Checkpoints: the positions that a config.json declares, and how a model is loaded. Nothing here measures or writes."""

from longitude.errors import require_extra

require_extra("longitude.checkpoints", "models")
