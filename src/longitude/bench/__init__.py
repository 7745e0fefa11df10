"""The cost of a position encoding: time and memory compared with plain causal attention, and with the libraries people use.

Everything timed is the public API. What is timed: `cases`, `peers`; how: `clock`, `memory`; for which sizes: `sweep`; shown by
`report` and `figures`.
"""

from longitude.errors import require_extra

require_extra("longitude.bench", "study")
