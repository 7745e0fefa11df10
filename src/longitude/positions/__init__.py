"""Position encodings: formulas, parameters, tables, terms. Tensors only; independent of attention and models."""

from typing import TYPE_CHECKING

from longitude import loaded_on_use

if TYPE_CHECKING:
    from longitude.positions.coordinates import multimodal_positions as multimodal_positions
    from longitude.positions.rotation import convert_layout as convert_layout

__getattr__, __all__ = loaded_on_use(
    __name__,
    {
        "positions.rotation": "convert_layout",
        "positions.coordinates": "multimodal_positions",
    },
)
