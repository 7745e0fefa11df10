"""Train short, test long: train one small model per encoding and seed on the same text, and measure it at longer lengths."""

from longitude.errors import require_extra
from longitude.study.config import StudyConfig

require_extra("longitude.study", "study")

__all__ = ["StudyConfig"]
