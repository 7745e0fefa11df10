"""Train short, test long: train one small model per encoding and seed on the same text, and measure it at longer lengths."""

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.study", "study")


__getattr__, __all__ = loaded_on_use(__name__)
