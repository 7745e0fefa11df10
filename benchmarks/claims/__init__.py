"""Claims of the literature: each with its source, our protocol, and statements that results of studies confirm or refute.

A claim is one object (`claims.base.Claim`), registered by a file of this package. Its statements read studies of the
presets claims/NAME of `longitude study`. `python -m claims` runs them and prints the verdicts.
"""
