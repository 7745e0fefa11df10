"""The cost of a position encoding: time and memory compared with plain causal attention.

Everything timed is the public API. What is timed: `cases`; how: `measurement`; for which sizes: `sweep`; shown by `report`.
"""

from longitude.errors import require_extra

require_extra("longitude.bench", "study")
