"""The promises of `make bench`, each measured very small, and how they are judged. Nothing is timed."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
import rotation
import targets
from longitude.bench.cases import AttentionShape, Inputs
from longitude.bench.measurement import Row
from peers import ROTATIONS, installed
from target import Session, Target

SESSION = Session(threads=1, repeats=1, memory=False, peers=False, shrink=256)
QUICK = [target for target in targets.TARGETS if not target.environment]
SLOW = [target.name for target in QUICK if any(word in target.name for word in ("training", "135M", "padded"))]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "target", [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (one.name in SLOW)) for one in QUICK]
)
def test_a_target_is_measured(target):
    rows = target.rows(SESSION)
    outcome = target.outcome(rows)
    assert not [row.note for row in rows if row.note] and all(row.group == target.name for row in rows)
    if "memory" in target.name:
        assert rows == [] and outcome["measured"] is None and outcome["met"] is None
        return
    assert outcome["measured"] > 0 and outcome["met"] == (outcome["measured"] <= target.limit)
    assert any(row.kind == "plain" for row in rows)


# ---- what is compared is the same work -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ROTATIONS)
def test_a_peer_rotates_as_we_do(name):
    if name not in installed():
        pytest.skip(f"{name} is not installed")
    inputs = Inputs.of(AttentionShape(2, 4, 2, 8, 17))
    rope = lg.Rotary(head_dim=8, layout="half" if "Llama" in name else "interleaved")
    for got, x in zip(rotation.prepared(name, inputs)(), (inputs.q, inputs.k), strict=True):
        torch.testing.assert_close(got, rope.rotate(x, 0), atol=1e-5, rtol=1e-5)


# ---- how targets are judged and shown ------------------------------------------------------------------------------------
ONE = Row(
    name="a", kind="ours", backend="table", passed="forward", batch=1, heads=1, kv_heads=1, head_dim=1, length=1,
    dtype="float32", threads=1, clock="wall", turns=5, seconds=0.5, ratio=1.5, ratio_low=1.4, ratio_high=1.6,
)  # fmt: skip


def test_measured_is_the_worst_of_ours():
    rows = [ONE, replace(ONE, name="b", ratio=1.2), replace(ONE, name="c", ratio=9.0, kind="peer")]
    target = Target("t", 1.4, "plain", lambda session: rows)
    outcome = target.outcome(target.rows(SESSION))
    assert (outcome["measured"], outcome["met"], outcome["worst"]) == (1.5, False, "a, fwd, 1")
    scored = [replace(ONE, score=1.4), replace(ONE, name="b", score=0.3, ratio=7.0)]
    assert target.outcome(scored)["measured"] == 1.4 and target.outcome(scored)["met"] is True
