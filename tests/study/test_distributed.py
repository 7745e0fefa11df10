"""One model trained by several processes: each step is that of one process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from longitude.study.data import Windows
from longitude.study.execution import Execution
from longitude.study.executors import InProcess
from longitude.study.train import Steps
from tests.study.conftest import TINY


@pytest.fixture
def two_processes(monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_what_a_launcher_cannot_start_is_refused(two_processes):
    assert Execution().of(TINY, 4) == Execution(workers=1).of(TINY, 4) == InProcess()
    with pytest.raises(ValueError, match="--workers 2 trains models side by side, and under torchrun"):
        Execution(workers=2).of(TINY, 4)
    with pytest.raises(ValueError, match="--executor ray trains models side by side, and under torchrun"):
        Execution(executor="ray").of(TINY, 4)
    with pytest.raises(ValueError, match=r"--batch-size 5 .* expected a multiple of their number 2"):
        Execution().of(replace(TINY, batch_size=5), 4)
    with pytest.raises(ValueError, match="--device mps: torch trains in one process there"):
        Execution().of(replace(TINY, device="mps"), 4)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_of_all_processes_has_the_windows_of_one(processes, data):
    """accelerate deals batches of the smaller size in turn."""
    windows = Windows(data.training, 16, count=24, seed=1)
    whole = list(DataLoader(windows, batch_size=8))
    shares = [
        list(prepare_data_loader(DataLoader(windows, 8 // processes), num_processes=processes, process_index=i))
        for i in range(processes)
    ]
    assert [len(share) for share in shares] == [3] * processes
    for step, batch in enumerate(whole):
        dealt = torch.cat([share[step]["input_ids"] for share in shares])
        assert torch.equal(dealt, batch["input_ids"])


def test_a_loss_over_the_targets_of_all_processes_is_weighted_so(two_processes):
    """The mean over processes of what they keep is the loss of the whole step, whether or not their targets are as many."""
    steps = Steps(torch.nn.Linear(1, 1), None, None, None, None)  # type: ignore[arg-type]
    for named, kept in (({}, 3.0), ({"num_items_in_batch": torch.tensor(9)}, 6.0)):
        steps.keep_loss(None, (), named, SimpleNamespace(loss=torch.tensor(3.0)))
        assert steps.loss == kept
