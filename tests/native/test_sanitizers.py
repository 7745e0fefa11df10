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
for length in (5, 129):
    xl, clamped = lg.TransformerXL(3, 20, 24), lg.TransformerXL(3, 20, 24, clamp_length=11)
    for encoding in (xl, clamped, lg.Shaw(20, 9), [lg.ALiBi(3), lg.Shaw(20)]):
        q = torch.randn(2, length, 3, 20).transpose(1, 2).requires_grad_()
        for mask in (lg.Causal(), lg.Window(9), lg.NoMask()):
            lg.attend(q, q, q, encoding=encoding, mask=mask, backend="table").sum().backward()
for mixer in ("mamba", "s4d", "rwkv4", "gated_deltanet", "kda", "rwkv7"):
    torch.manual_seed(0)
    config = lg.LongitudeConfig(vocab_size=8, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, mixer=mixer)
    model = lg.LongitudeForCausalLM(config)
    for batch, length in ((1, 1), (2, 7), (1, 130)):
        x = torch.randint(8, (batch, length))
        model(x, labels=x).loss.nan_to_num().backward()
from tests.native.test_shapes import run_everything
run_everything()
print("compiled", *sorted(compiled))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no C compiler here")
def test_every_loop_runs_clean_under_sanitizers(tmp_path):
    """Of addresses and undefined behaviour; a report ends the process. What Python leaves at its end is no leak of ours."""
    asan = subprocess.check_output(["gcc", "-print-file-name=libasan.so"], text=True).strip()
    if not Path(asan).is_absolute():
        pytest.skip("gcc has no libasan here")
    environment = {
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    options = {"capture_output": True, "text": True, "timeout": 900, "cwd": ROOT, "env": os.environ | environment}
    done = subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)], **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].split()[1:] == [file.name for file in sorted(LOOPS, key=lambda file: file.name)]


THREADS = """
#include <pthread.h>
#include <stdlib.h>
#include SOURCE
typedef struct { void (*function)(void *); void *data; pthread_barrier_t together; } Start;
static void *begin(void *of) {
  Start *start = of;
  pthread_barrier_wait(&start->together); /* or the first one would have done all */
  start->function(start->data);
  return NULL;
}
static void team_of_pthreads(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
  pthread_t all[8];
  Start start = {function, data};
  pthread_barrier_init(&start.together, NULL, threads);
  for (unsigned i = 1; i < threads; i++) pthread_create(all + i, NULL, begin, &start);
  begin(&start);
  for (unsigned i = 1; i < threads; i++) pthread_join(all[i], NULL);
}
static float *some(num count) {
  float *x = malloc(count * sizeof(float));
  for (num i = 0; i < count; i++) x[i] = (float)(i * 7 % 13) / 13 - 0.4f;
  return x;
}
int main(void) {
  use_team(team_of_pthreads);
  CALLS
  return 0;
}
"""
CALLS = {
    "rotate.c": """
  enum { B = 2, H = 6, L = 300, D = 20 };
  struct { Call call; Heads tensors[2]; } all = {{some(L * 8), some(L * 8), B, L, 8, 0, 1, 4, 2}};
  for (int i = 0; i < 2; i++) all.tensors[i] = (Heads){some(B * H * L * D), some(B * H * L * D), H, D - 16, H * L * D, D, H * D,
                                                       H * L * D, D, H * D};
  rotate(&all.call);""",
    "band.c": """
  enum { B = 2, H = 4, L = 130, D = 24, V = 20, SIZE = B * H * L * D, N = 2 * L - 1 };
  Span spans[B] = {{0, 0, L, 0, L}, {1, 0, L, 0, L}};
  Shape s = {.batch = B, .heads = H, .groups = 2, .queries = L, .keys = L, .dim = D, .value_dim = V, .first = 0, .last = L - 1,
             .count = B, .most_queries = L, .most_keys = L, .splits = 2, .shares = 2, .scale = 0.2, .spans = spans, .threads = 4,
             .key_vectors = {some(N * D), calloc(4 * H * N * D, sizeof(float)), 0, N - 70},
             .value_vectors = {some(H * N * V), calloc(4 * H * N * V, sizeof(float)), N * V, N - 70}, .near = 70};
#define IN {some(SIZE), H * L * D, L * D, D}
#define OUT {calloc(2 * SIZE, sizeof(float)), H * L * D, L * D, D, SIZE}
  In q = IN, k = IN, v = IN, grad = IN;
  Out out = OUT, gq = OUT, gk = OUT, gv = OUT;
  float *table = some(H * N), *lse = some(B * H * L), *ends = some(2 * B * H * L);
  forward(&s, q, k, v, table, N, out, lse, ends, some(4 * forward_space(&s)));
  In made = {out.at, H * L * D, L * D, D};
  backward(&s, grad, q, k, v, made, table, N, ends, NULL, gq, gk, gv, calloc(4 * H * N, sizeof(float)),
           some(4 * backward_space(&s)));""",
    "wkv.c": """
  enum { B = 2, L = 300, C = 50 };
  Shape s = {B, L, C, 4};
  forward(&s, some(C), some(C), some(B * L * C), some(B * L * C), NULL, some(3 * B * C), some(B * L * C), some(3 * B * C));
  backward(&s, some(C), some(C), some(B * L * C), some(B * L * C), NULL, some(3 * B * C), some(B * L * C), some(3 * B * C),
           some(B * C), some(B * C), some(B * L * C), some(B * L * C), some(3 * B * C));""",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no C compiler here")
@pytest.mark.parametrize("name", [*CALLS, "a race"])
def test_tasks_share_nothing_that_one_writes(name: str, tmp_path: Path):
    """Under ThreadSanitizer, on four threads of its own making. It must find a planted race, or it finds none at all."""
    source = next(file for file in LOOPS if file.name == (name if name in CALLS else "wkv.c"))
    text = source.read_text()
    if name not in CALLS:  # all tasks write the gradients of the first channels
        text = text.replace("num b = i / blocks_of(s), c = i % blocks_of(s) * LANES, rest", "num b = 0, c = 0, rest", 1)
        assert text != source.read_text()
    (tmp_path / source.name).write_text(text)
    calls = CALLS.get(name, CALLS["wkv.c"])
    (tmp_path / "main.c").write_text(THREADS.replace("SOURCE", f'"{source.name}"').replace("CALLS", calls))
    program = tmp_path / "main"
    options = [
        "-fsanitize=thread",
        "-g",
        "-O1",
        "-w",
        "-pthread",
        f"-I{source.parent}",
        f"-I{ROOT}/src/longitude/native",
    ]
    command = ["gcc", *options, "-o", str(program), str(tmp_path / "main.c"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip("gcc has no libtsan here")
    assert done.returncode == 0, done.stderr[-3000:]
    for _ in range(1 if name in CALLS else 20):  # on a busy machine one thread may have done all before another began
        ran = subprocess.run([program], capture_output=True, text=True, timeout=600)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("ThreadSanitizer cannot run under this kernel")
        if raced := "data race" in ran.stderr:
            break
    assert raced if name == "a race" else ran.returncode == 0 and not raced, ran.stderr[-3000:]
