"""Laws go red for backends that break them on purpose."""

import re
from dataclasses import replace

import pytest
import torch

from longitude import testing
from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Window
from longitude.attention.reference import reference


def _a_little_more(r):
    return 1.001 * reference(r)[0]


def _drops_by_column(r):
    """Dropout of whole keys instead of weights."""
    if not r.dropout:
        return reference(r)[0]
    keep = (torch.rand(r.length) > r.dropout).to(r.v.dtype)[:, None] / (1 - r.dropout)
    return reference(replace(r, v=r.v * keep, dropout=0.0))[0]


def _scales_nothing_up(r):
    """Dropout without the factor 1 / (1 - p)."""
    return (1 - r.dropout) * reference(r)[0]


def _draws_always(r):
    torch.rand(1)
    return reference(r)[0]


def _found_by_its_result(r):
    """What was zero by dropout becomes NaN."""
    out = reference(r)[0]
    return out.masked_fill(out[..., :1] == 0, torch.nan)


def _without_graph(r):
    out = reference(r)[0]
    return out if bool(r.allowed().any()) else out.detach()


def _without_the_values(r):
    """A gradient of zero that is None."""
    return reference(r if bool(r.allowed().any()) else replace(r, v=r.v.detach()))[0]


def _of_one_shape(r):
    """Queries are taken for as many as the keys."""
    return reference(r)[0] + r.q.new_zeros(r.rows, 1) + r.q.new_zeros(r.length, 1)


def _of_positive_scale(r):
    return reference(replace(r, scale=abs(r.scale)))[0]


def _swallows(r):
    """A NaN becomes a zero, as a fast exponential in float32 once made of it."""
    return reference(r)[0].nan_to_num(0.0)


def _writes(r):
    """Scales the keys that it was given."""
    with torch.no_grad():
        r.k.mul_(1.0)
    return reference(r)[0]


def _mixes_sequences(r):
    return reference(r)[0] + 0 * r.q.sum()


def _divides_by_its_norm(r):
    """A zero whose derivative is not finite, where a query has no keys."""
    out = reference(r)[0]
    return out + 0 * out.square().sum(-1, keepdim=True).sqrt()


def _looks_no_further(r):
    """Pairs that the mask allows, but for far ones."""
    return reference(replace(r, mask=r.mask & Window(4)))[0]


BROKEN_BACKENDS = [
    ("backends", _a_little_more, "torch.float64, .*, output: differs by"),
    ("nan_and_inf", _swallows, "its output is finite"),
    ("nan_and_inf", _mixes_sequences, "another row: differs by"),
    ("dropout", _drops_by_column, "of 170 draws"),
    ("dropout", _scales_nothing_up, r"weights that are 0 or w / \(1 - p\)"),
    ("dropout", _draws_always, "a random number was drawn without dropout"),
    ("dropout", _found_by_its_result, "an output that is not zero"),
    ("autograd_graph", _without_graph, "expected a graph, as `reference` has, got no graph"),
    ("autograd_graph", _without_the_values, "expected a graph, as `reference` has, got no graph"),
    ("queries_without_keys", _divides_by_its_norm, "gradient of v: differs by inf"),
    ("random_calls", _looks_no_further, "differs by"),
    ("random_calls", _draws_always, "changed random numbers"),
    ("random_calls", _writes, "changed a tensor that was given"),
    ("random_calls", _of_one_shape, "(RuntimeError|a shape)"),
    ("random_calls", _of_positive_scale, "differs by"),
]


@pytest.mark.parametrize(("law", "run", "words"), BROKEN_BACKENDS, ids=[run.__name__ for _, run, _ in BROKEN_BACKENDS])
def test_law_goes_red_for_a_backend(monkeypatch: pytest.MonkeyPatch, law, run, words) -> None:
    monkeypatch.setitem(BACKENDS, "chunked", replace(BACKENDS["chunked"], run=run))
    options = {"draws": range(40)} if law == "random_calls" else {}
    result = testing.laws()[law](testing.example("alibi"), **options)
    assert result.status == "failed" and re.search(f"backend chunked.*{words}", result.reason), result
