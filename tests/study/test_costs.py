"""What --plan says of a study: FLOPs counted by hand, and time that a run is compared with."""

from dataclasses import replace
from pathlib import Path

import pytest

from longitude.study.costs import Cost, costs, flops_per_token, wall_seconds
from longitude.study.plan import plan
from tests.study.conftest import TINY, run

pytestmark = pytest.mark.usefixtures("numbers")


def test_flops_are_six_for_each_weight_of_a_product_and_those_of_attention():
    config = replace(TINY, layers=2, hidden=32, heads=2, train_length=16)
    rope, recurrent = flops_per_token(config, "rope"), flops_per_token(config, "retention")
    from longitude.study.train import build_model

    model = build_model(config, "rope", 0)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    weights += 32 * 256 * (model.lm_head.weight is model.get_input_embeddings().weight)  # tied: a product all the same
    assert rope == 6 * weights + 3 * 2 * 2 * 2 * 8 * 32  # forward and backward, 2 products, 2 layers, 8 keys on average
    assert recurrent > 0


def test_trials_side_by_side():
    each = [Cost("a", 1, 1, 1, 1, 1, 3, 1), Cost("b", 1, 1, 1, 1, 1, 1, 1)]
    assert wall_seconds(each, seeds=2, workers=1) == 12
    assert wall_seconds(each, seeds=2, workers=2) == 6
    assert wall_seconds(each, seeds=2, workers=1, rates=3) == 2 * (3 * 4 + 2)
    assert wall_seconds(each, seeds=2, workers=4, rates=2) == 5 + 1  # all are trained before any is measured


@pytest.mark.slow
def test_a_plan_counts_the_parameters_of_the_run_and_writes_nothing(tmp_path):
    config = replace(TINY, encodings=("rope",), steps=200, hidden=64, batch_size=8, methods=("non-overlapping",))
    [cost] = costs(plan(config, Path(tmp_path / "none")))
    outcome, _ = run(config, tmp_path / "run")
    [(_, status)] = outcome.trials
    assert cost.parameters == status.parameters
    assert status.training_seconds is not None
    print(f"training {cost.training_seconds / status.training_seconds:.2f}")
    assert not (tmp_path / "none").exists()
