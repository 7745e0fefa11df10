"""The loops in C under sanitizers, over shapes and masks of the laws."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = sorted((ROOT / "src").rglob("*.c"))
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")

DRIVER = f"""
import os
import warnings
import sys
from pathlib import Path
del os.environ["LD_PRELOAD"]  # gcc takes many times as long with it
warnings.simplefilter("error", RuntimeWarning)
from longitude.native import build, load
build.FLAGS, build.COMPILED = tuple(flag for flag in build.FLAGS if flag not in ("-O3", "-s")) + {FLAGS}, Path(sys.argv[1])
machine = build.platform.machine()
build.compile_all(machine, build.levels_of(machine, build.cpuinfo())[:1], to=build.COMPILED)
compiled, library = set(), load.library
def recorded(source, *options):
    compiled.add(source.name)
    return library(source, *options)
load.library = recorded

import torch
import longitude as lg
from longitude.testing.attend_calls import masks as masks_of

torch.set_num_threads(2)
sizes = (1, 1, 3, 2), (7, 7, 16, 1), (3, 50, 24, 2), (67, 67, 24, 1), (50, 130, 80, 2), (9, 5, 4, 2)
for rows, keys, dim, kv_heads in sizes:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        masks = masks_of(3, keys, True).values() if rows <= keys and dtype == torch.float32 else (lg.Causal(), lg.NoMask())
        for mask in masks:
            for encoding in (None, lg.ALiBi(2), lg.T5Bias(2)):
                shape = ((rows, 2, dim), (keys, kv_heads, dim), (keys, kv_heads, abs(dim - 21)))
                q, k, v = (torch.randn(3, *each, dtype=dtype).transpose(1, 2).requires_grad_() for each in shape)
                verdicts = lg.explain(q, k, v, encoding=encoding, mask=mask)
                if not any(x.backend == "table" and x.refusal is None for x in verdicts):
                    continue
                lg.attend(q, k, v, encoding=encoding, mask=mask, backend="table").sum().backward()
from tests.native.test_shapes import run_everything
run_everything()
print("compiled", *sorted(compiled))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no C compiler here")
def test_every_loop_runs_clean_under_sanitizers(tmp_path):
    """Of addresses and undefined behaviour; a report ends the process. What Python leaves at its end is no leak of ours."""
    asan = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("gcc has no libasan here")
    environment = {
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].split()[1:] == [file.name for file in sorted(LOOPS, key=lambda file: file.name)]
