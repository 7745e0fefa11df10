"""What --plan says of a study: FLOPs counted by hand, and time that a run is compared with."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longitude.cli import main
from longitude.runs.costs import Cost
from longitude.study import train
from longitude.study.plan import wall_seconds
from longitude.study.train import build_model, on_meta
from tests.study.conftest import TINY

pytestmark = pytest.mark.usefixtures("numbers")


def flops_per_token(config, label):
    return train.flops_per_token(config, on_meta(config, label))


@pytest.mark.parametrize(
    ("mixer", "products"),
    [
        ("attention", 2 * 8 * 32),  # queries and keys, weights and values: of 8 keys on average
        ("window:size=4", 2 * 4 * 32),
        ("latent:kv_rank=8,nope_dim=16,rope_dim=8,value_dim=16", 8 * 2 * (16 + 8 + 16)),
        ("retention:head_dim=16", 2 * 2 * 16 * 32),  # what is added to and read of a matrix of each head
        ("mamba:state_size=16", 2 * 64 * 16),
        ("mamba2:state_size=8,head_dim=16", 2 * 64 * 8),
        ("s4d:state_size=6", 2 * 32 * 6),
        ("performer:features=24", 4 * 2 * 24 * 16),
        ("rwkv4", 0),
        ("gated_deltanet", 3 * 2 * 16 * 32),  # two reads and a write
        ("kda", 3 * 2 * 16 * 16),
        ("mamba3:state_size=8,head_dim=16", 3 * 64 * 8),  # each token is written twice
        ("rwkv6:mix_rank=4,decay_rank=4", 2 * 2 * 16 * 16 + 2 * 5 * 4 * 32 + 2 * 4 * 32),
        ("rwkv7:decay_rank=4,rate_rank=4,gate_rank=8", 4 * 2 * 16 * 16 + 2 * (4 + 4 + 8) * 32),
        ("hierarchical:window=4", 2 * (4 + 3) * 32),  # a window, and a block for each doubling of 8
        ("indexed:k_top=4,index_heads=2,index_dim=8", 2 * 4 * 32 + 8 * 2 * 8),
        ("parallel:state.state_size=8,state.head_dim=16", 2 * 8 * 32 + 2 * 64 * 8),
    ],
)
def test_products_that_are_no_linear_layer(mixer, products):
    config = replace(TINY, layers=1, hidden=32, heads=2, train_length=16)
    model = on_meta(config, mixer)
    assert model.model.mixers[0].products(8) == products
    linear = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    assert flops_per_token(config, mixer) == 6 * (linear + products)


@pytest.mark.parametrize("label", ["nope", "fox", "rope+latent", "mamba", "rwkv4"])
def test_products_of_linear_layers_are_those_that_torch_counts(label):
    config = replace(TINY, layers=2, hidden=32, heads=2, train_length=16)
    model = build_model(config, label, 0).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(3, 16, dtype=torch.long))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    counted = sum(flops for op, flops in counts.items() if "mm" in op and "bmm" not in op)
    products = sum(mixer.products(8) for mixer in model.model.mixers)
    assert flops_per_token(config, label) == 3 * counted / (3 * 16) + 6 * products


def test_trials_side_by_side():
    seconds = [("training", 3), ("measuring", 1), ("training", 1), ("measuring", 1)]
    each = [Cost(model="", part=part, length=1, tokens=1, flops=1, seconds=took) for part, took in seconds]
    assert wall_seconds(each, seeds=2, workers=1) == 12
    assert wall_seconds(each, seeds=2, workers=2) == 6
    assert wall_seconds(each, seeds=2, workers=1, rates=3) == (3 * 4 + 2) + (4 + 2)
    assert wall_seconds(each, seeds=2, workers=4, rates=2) == 3 + 4  # the first seed is trained before any is measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_study_for_a_gpu_is_planned_without_one(tmp_path, capsys):
    given = ["study", "--device", "cuda", "--precision", "bfloat16", "--encodings", "rope", "--plan", "--json"]
    assert main([*given, "--out", str(tmp_path / "none")]) == 0
    training, measuring = json.loads(capsys.readouterr().out)
    assert training["flops"] > 1e9 and training["memory"]
    assert training["seconds"] is None and measuring["seconds"] is None and not list(tmp_path.iterdir())
