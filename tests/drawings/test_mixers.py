"""Drawings of mixers against what the mixers compute."""

import numpy as np
import pytest

import longitude as lg
from longitude.drawings.build import Shape, built
from longitude.drawings.mixers import drawings

SHAPE = Shape(length=64, heads=2, head_dim=8)


def drawn(label: str):
    return {each.name: each for each in drawings(built(label, SHAPE).mixers[0].module, SHAPE)}


def test_keys_of_a_window():
    grid = drawn("window:size=3")["keys"]
    for name, row in zip(grid.rows, grid.values, strict=True):
        want = [int(name) - key in (0, 1, 2) for key in grid.columns]
        assert row.astype(bool).tolist() == want


def test_influence_ends_where_a_window_does():
    offsets, share = drawn("window:size=5")["influence"].lines["influence"]
    assert np.isfinite(share).tolist() == [d < 5 for d in offsets] and np.nanmax(share) == 1


SIZED = {"window": "window:size=8", "chunks": "chunks:size=8"}


@pytest.mark.parametrize("name", [SIZED.get(name, name) for name in lg.list_mixers()])
def test_every_mixer_has_an_influence(name):
    _, share = drawn(name)["influence"].lines["influence"]
    assert np.nanmax(share) == 1 and share[0] > 0
