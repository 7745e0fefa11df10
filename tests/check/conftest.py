"""The checkpoints of tests/measure."""

from tests.measure.conftest import checkpoints, saved, stock

__all__ = ["checkpoints", "saved", "stock"]
