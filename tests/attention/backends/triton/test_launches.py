"""Calls as `launch` makes them are compiled for an H100 that is not there: with their very tensors, strides and numbers.

test_compiled.py asks what the assembler says of each kernel; here Triton itself decides which kernels a call needs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
ROOT = Path(__file__).parents[4]
CALLS = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from longitude.attention.backends.triton import kernels, launch
from longitude.attention.backends.operators import Inputs
from longitude.positions.gpu import rotate
from longitude.positions.rotation import Angles

class Chip:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Chip())
made = []

class Compiled:
    '''Compiles, and launches nothing.'''
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def call(*given, **named):
            found = self.kernel.warmup(*given, grid=grid, **named)
            if all(found is not each for each, _ in made):
                made.append((found, self.kernel.__name__))
        return call

for name in launch.KERNELS:
    setattr(kernels, name, Compiled(getattr(kernels, name)))
rotate.kernel = Compiled(rotate.kernel)
launch.blocks_of = lambda kernel, x: (launch.MIXED if x.terms.mix is not None else launch.blocks_for(
    9, launch.wide(max(x.q.shape[3], x.v.shape[3])), x.limits.cap > 0 or x.terms.curves is not None
    or (x.terms.table is not None and x.terms.q_level is not None)))[launch.KERNELS.index(kernel)]

def inputs(adds, rows, keys, *, batch=2, heads=4, kv_heads=2, d=64, dv=64, dtype=torch.bfloat16, own=False):
    q = torch.zeros(batch, rows, heads, d, dtype=dtype).transpose(1, 2)
    k = torch.zeros(batch, keys, kv_heads, d, dtype=dtype).transpose(1, 2)
    v = torch.zeros(batch, 1, keys, dv, dtype=dtype).expand(-1, kv_heads, -1, -1)
    table = torch.zeros(heads, rows + keys - 1) if adds in ("table", "both", "curves") else None
    levels = (torch.zeros(batch, heads, rows), torch.zeros(batch, heads, keys)) if adds in ("levels", "both") else (None, None)
    curves, rates = (torch.zeros(heads, 3, 33), torch.ones(batch, 1, rows)) if adds == "curves" else (None, None)
    lo = torch.zeros(batch if own else 1, rows, dtype=torch.int32)
    mix = torch.zeros(batch, heads, rows, 33, dtype=dtype) if adds == "mix" else None
    terms = launch.Terms(table, *levels, curves, rates, mix)
    return Inputs(q, k, v, terms, launch.Limits(lo, lo + keys, keys - 1, 20.0 * (adds == "cap")), 0.125)

def attend(*shape, backward=True, learned=True, **options):
    x = inputs(*shape, **options)
    out, lse = launch.forward(x)
    if backward:
        launch.backward(x, torch.ones_like(out), None, out, lse, learned)

def turn(batch, heads, kv_heads, length, width, pairs, layout):
    q = torch.zeros(batch, length, heads, width, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.zeros(batch, length, kv_heads, width, dtype=torch.bfloat16).transpose(1, 2)
    rotate.rotate((q, k), Angles(torch.zeros(length, pairs), torch.zeros(length, pairs)), layout)

def step(name):
    print(json.dumps([name, len(made)]), flush=True)

"""
SIZES = """
attend("table", 64, 64)
step("training")
for rows, keys, heads, kv_heads, batch, own in ((1, 1, 1, 1, 1, False), (1, 515, 4, 4, 3, True), (37, 101, 6, 2, 2, False)):
    attend("table", rows, keys, heads=heads, kv_heads=kv_heads, batch=batch, own=own)
step("other sizes")
turn(2, 4, 2, 64, 64, 32, "half")
step("rotation")
turn(1, 1, 1, 1, 64, 32, "half")
turn(3, 5, 1, 37, 64, 32, "half")
step("other rotations")
turn(2, 4, 2, 64, 64, 32, "interleaved")
step("pairs")
for found, name in made[3:]:
    wide = re.findall(r"[ls][dt].global\\.[\\w.]+", found.asm["ptx"])
    assert wide and all(".v" in each for each in wide), wide  # a thread reads and writes 8 bytes or more at a time
"""
MANY = """
for dtype in (torch.float16, torch.bfloat16):
    for adds in ("nothing", "levels", "both", "curves", "cap", "mix"):
        for d, dv in ((64, 64), (128, 128), (100, 24), (16, 16)):
            attend(adds, 37, 101, d=d, dv=dv, dtype=dtype)
for adds in ("nothing", "table", "both", "curves", "cap", "mix"):  # as the laws run on CUDA
    attend(adds, 37, 101, d=16, dv=16, dtype=torch.float32)
attend("table", 64, 64, learned=False)
launch.far = lambda x: True
for adds in ("nothing", "table", "both", "curves"):
    attend(adds, 64, 64, d=128, dv=128)
for layout in ("half", "interleaved"):
    for width, pairs in ((128, 64), (80, 10), (64, 16)):
        turn(2, 4, 2, 64, width, pairs, layout)
step("all")
biggest = max(found.metadata.shared for found, _ in made)
assert biggest <= 227 * 1024, biggest
"""


def steps(code: str, tmp_path: Path) -> dict[str, int]:
    """Kernels that were compiled up to each step, by a process in which Triton compiles and does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CALLS + code], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.slow
def test_sizes_are_no_other_kernels(tmp_path):
    """Triton makes a kernel for a number that is 1, and for multiples of 16, of its own: a length more would be a compilation."""
    found = steps(SIZES, tmp_path)
    assert found == {"training": 3, "other sizes": 3, "rotation": 4, "other rotations": 4, "pairs": 5}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_kind_of_call_compiles(tmp_path):
    assert steps(MANY, tmp_path)["all"] > 100
