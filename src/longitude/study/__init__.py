"""Train short, test long: the same small model with each encoding and seed on the same text, measured past its length."""

from longitude.errors import require_extra
from longitude.study.config import StudyConfig

require_extra("longitude.study", "study")

__all__ = ["StudyConfig"]
