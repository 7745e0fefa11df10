"""Train short, test long: the same small model with each encoding and seed on the same text, measured past its length."""

from longitude.study.config import StudyConfig

__all__ = ["StudyConfig"]
