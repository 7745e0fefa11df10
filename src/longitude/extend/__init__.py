"""Longer contexts for trained checkpoints: `extend` writes one, `fine_tune` trains it on."""

from longitude.errors import require_extra

require_extra("longitude.extend", "study")

from longitude.extend.extend import Extension as Extension, extend as extend
from longitude.extend.fine_tune import Training as Training, fine_tune as fine_tune
from longitude.extend.plan import ExtendPlan as ExtendPlan
from longitude.extend.search import SearchResult as SearchResult
from longitude.extend.short_contexts import ShortContextLoss as ShortContextLoss

__all__ = [
    "ShortContextLoss",
    "ExtendPlan",
    "Extension",
    "SearchResult",
    "Training",
    "extend",
    "fine_tune",
]
