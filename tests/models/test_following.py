"""Schemes that follow the length, in deep models: exact around the original length, or refusing to drift."""

from itertools import pairwise

import pytest
import torch

import longitude as lg
from tests.support import close as near

L0 = 8
LISTS = [1.0, 1.1], [2.0, 4.0]


def scheme(name: str, follow: str) -> lg.scaling.Scaling:
    """DynamicNTK, also with a longest length or in steps of 5, and LongRoPE."""
    if name == "longrope":
        return lg.scaling.LongRoPE(*LISTS, L0, factor=4.0, follow=follow)
    steps = name == "steps of 5"
    return lg.scaling.DynamicNTK(
        2.0, L0, max_length=24 if steps or follow == "declared" else None, follow=follow,
        step=5 if steps and follow == "row" else None,
    )  # fmt: skip


SCHEMES = ["dynamic", "steps of 5", "longrope"]


@pytest.fixture
def model_of(build):
    return lambda name, follow, layers=4: build(
        {"name": "rope", "scaling": scheme(name, follow)}, num_hidden_layers=layers
    )


def close(x, y) -> None:
    near(x, y, 1e-10)


def in_chunks(model, x, cuts, mask=None) -> torch.Tensor:
    cache, outs = None, []
    for a, b in pairwise(cuts):
        own = {} if mask is None else {"attention_mask": mask[:, :b]}
        out = model(x[:, a:b], past_key_values=cache, use_cache=True, **own)
        cache = out.past_key_values
        outs.append(out.logits)
    return torch.cat(outs, 1)


@pytest.mark.one_in(7)
@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, L0 - 1, L0, L0 + 1, 13])
@pytest.mark.parametrize("follow", ["declared", "row"])
@pytest.mark.parametrize("name", SCHEMES)
def test_whole_pass_is_chunks_is_one_by_one(model_of, ids, name, follow, prompt) -> None:
    """Left-padded, too."""
    model, x = model_of(name, follow), ids(2, 19)
    close(in_chunks(model, x, [0, prompt, *range(prompt + 1, 20)]), model(x, use_cache=False).logits)
    mask = (torch.arange(19) >= torch.tensor([[0], [3]])).long()
    padded = model(x, attention_mask=mask, use_cache=False).logits
    close(padded[1, 3:], model(x[1:, 3:], use_cache=False).logits[0])
    close(in_chunks(model, x, [0, prompt, 16, 17, 19], mask)[mask.bool()], padded[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_published_rule_never_drifts(model_of, ids, name) -> None:
    """Exact while nothing changes; where a cached token would have been made otherwise, refused."""
    model, x = model_of(name, "sequence"), ids(2, 19)
    whole = model(x[:, :L0], use_cache=False).logits
    close(in_chunks(model, x, range(L0 + 1)), whole)
    with pytest.raises(ValueError, match="prefill again from the start, or pass follow='row' or 'declared'"):
        in_chunks(model, x, [0, *range(L0, 11)])
    beyond = model(x[:, : L0 + 1], use_cache=False).logits
    assert (beyond[:, :L0] - whole).abs().max() > 1e-3  # the published rule changes what was before
    if name == "longrope":  # one list beyond: a cache that began there continues
        close(in_chunks(model, x, [0, L0 + 1, *range(L0 + 2, 20)]), model(x, use_cache=False).logits)
    else:
        with pytest.raises(ValueError, match="prefill again"):
            in_chunks(model, x, [0, L0 + 1, L0 + 2])
    cache = model(x[:, :12], use_cache=True).past_key_values
    cache.crop(L0 - 2 - 12)  # what is left was made beyond the border
    with pytest.raises(ValueError, match="prefill again"):
        model(x[:, L0 - 2 : L0 - 1], past_key_values=cache)


@torch.no_grad()
def test_the_two_rules_differ_in_deep_models_alone(model_of, ids) -> None:
    """The last token of a whole pass: one layer attends to the same keys under both rules; two layers do not."""
    for layers, same in ((1, True), (2, False)):
        row, sequence = (
            model_of("dynamic", follow, layers)(ids(1, 13), use_cache=False).logits[:, -1]
            for follow in ("row", "sequence")
        )
        assert torch.allclose(row, sequence, atol=1e-10) == same
