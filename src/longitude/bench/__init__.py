"""The price of a position encoding: time and memory beside plain causal attention, and beside the libraries people use.

Everything timed is the public API. What is timed: `cases`, `peers`, `targets`; how: `clock`, `memory`; shown by `report`.
"""
