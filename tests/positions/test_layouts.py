"""Conversion of rotary weights: exactly a permutation, the same scores, and the same logits as the model it came from."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longitude as lg
from longitude.positions.rotation import convert_layout
from tests.support import close, refused_calls

OTHER = {"half": "interleaved", "interleaved": "half"}


@pytest.mark.parametrize("to", ["half", "interleaved"])
def test_rows_move_inside_the_rotary_block_of_each_head(to: str) -> None:
    names = torch.arange(12.0)  # two heads of six, four of them rotary
    moved = {"half": [0, 2, 1, 3], "interleaved": [0, 2, 1, 3]}[to]
    assert convert_layout(names, 6, to, rotary_dim=4).tolist() == [*moved, 4, 5, *(6 + n for n in moved), 10, 11]
    order = {"half": [0, 2, 4, 1, 3, 5], "interleaved": [0, 3, 1, 4, 2, 5]}[to]
    assert convert_layout(names, 6, to).tolist() == [*order, *(6 + n for n in order)]
    assert convert_layout(names[:6], 6, to).tolist() == order  # the norm inside a head
    matrix = torch.randn(12, 5)
    assert torch.equal(convert_layout(matrix, 6, to), matrix[[*order, *(6 + n for n in order)]])


@pytest.mark.parametrize("options", [{}, {"rotary_dim": 8}, {"proportion": 0.5}], ids=["all", "partial", "p-rope"])
@pytest.mark.parametrize("to", ["half", "interleaved"])
def test_scores_stay(to: str, options: dict[str, Any]) -> None:
    """Grouped heads, biases, and norms inside heads, from layout to layout."""
    heads, kv_heads, dim, width = 4, 2, 16, 24
    x = torch.randn(2, 7, width, dtype=torch.float64)
    weights = {name: torch.randn(h * dim, width, dtype=torch.float64) for name, h in (("q", heads), ("k", kv_heads))}
    biases = {name: torch.randn(len(w), dtype=torch.float64) for name, w in weights.items()}
    norms = {name: torch.rand(dim, dtype=torch.float64) for name in weights}

    def converted(tensor: Tensor) -> Tensor:
        return convert_layout(tensor, dim, to, options.get("rotary_dim"))

    def scores(layout: str, convert) -> Tensor:
        rope = lg.Rotary(dim, layout, **options)

        def projected(name: str) -> Tensor:
            y = nn.functional.linear(x, convert(weights[name]), convert(biases[name])).unflatten(-1, (-1, dim))
            return nn.functional.rms_norm(y, (dim,), convert(norms[name])).transpose(1, 2)

        q, k = rope.rotate_queries(projected("q"), 3), rope.rotate_keys(projected("k"), 3)
        return q @ k.repeat_interleave(heads // kv_heads, 1).mT

    want = scores(OTHER[to], lambda tensor: tensor)
    close(scores(to, converted), want)
    assert not torch.allclose(scores(to, lambda tensor: tensor), want, atol=0.1)


ROWS = torch.zeros(16, 4)
test_wrong_options = refused_calls(
    [
        (lambda: convert_layout(torch.zeros(30, 4), 8, "half"), "head_dim=8", "[30, 4]"),
        (lambda: convert_layout([1, 2], 8, "half"), "convert_layout", "[1, 2]"),
        (lambda: convert_layout(ROWS, 8, "half", rotary_dim=10), "head_dim=8", "10"),
        (lambda: convert_layout(ROWS, 8, "half", rotary_dim=3), "rotary_dim", "3"),
        (lambda: convert_layout(ROWS, 8, "other"), "'other'"),
    ]
)
