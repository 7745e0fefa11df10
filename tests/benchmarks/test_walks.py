"""What a call does once, seen by the walks of benchmarks/walks.py."""

from functools import partial

import pytest
import torch

import longitude as lg
import walks
from longitude.attention import operation
from longitude.attention.backends import BACKENDS


@pytest.mark.parametrize("of", [walks.training_step, *(partial(walks.decoder, name, 4) for name in ("rope", "alibi"))])
def test_layers_of_a_forward_choose_and_check_once(of):
    step = of() if of is walks.training_step else walks.decoding(of())
    step()
    functions, _ = walks.walk(step)
    assert functions["require_causal"] == functions["valid_call"] == 1 and functions["choose"] <= 1


def test_attend_enters_nothing_that_it_does_not_need():
    call = walks.attend()
    call()
    functions, files = walks.walk(call)
    assert functions["choose"] == 0 and functions["require_causal"] == 1
    assert not files.keys() & {"attention/length_dependent.py", "attention/spans.py"}


def test_a_backend_is_chosen_again_where_the_backends_are_others(monkeypatch):
    def chosen() -> int:
        return walks.walk(lambda: lg.attend(*q, encoding=alibi))[0]["choose"]

    q, alibi = torch.randn(3, 1, 4, 64, 16), lg.ALiBi(num_heads=4)
    operation.CHOICES.clear()
    assert (chosen(), chosen()) == (1, 0)
    monkeypatch.delitem(BACKENDS, "split")
    assert chosen() == 1
