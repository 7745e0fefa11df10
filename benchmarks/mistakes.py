"""Two mistakes that texts make (docs/errata.md) as methods of a study, to measure what they cost: a plugin.

`longitude study --plugin benchmarks/mistakes.py --methods non-overlapping ntk ntk-book linear linear-floor`
"""

from longitude.positions.scaling import NTK, BaseChange, Linear, Scaling
from longitude.study.schemes import METHODS, Method, Spec, rotary_dim


@METHODS.register("ntk-book")
def ntk_book() -> Method:
    """The base of NTK-aware scaling with the exponent 2/(d-2) in place of d/(d-2)."""

    def scheme(spec: Spec, factor: float, original: int) -> Scaling:
        if "scaling" not in spec:
            return NTK(factor)  # which extends no such encoding
        return BaseChange(spec["base"] * factor ** (2 / (rotary_dim(spec) - 2)))

    return Method(scheme)


@METHODS.register("linear-floor")
def linear_floor() -> Method:
    """Interpolated positions rounded down."""
    return Method(
        lambda spec, factor, original: Linear(factor),
        positions=lambda positions, original, length: positions * original // length,
    )
