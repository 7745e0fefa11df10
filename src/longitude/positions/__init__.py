"""Position encodings: formulas, parameters, tables, terms. Tensors only; independent of attention and models."""

from typing import TYPE_CHECKING

from longitude import loaded_on_use

if TYPE_CHECKING:
    from longitude.positions.layouts import convert_layout as convert_layout
    from longitude.positions.multimodal import multimodal_positions as multimodal_positions
    from longitude.positions.optional import Region as Region

__getattr__, __all__ = loaded_on_use(
    __name__,
    {
        "layouts": "convert_layout",
        "multimodal": "multimodal_positions",
        "optional": "Region",
    },
)
