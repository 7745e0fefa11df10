"""Caches that generate() can be asked for: offloaded ones, and static ones where states have a fixed size."""

import pytest
import torch

from longitude.attention.cache import LongitudeCacheLayer
from longitude.attention.state_cache import StateLayer

RECURRENT = [["mamba2", "rwkv6"], ["retention", {"name": "window", "size": 5}]]
GROWING = [["attention"] * 2, ["mamba2", "attention"], ["latent"] * 2, ["hierarchical"] * 2]


def kind(build, mixers):
    plain = {"mamba2", "rwkv6", "retention"}
    return build("rope" if any(name not in plain for name in map(str, mixers)) else "none", mixers=mixers)


@pytest.mark.parametrize("mixers", [*RECURRENT, *GROWING], ids=str)
def test_offloaded(mixers, build, ids, monkeypatch):
    """The same text, and every layer goes away and comes back once for each call."""
    model, moves = kind(build, mixers), []

    def watched(layer, name):
        move = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda self: (moves.append(name), move(self))[1])

    for layer in {type(make()) for make in model.model.cache_layers}:
        watched(layer, "prefetch")
        watched(layer, "offload")
    x = ids(2, 7)
    options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    wanted = model.generate(x, **options)
    assert not moves
    assert torch.equal(model.generate(x, cache_implementation="offloaded", **options), wanted)
    assert moves == ["prefetch", "offload"] * 2 * 6


@pytest.mark.parametrize("mixers", RECURRENT, ids=str)
def test_static_where_states_have_a_fixed_size(mixers, build, ids):
    model, x = kind(build, mixers), ids(2, 7)
    options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(x, cache_implementation="static", **options), model.generate(x, **options))


@pytest.mark.parametrize("mixers", GROWING, ids=str)
def test_static_is_refused_where_something_grows(mixers, build, ids):
    with pytest.raises(
        ValueError, match="cache_implementation: expected 'dynamic' or 'offloaded', got 'static', and what"
    ):
        kind(build, mixers).generate(ids(2, 7), max_new_tokens=3, cache_implementation="static")


def test_what_was_moved_comes_back():
    """By device alone: a state and keys on "meta" stand for those of an accelerator."""
    state, keys = StateLayer(), LongitudeCacheLayer()
    state.state = (torch.zeros(2, 3),)
    state.device = torch.device("meta")
    state.prefetch()
    assert state.state[0].device.type == "meta"
    new = torch.zeros(1, 2, 3, 4)
    keys.extend(new, new, 0, {"c": new}, (new[:, 0],))
    keys.device = torch.device("meta")
    keys.prefetch()
    found = keys.keys, keys.values, keys.columns["c"], keys.carry[0]
    assert {x.device.type for x in found} == {"meta"}
