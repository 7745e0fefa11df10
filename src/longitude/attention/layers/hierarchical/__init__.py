"""Attention to the near tokens one by one, and to everything before them in blocks that follow binary digits."""

from longitude.attention.layers.hierarchical.function import hierarchical_attention
from longitude.attention.layers.hierarchical.layer import HierarchicalAttention

__all__ = ["HierarchicalAttention", "hierarchical_attention"]
