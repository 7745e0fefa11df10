"""The facts of the catalogue about each encoding, against what is known of it."""

from types import SimpleNamespace

import pytest
import torch

import longitude as lg
from longitude import catalogue
from longitude.attention.backends import BACKENDS
from tests.support import needs_c

FACTS = catalogue.catalogue()
BY_NAME = {entry["name"]: SimpleNamespace(**entry) for entry in FACTS["encodings"]}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("nope", []), ("sinusoidal", ["input"]), ("rope", ["rotation"]), ("alibi", ["bias"]), ("shaw", ["vectors"]),
        ("fox", ["content"]), ("log_n", ["temperature"]), ("sink", ["sink"]),
    ],
)  # fmt: skip
def test_where_it_acts(name, where):
    assert BY_NAME[name].acts == where


def test_composed_acts_everywhere():
    assert catalogue.acts(lg.Composed([lg.Rotary(8, "half"), lg.FoX(16, 4)])) == ["rotation", "content"]
    assert catalogue.acts(lg.FoX(24, 4), dim=24) == ["content"]


def test_properties_are_the_declared_ones():
    assert [*BY_NAME] == lg.list_encodings()
    for name, facts in BY_NAME.items():
        encoding = lg.testing.example(name)()
        for flag in ("relative", "stable_keys", "shared", "learned", "causal_only", "axes"):
            assert getattr(facts, flag) == getattr(encoding, flag), (name, flag)
        assert bool(facts.max_length) == (encoding.max_length is not None)
    assert BY_NAME["path_fox"].__dict__["class"] == "PaTH + FoX"


@needs_c
def test_backends_are_those_that_do_not_refuse():
    assert BY_NAME["t5"].backends["training"][0] == "table"
    assert "sdpa" not in BY_NAME["t5"].backends["training"] and "sdpa" in BY_NAME["t5"].backends["inference"]
    assert BY_NAME["nope"].backends["inference"][0] == "sdpa"  # the cheapest first
    q, k = torch.zeros(1, 4, 64, 8), torch.zeros(1, 2, 64, 8)
    for name in ("alibi", "rope", "shaw"):
        encoding = lg.testing.example(name)().float()
        for use, wanted in (("training", True), ("inference", False)):
            with torch.set_grad_enabled(wanted):
                verdicts = lg.explain(q.requires_grad_(wanted), k, k, encoding=encoding)
            takers = BY_NAME[name].backends[use]
            assert {v.backend for v in verdicts if v.refusal is None} == {*takers}
            assert next(v.backend for v in verdicts if v.chosen) == takers[0]
    assert all({"chunked", "reference"} <= {*facts.backends["training"]} <= {*BACKENDS} for facts in BY_NAME.values())


def test_source():
    assert BY_NAME["path_fox"].source.split("; ")[0].startswith("Yang et al. 2025, https://")
    assert {name for name, facts in BY_NAME.items() if not facts.source} <= {"clipped"}  # a table that has no paper
    assert all(entry["source"] for entry in FACTS["scaling"])
