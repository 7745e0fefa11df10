"""Longer contexts for trained checkpoints: `extend` writes one, `fine_tune` trains it on."""

from longitude.errors import require_extra

require_extra("longitude.extend", "study")

from longitude.extend.extend import extend
from longitude.extend.fine_tune import fine_tune

__all__ = ["extend", "fine_tune"]
