"""Writes mamba3.json: the recurrence of Mamba-3 as the authors' own reference computes it, in float32.

pip install torch einops; git clone https://github.com/state-spaces/mamba
python tests/golden/make_mamba3.py mamba

The reference is a function of their tests, which import their kernels for GPUs: it is taken out of the file alone.
"""

import ast
import math
import subprocess
import sys

import torch
import torch.nn.functional as F
from einops import repeat
from tables import listed, numbers, save

FILE, NAME = "tests/ops/triton/test_mamba3_siso.py", "mamba3_siso_step_ref"
LENGTH, HEADS, KEYS, VALUES, PAIRS = 11, 2, 6, 3, 2


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", sys.argv[1], *words], capture_output=True, text=True, check=True).stdout


tree = ast.parse(git("show", f"HEAD:{FILE}"))
[function] = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == NAME)
function.returns = None
for argument in function.args.args:
    argument.annotation = None
names = {"torch": torch, "F": F, "repeat": repeat, "math": math}
exec(compile(ast.Module([function], []), FILE, "exec"), names)

q, k = numbers(2, 1, LENGTH, HEADS, KEYS, seed=0)
v, speed = numbers(1, LENGTH, HEADS, VALUES, seed=1), numbers(1, LENGTH, HEADS, PAIRS, seed=2)
step, decay, trap = (numbers(1, HEADS, LENGTH, seed=seed) for seed in (3, 4, 5))
step, decay = step.abs(), -decay.abs()
bias = numbers(2, HEADS, KEYS, seed=6)
out, (angle, matrix, _, _) = names[NAME](q, k, v, decay, step, trap, *bias, speed)
given = {"q": q, "k": k, "v": v, "log_decay": decay, "step": step, "trap": trap, "speed": speed, "bias": bias[None]}
found = {"out": out, "angle": angle, "matrix": matrix}
case = {name: listed(x[0]) for name, x in (given | found).items()}
save("mamba3", "torch einops", commit=git("rev-parse", "HEAD").strip(), small=case)
