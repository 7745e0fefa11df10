"""The checkpoints of tests/measure."""

from tests.measure.conftest import checkpoints

__all__ = ["checkpoints"]
