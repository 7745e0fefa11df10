"""What a call does once: the counts of benchmarks/walks.py that no machine changes."""

import pytest

import walks


@pytest.mark.parametrize(
    ("of", "calls"), [(walks.training_step, 473), (lambda: walks.decoding(walks.decoder("rope", 4)), 433)]
)
def test_layers_of_a_forward_choose_and_check_once(of, calls):
    step = of()
    step()
    functions, _ = walks.walk(step)
    assert functions.total() <= calls
    assert functions["choose"] == functions["require_causal"] == functions["_checked"] == 1


def test_attend_enters_nothing_that_it_does_not_need():
    call = walks.attend()
    call()
    functions, files = walks.walk(call)
    assert functions.total() <= 170 and functions["choose"] == functions["require_causal"] == 1
    assert "attention/length_dependent.py" not in files and functions["_find_spans"] == 0
