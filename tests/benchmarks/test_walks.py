"""What a call does once, seen by the walks of benchmarks/walks.py."""

from functools import partial

import pytest
import torch

import longitude as lg
import walks
from longitude.attention import operation
from longitude.attention.backends import BACKENDS
from longitude.attention.mixer import MixerInputs
from longitude.attention.step import Step
from longitude.positions.composed import compose
from tests.support import built, close, random


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


def test_a_backend_is_chosen_again_where_what_decides_differs(monkeypatch):
    """And where the backends are others."""
    q = torch.randn(1, 4, 64, 16)

    def chosen(q, **options):
        return walks.walk(lambda: lg.attend(q, q, q, **({"encoding": lg.ALiBi(num_heads=4)} | options)))[0]["choose"]

    ways = {
        "plain": {}, "window": {"mask": lg.Window(16)}, "dropout": {"dropout": 0.1}, "lse": {"return_lse": True},
        "weights": {"return_weights": True}, "term": {"encoding": lg.Kerple(num_heads=4)},
        "positions": {"q_positions": 5, "k_positions": 3},
    }  # fmt: skip
    operation.CHOICES.clear()
    assert [chosen(q, **options) for options in ways.values()] == [1] * len(ways)
    assert [chosen(q, **options) for options in ways.values()] == [0] * len(ways)
    assert chosen(q.double()) == chosen(q[:, :, :60]) == chosen(q.clone().requires_grad_()) == 1
    assert (
        chosen(q, backend="table") == chosen(q, mask=lg.Padding(torch.ones(1, 64, dtype=torch.bool)) & lg.Causal()) == 1
    )
    monkeypatch.delitem(BACKENDS, "split")
    assert chosen(q) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "fox", "path", "xpos"])
def test_layers_of_a_step_share_no_more_than_they_have_in_common(name):
    """Each layer of a forward alone gives what it gives after others of the same encoding and of another one."""
    known, x, options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "dim": 16}, random(2, 6, 16), [{}, {}]
    options += [{"scale": 0.7}, {"num_kv_heads": 1}, {"backend": "reference"}, {"encoding": lg.Kerple(num_heads=4)}]
    torch.manual_seed(0)
    mask, shared = lg.Causal(), (Step(), Step())
    encoding = compose(built(name, known))
    for n, each in enumerate(options):
        layer = lg.MultiHeadAttention(16, 4, **({"num_kv_heads": 2} | each)).double().eval()
        own = compose(each.get("encoding", encoding)).double()
        if name == "path" and each.get("num_kv_heads") == 1:
            continue
        alone, cache = layer.cache_layer(), layer.cache_layer()
        for step, tokens in enumerate((x * (n + 1)).split([5, 1], 1)):
            inputs = MixerInputs(mask, cache=cache, encoding=own, step=shared[step])
            close(layer(tokens, inputs), layer(tokens, cache=alone, encoding=own))
