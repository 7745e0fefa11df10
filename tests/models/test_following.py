"""Schemes that follow the length, in deep models: exact around the original length, or refusing to drift."""

from functools import partial

import pytest
import torch

import longitude as lg
from tests.support import close as near, in_pieces, refused

close = partial(near, atol=1e-10)

L0 = 8
SCHEMES = {
    "dynamic": lg.scaling.DynamicNTK(2.0, L0, follow="sequence"),
    "longrope": lg.scaling.LongRoPE([1.0, 1.1], [2.0, 4.0], L0, factor=4.0, follow="sequence"),
}


@pytest.fixture
def model_of(build):
    return lambda name: build({"name": "rope", "scaling": SCHEMES[name]}, num_hidden_layers=4)


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
def test_the_published_rule_never_drifts(model_of, ids, name) -> None:
    """Exact while nothing changes; where a cached token would have been made otherwise, refused."""
    model, x = model_of(name), ids(2, 19)
    whole = model(x[:, :L0], use_cache=False).logits
    close(in_pieces(model, x, range(1, L0 + 1)), whole)
    with refused("follow='row'", "'declared'"):
        in_pieces(model, x, range(L0, 11))
    beyond = model(x[:, : L0 + 1], use_cache=False).logits
    assert (beyond[:, :L0] - whole).abs().max() > 1e-3  # the published rule changes what was before
    if name == "longrope":  # one list beyond: a cache that began there continues
        close(in_pieces(model, x, range(L0 + 1, 20)), model(x, use_cache=False).logits)
    else:
        with refused("cache", "follow='row'", "'declared'"):
            in_pieces(model, x, [L0 + 1, L0 + 2])
    cache = model(x[:, :12], use_cache=True).cache
    cache.crop(L0 - 2 - 12)  # what is left was made beyond the border
    with refused("cache", "follow='row'", "'declared'"):
        model(x[:, L0 - 2 : L0 - 1], cache=cache)
