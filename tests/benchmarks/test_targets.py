"""The promises of `make bench` and `make bench-mixers`, each measured very small, and how they are judged. Nothing is timed."""

from dataclasses import replace

import pytest
import torch

import longitude as lg
import rotation
import targets
import targets_mixers
from longitude.attention.mixer import mixer
from longitude.bench.cases import AttentionShape, Inputs
from longitude.bench.rows import Row
from peers import ROTATIONS, installed
from target import Session, Target

SESSION = Session(threads=1, repeats=1, memory=False, peers=False, shrink=256)
QUICK = [target for target in targets.TARGETS if not target.environment and not target.name.startswith("graphs")]
SLOW = ("training", "recurren", "135M", "padded")


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] * any(word in each.name for word in SLOW))
        for each in (*QUICK, *targets_mixers.TARGETS)
    ],
)
def test_a_target_is_measured(target):
    rows = target.rows(SESSION)
    outcome = target.outcome(rows)
    assert not [row.note for row in rows if row.note] and all(row.group == target.name for row in rows)
    if "memory" in target.name:
        assert rows == [] and outcome["measured"] is None and outcome["met"] is None
        return
    assert outcome["measured"] > 0 and outcome["met"] == (outcome["measured"] <= target.limit)
    assert outcome["how"] and any(row.kind == "plain" for row in rows)


# ---- what is compared is the same work -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_peer_rotates_as_we_do(name):
    if name not in installed():
        pytest.skip(f"{name} is not installed")
    inputs = Inputs.of(AttentionShape(2, 4, 2, 8, 17))
    rope = lg.Rotary(head_dim=8, layout="half" if "Llama" in name else "interleaved")
    for got, x in zip(rotation.prepared(name, inputs)(), (inputs.q, inputs.k), strict=True):
        torch.testing.assert_close(got, rope.rotate(x, 0), atol=1e-5, rtol=1e-5)


def test_a_formula_is_the_same_in_both_forms():
    formulas = targets_mixers.formulas(37)
    assert {*formulas} == {*targets_mixers.recurrences()}
    for name, each in formulas.items():
        chunks, steps = each.run("chunked"), each.run("recurrent")
        torch.testing.assert_close(chunks, steps, atol=1e-3, rtol=1e-3, msg=lambda words, name=name: f"{name}: {words}")
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(chunks.sum(), each.wanted))


def test_the_steps_of_a_layer_are_its_chunks():
    for name in targets_mixers.recurrences():
        torch.manual_seed(0)
        layer = mixer(name, **targets_mixers.of_width(name))
        x = torch.randn(1, 9, targets_mixers.WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(targets_mixers.token_by_token(layer, x), layer(x), atol=1e-4, rtol=1e-4)


def test_plain_latent_attention_does_the_same_work():
    own, plain, rope = targets_mixers.latents()
    x = torch.randn(2, 19, targets_mixers.WIDTH)
    got, want = plain(x, *targets_mixers.angles(19, own.rope_dim)), own(x, encoding=rope)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    mine, theirs = (sum(p.numel() for p in model.parameters()) for model in (own, plain))
    assert mine == theirs


def test_plain_encoder_decoder_has_the_same_matrices():
    own, plain = targets_mixers.seq2seqs()
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert own(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.shape == plain(ids, ids).shape
    matrices = [sum(p.numel() for p in model.parameters() if p.dim() > 1) for model in (own, plain)]
    assert matrices[0] == matrices[1]


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
