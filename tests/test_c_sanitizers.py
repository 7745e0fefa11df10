"""The loops in C under sanitizers, over shapes and masks of the laws; and how much C there may be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOOPS = sorted((ROOT / "src").rglob("*.c"))
LINES = 1720
"""Of C, headers included (docs/decisions.md)."""
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")

DRIVER = f"""
import os
import warnings
del os.environ["LD_PRELOAD"]  # gcc takes many times as long with it, and is given a minute
warnings.simplefilter("error", RuntimeWarning)
from longitude import c_build, c_compile
c_build.FLAGS += {FLAGS}
compiled, library = set(), c_compile.library
def recorded(source, *options):
    compiled.add(source.name)
    return library(source, *options)
c_compile.library = recorded

import torch
import longitude as lg
from longitude.attention.backends import routes
from longitude.testing.attend_calls import masks as masks_of

torch.set_num_threads(2)
everywhere = {{f"{{p}} {{d}}": {{"256": 1}} for p in ("forward", "training") for d in ("float32", "bfloat16")}}
with routes.repeated(everywhere):
    sizes = (1, 1, 3, 2), (7, 7, 16, 1), (3, 50, 24, 2), (67, 67, 24, 1), (50, 130, 80, 2), (9, 5, 4, 2)
    for rows, keys, dim, kv_heads in sizes:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            masks = masks_of(3, keys, True).values() if rows <= keys and dtype == torch.float32 else (lg.Causal(), lg.NoMask())
            for mask in masks:
                for encoding in (None, lg.ALiBi(2), lg.T5Bias(2)):
                    shape = ((rows, 2), (keys, kv_heads), (keys, kv_heads))
                    q, k, v = (torch.randn(3, n, h, dim, dtype=dtype).transpose(1, 2).requires_grad_() for n, h in shape)
                    verdicts = lg.explain(q, k, v, encoding=encoding, mask=mask)
                    if not any(x.backend == "table" and x.refusal is None for x in verdicts):
                        continue
                    lg.attend(q, k, v, encoding=encoding, mask=mask, backend="table").sum().backward()
    for layout in ("half", "interleaved"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for length in (1, 7, 129):
                q = torch.randn(2, length, 3, 20, dtype=dtype).transpose(1, 2).requires_grad_()
                lg.attend(q, q, q, encoding=lg.Rotary(20, layout)).sum().backward()
for encoding in (lg.Fire(3, threshold=9.0), lg.CoPE(20, max_position=4)):
    for dtype in (torch.float32, torch.float64):
        for length in (5, 7, 129):
            q = torch.randn(2, length, 3, 20, dtype=dtype).transpose(1, 2).requires_grad_()
            for mask in (lg.Causal(), lg.Causal() & lg.Documents(torch.arange(length) // 50), lg.NoMask()):
                if isinstance(encoding, lg.Fire) or not isinstance(mask, lg.NoMask):
                    lg.attend(q, q, q, encoding=encoding.to(dtype), mask=mask, backend="table").sum().backward()
for mixer in ("mamba", "s4d", "rwkv4", "gated_deltanet", "kda", "rwkv7"):
    torch.manual_seed(0)
    config = lg.LongitudeConfig(vocab_size=8, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, mixer=mixer)
    model = lg.LongitudeForCausalLM(config)
    for batch, length in ((1, 1), (2, 7), (1, 130)):
        x = torch.randint(8, (batch, length))
        model(x, labels=x).loss.nan_to_num().backward()
print("compiled", *sorted(compiled))
"""


def test_c_stays_small():
    files = [file for end in ("c", "h") for file in (ROOT / "src").rglob(f"*.{end}")]
    assert sum(file.read_text().count("\n") for file in files) <= LINES
    assert all(file.read_text().startswith("/*") for file in files)  # each begins with what it is for


@pytest.mark.slow
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
        "XDG_CACHE_HOME": str(tmp_path),
        "LONGITUDE_COMPILE": "native",
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=900, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].split()[1:] == [file.name for file in sorted(LOOPS, key=lambda file: file.name)]
