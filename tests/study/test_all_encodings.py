"""Everything registered goes through a study: trained, resumable, measured past its length, or refused with a reason."""

from dataclasses import replace

import pytest

from longitude.measure import read_rows
from longitude.positions.base import list_encodings
from longitude.study.plan import checked
from longitude.study.runner import run_trial
from longitude.study.trial import Trial
from tests.study.conftest import TINY

WIDE = replace(TINY, test_lengths=(16, 48), layers=2, hidden=32, heads=4, methods=("non-overlapping",))


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["contiguous", "skipped"])
@pytest.mark.parametrize("name", list_encodings())
def test_it_is_trained_and_measured(name, positions, data, tmp_path):
    trial = Trial(tmp_path, name, 0)
    status = run_trial(checked(replace(WIDE, positions=positions)), trial, data)
    assert status.status == "done" and status.step == 4
    rows = read_rows(trial.folder / "results.parquet")
    bounded = name == "learned" and positions == "contiguous"
    assert list(rows["length"]) == ([16] if bounded else [16, 48]) and rows["value"].notna().all()
    assert ("no positions from 16 on" in (status.reason or "")) == bounded
