"""Writes rwkv7.json: the time mixing of RWKV-7's first layer, as the authors' package computes it, in float32.

pip install torch rwkv
RWKV_V7_ON=1 python tests/golden/make_rwkv7.py
"""

import torch
from rwkv.model import RWKV_x070_TMix_seq
from tables import listed, numbers, save

LENGTH, HEADS, HEAD_DIM, RANK = 9, 2, 4, 3
WIDTH = HEADS * HEAD_DIM
MIXES = [f"x_{name}" for name in "rwkvag"]
VECTORS = ["w0", "a0", "k_k", "k_a", "r_k", "ln_w", "ln_b"]
RANKS = ["w1", "w2", "a1", "a2", "g1", "g2"]
MATRICES = ["R_", "K_", "V_", "O_"]
ORDER = (
    *MIXES, "w0", "w1", "w2", "a0", "a1", "a2", "v0", "v1", "v2", "g1", "g2", "k_k", "k_a", "r_k", *MATRICES, "ln_w", "ln_b",
)  # fmt: skip


def shape(name: str) -> tuple[int, ...]:
    if name in RANKS:
        return (WIDTH, RANK) if name.endswith("1") else (RANK, WIDTH)
    return (WIDTH, WIDTH) if name in MATRICES else (WIDTH,)


names = MIXES + VECTORS + RANKS + MATRICES
given = {name: numbers(*shape(name), seed=n) for n, name in enumerate(names)}
x, nothing = numbers(LENGTH, WIDTH, seed=99), torch.zeros(WIDTH)
weights = [given.get(name, nothing) for name in ORDER]  # v0, v1 and v2 are of later layers
state = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM)
with torch.no_grad():
    out, _, state, _ = RWKV_x070_TMix_seq(0, HEADS, HEAD_DIM, x, nothing, nothing, state, *weights)
layer = {name: listed(t) for name, t in (given | {"x": x, "out": out}).items()}
save("rwkv7", "torch rwkv", layer=layer, state=listed(state))
