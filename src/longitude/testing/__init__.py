"""The laws every encoding must obey, for yours too.

    from longitude import testing

    testing.check("alibi")                          # a registered name,
    testing.check(MyEncoding, slope=3.0)            # a class, with options,
    testing.check(lambda: MyEncoding(num_heads=4))  # or anything that builds a fresh one for the toy size, SHAPES

`check` tries every law and returns the Result of each: whether it passed, failed or is not applicable, the number, the threshold,
the reason. The first that fails raises LawBroken, an AssertionError with the law and the number. In a test file:

    @pytest.mark.parametrize(("name", "law"), testing.cases())
    def test_law(name, law):
        testing.examine(law, name)

A law is a function under the decorator `law`, which gives its threshold; those of this package are in longitude/testing/battery.
The one law that cannot be here is that the table equals the published one: numbers typed from the paper.

Mixers have separate laws with the same functions: testing.mixers.check("mamba").
"""

from longitude.testing import mixers
from longitude.testing.engine import DoesNotApply, LawBroken, measure
from longitude.testing.examples import ENCODING_LAWS, example, fill
from longitude.testing.fixtures import close

law, laws, cases = ENCODING_LAWS.law, ENCODING_LAWS.laws, ENCODING_LAWS.cases
examine, check = ENCODING_LAWS.examine, ENCODING_LAWS.check

__all__ = [
    "DoesNotApply", "LawBroken", "cases", "check", "close", "examine", "example", "fill", "law", "laws", "measure",
    "mixers",
]  # fmt: skip
