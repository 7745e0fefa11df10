"""A shard of a sequence gets exactly its rows of the whole, given an int for its first position.

A shard holds the queries a .. b-1 and the keys up to b (or all keys, where the mask lets it see the future), with
q_positions=a and k_positions=0; with a window it may hold fewer. Its outputs are the whole's rows, and gradients of the
shards add up to the whole's, on every backend that takes it.

The one kind that does not allow it: rotations with follow="sequence". The published rule rotates every key by the length of
the whole call, so a shard, which does not know the keys after it, has other tables (`test_a_rule_of_the_whole_has_no_shards`);
follow="row" and follow="declared" do. What content decides (FoX, PaTH) reads the tokens before a shard too: its columns are made
of all tokens up to b, or carried as a cache does.
"""

from itertools import pairwise

import pytest
import torch

import longitude as lg
from longitude.attention.backends import BACKENDS, chunked
from longitude.attention.operation import refusal, requests
from longitude.positions.composed import compose
from tests.support import built, close, heads, random

HEADS, DIM, WIDTH, LENGTH = 4, 8, 16, 61
KNOWN = {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM, "dim": WIDTH, "max_length": 64}
FOLLOWING = {
    "dynamic ntk, by row": lambda: lg.Rotary(DIM, "half", scaling=lg.scaling.DynamicNTK(4, 16, follow="row", step=16)),
    "dynamic ntk, declared": lambda: lg.Rotary(DIM, "half", scaling=lg.scaling.DynamicNTK(4, 16, max_length=64)),
}
NAMES = [*lg.list_encodings(), "transformer_xl+t5+fox", *FOLLOWING]
CUTS = {"even": (0, 16, 31, 46, LENGTH), "uneven": (0, 1, 30, 37, LENGTH)}


@pytest.fixture(autouse=True)
def _blocks_of_a_few_queries(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 2**18)


def made(name: str) -> lg.Composed:
    return compose(FOLLOWING[name]()).double() if name in FOLLOWING else built(name, KNOWN)


def numbers() -> list[torch.Tensor]:
    """q, k, v, the tokens x that columns are made of, and the gradient of the output."""
    return [*heads(LENGTH), random(2, LENGTH, WIDTH, seed=8), random(2, HEADS, LENGTH, DIM, seed=9)]


def answer(encoding, mask, cuts, reach, backend):
    """Output and gradients of q, k, v, x and what is learned, shard by shard. reach(a, b): the keys that a .. b-1 hold.
    None where the backend refuses one of them."""
    *inputs, grad = numbers()
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v, x = inputs
    outs = []
    for a, b in pairwise(cuts):
        first, last = reach(a, b)
        keys = slice(first, last)
        context = {name: column[:, :, keys] for name, column in encoding.context(x[:, :last])[0].items()}
        own = q[:, :, a:b], k[:, :, keys], v[:, :, keys]
        parts = requests(*own, encoding, context, mask, a, first, None, 0.0, False)
        if refusal(BACKENDS[backend], [part.request for part in parts]) is not None:
            return None
        options = {"encoding": encoding, "context": context, "mask": mask, "q_positions": a, "k_positions": first}
        outs.append(lg.attend(*own, **options, backend=backend))
    out = torch.cat(outs, 2)
    wanted = [*inputs, *encoding.parameters()]
    return [out, *torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)]


KEYS = {
    "up to them": lambda a, b: (0, b),
    "all": lambda a, b: (0, LENGTH),
    "in a window": lambda a, b: (max(0, a - 6), b),
}
"""Of queries a .. b-1: the first key, and the end."""


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", NAMES)
def test_shards_are_the_whole(name):
    encoding = made(name)
    settings = [(lg.Causal(), KEYS["up to them"]), (lg.Window(7), KEYS["in a window"])]
    if not encoding.causal_only:
        settings.append((lg.NoMask(), KEYS["all"]))
    for mask, reach in settings:
        want = answer(encoding, mask, (0, LENGTH), KEYS["all"], "reference")
        for backend in BACKENDS:
            if (whole := answer(encoding, mask, (0, LENGTH), KEYS["all"], backend)) is None:
                continue
            for kind, cuts in {"whole": None, **CUTS}.items():
                got = whole if cuts is None else answer(encoding, mask, cuts, reach, backend)
                assert got is not None, f"{backend}, {kind}, {mask}: refused"
                close(got, want, rtol=1e-12)


def test_a_rule_of_the_whole_has_no_shards():
    """follow="sequence": the keys of the last shard are those of the whole, those of earlier ones are not."""
    encoding = compose(lg.Rotary(DIM, "half", scaling=lg.scaling.DynamicNTK(4, 16, follow="sequence"))).double()
    want = answer(encoding, lg.Causal(), (0, LENGTH), KEYS["all"], "reference")[0]
    got = answer(encoding, lg.Causal(), (0, 40, LENGTH), KEYS["up to them"], "reference")[0]
    close(got[:, :, 40:], want[:, :, 40:])
    assert (got[:, :, :40] - want[:, :, :40]).abs().max() > 1e-3
