"""Everything registered goes through a study: trained, resumable, measured past its length, or refused with a reason."""

from dataclasses import replace

import pytest

from longitude.measure import read_rows
from longitude.positions.base import list_encodings
from longitude.study.config import StudyConfig
from longitude.study.data import Text, split
from longitude.study.plan import checked
from longitude.study.runner import run_trial
from longitude.study.trial import Trial

TINY = StudyConfig(
    train_length=16, test_lengths=(16, 48), steps=4, batch_size=2, layers=2, hidden=32, heads=4, device="cpu",
    methods=("non-overlapping",),
)  # fmt: skip
DOCUMENTS = [(str(i), " ".join(str(j * j) for j in range(i, i + 200)).encode()) for i in range(30)]


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["contiguous", "skipped"])
@pytest.mark.parametrize("name", list_encodings())
def test_it_is_trained_and_measured(name, positions, tmp_path):
    config = checked(replace(TINY, positions=positions))
    cell = Trial(tmp_path, name, 0)
    status = run_trial(config, cell, split(Text("numbers", DOCUMENTS), 48, 16, 4))
    assert status.status == "done" and status.step == 4
    rows = read_rows(cell.folder / "results.parquet")
    bounded = name == "learned" and positions == "contiguous"
    assert list(rows["length"]) == ([16] if bounded else [16, 48]) and rows["value"].notna().all()
    assert ("no positions from 16 on" in (status.reason or "")) == bounded


def test_all_is_every_registered_name():
    assert checked(StudyConfig(encodings=("all",))).encodings == tuple(list_encodings())
