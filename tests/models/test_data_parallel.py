"""FSDP2 and DDP: two processes with half of a batch each are one with all of it."""

import pytest

import longitude as lg
from tests.ring_processes import data_parallel, in_processes


@pytest.mark.slow
@pytest.mark.timeout(900)  # 116 models in two processes
def test_two_processes_are_one(tmp_path):
    gaps = in_processes(2, data_parallel, tmp_path)
    assert len(gaps) == 2 * (len(lg.list_encodings()) + len(lg.list_mixers()))
    assert {name: gap for name, gap in gaps.items() if not gap < 1e-12} == {}
