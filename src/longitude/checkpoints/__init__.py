"""Checkpoints: the positions that a config.json declares, and how a model is loaded. Nothing here measures or writes."""

from typing import TYPE_CHECKING

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.checkpoints", "models")

if TYPE_CHECKING:
    from longitude.checkpoints.config import layers_from_hugging_face as layers_from_hugging_face

__getattr__, __all__ = loaded_on_use(
    __name__,
    {
        "checkpoints.config": "layers_from_hugging_face",
    },
)
