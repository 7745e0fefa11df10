"""The price of a position encoding: time and memory beside plain causal attention, and beside the libraries people use; and the
price of a generated token with each mixer.

Everything timed is the public API. What is timed: `cases`, `peers`, `targets`, `targets_mixers`, `decode`; how: `clock`,
`memory`; shown by `report` and `decode_report`.
"""
