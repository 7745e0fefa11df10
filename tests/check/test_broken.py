"""Each bug is caught by the law that it breaks, and by no other; sound models break none."""

import pytest

from longitude.check import check, laws
from tests.check.broken_models import BROKEN, HEALTHY, REFERENCES, falcon, replaced

LONG = ("positions cast at the input",)  # bfloat16 counts to 256


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in BROKEN])
def test_a_bug_is_caught_by_its_law_and_by_no_other(name):
    make, law = BROKEN[name]
    results = check(make(), reference=REFERENCES[name]() if name in REFERENCES else None)
    assert list(results) == list(laws())
    broken = {result.law: result for result in results.values() if result.status == "broken"}
    assert list(broken) == [law], broken
    assert broken[law].reason and broken[law].measured > 2 * broken[law].threshold


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_breaks_no_law(name):
    for result in check(HEALTHY[name]()).values():
        assert result.status != "broken", result
        assert (result.status == "does not apply") == (result.measured is None), result
        assert result.reason or result.status == "holds", result


@pytest.mark.slow
@pytest.mark.parametrize("make", [falcon, replaced])
def test_positions_that_are_not_the_configs_break_no_law(make):
    found = check(make())
    assert [result for result in found.values() if result.status == "broken"] == []
    for law in ("rotary_frequencies", "relative_positions", "scaling_border"):
        assert found[law].status == "does not apply" and found[law].reason.startswith("its positions are")
    assert found["cached_decoding"].status == "holds"
