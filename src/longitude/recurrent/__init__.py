"""Mixers that carry a state instead of keys and values: parallel = chunked = one token at a time."""
