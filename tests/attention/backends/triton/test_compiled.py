"""The kernels are compiled for generations of chips, without one: none spills, each fits into the chip's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
SCRIPT = Path(__file__).parents[4] / "benchmarks" / "gpu_kernels.py"


def compiled(tmp_path, *arguments):
    """Rows of what the assembler says, by a process in which Triton compiles and does not interpret."""
    quiet = {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | quiet
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "rows.json"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (tmp_path / "rows.json").exists(), done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    bad = [row for row in found if row["spilled"] or not row["fits"]]
    assert not bad and done.returncode == 0, done.stdout
    # In the loop over keys there is none: Triton would load nothing ahead of its use.
    assert all(row["ahead"] for row in found if row["kernel"] != "rotate" and row["num_stages"] > 1)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", ["80", "86", "89", "90", "100", "120"])
def test_for_every_width_and_bias(tmp_path, chip):
    found = compiled(tmp_path, "--chips", chip, "--widths", "32", "64", "128")
    assert len(found) == 3 * (3 * 5 + 3 + 2)
