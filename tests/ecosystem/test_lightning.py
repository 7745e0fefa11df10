"""Lightning trains our models as any module: the module of examples/."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="the extra `ecosystem` is not installed: make ecosystem")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ecosystem,
    # what Lightning asks of torch's pytrees
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


def test_it_trains(model, tmp_path):
    """The loss falls, at a longer length too; matrices alone decay."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lightning_module.py"))
    module = example["Decoder"](model, lr=0.02)
    decays = {group["weight_decay"] for group in module.configure_optimizers().param_groups}
    assert decays == {0.0, 0.1}
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    logged = example["fit"](module, 8, short=8, long=16, default_root_dir=tmp_path, **off)
    assert len(module.losses) == 24 and sum(module.losses[-3:]) < 0.9 * sum(module.losses[:3])
    assert 0 < logged["longer"] < 10
