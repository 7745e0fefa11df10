"""Writes sparse.json: native sparse attention as flash-linear-attention's naive functions compute it, in float32.

pip install torch flash-linear-attention
python tests/golden/make_sparse.py

Summaries are averages of blocks that do not overlap, keys are shared by the branches. The window and the averages need a GPU
there: there is no window, and averages are torch's.
"""

import torch.nn.functional as F
from fla.ops.nsa import naive
from tables import listed, numbers, save

LENGTH, HEADS, WIDTH, BLOCK, COUNT = 30, 16, 3, 4, 4  # theirs takes groups of 16 heads or more
q = numbers(1, LENGTH, HEADS, WIDTH, seed=0)
k, v = numbers(2, 1, LENGTH, 1, WIDTH, seed=1)
gates = numbers(2, 1, LENGTH, HEADS, seed=2).sigmoid().round(decimals=3)
naive.mean_pooling = lambda x, size, _: F.pad(x, (0, 0, 0, 0, 0, -LENGTH % size)).unflatten(1, (-1, size)).mean(2)
options = {"block_counts": COUNT, "block_size": BLOCK, "scale": 1.0, "return_block_indices": True}
out, blocks = naive.naive_nsa(q, k, v, *gates, **options)
found = {"q": q[0], "k": k[0, :, 0], "v": v[0, :, 0], "gates": gates[:, 0], "out": out[0]}
case = {name: listed(x) for name, x in found.items()}
case |= {"block": BLOCK, "count": COUNT, "chosen": [sorted({*row} - {-1}) for row in blocks[0, :, 0].tolist()]}
save("sparse", "torch flash-linear-attention", small=case)
