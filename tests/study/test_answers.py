"""Floor and ceiling of a task beside what its labels reach."""

import numpy as np

from longitude.study.answers import share


def test_a_share_and_its_ends_are_from_0_to_1():
    """Of two seeds that nearly always are right, or never, also where errors of seeds and of examples are added."""
    right = np.ones((2, 40))
    right[1, :6] = 0
    for found in (share(right), share(1 - right)):
        assert found.over == "seeds and documents" and 0 <= found.low < found.value < found.high <= 1
    assert share(right).high == 1 and share(1 - right).low == 0
