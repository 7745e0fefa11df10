"""Writes log_linear.json: log-linear attention as flash-linear-attention's naive function computes it, in float32.

pip install torch flash-linear-attention
python tests/golden/make_log_linear.py
"""

from fla.ops.log_linear_attn.naive import naive_log_linear_attn
from tables import listed, numbers, save

LENGTH, GROUPS, HEADS, WIDTH, VALUES, LEVELS = 19, 1, 2, 3, 2, 6
q, k = numbers(2, 1, LENGTH, GROUPS, WIDTH, seed=0)
v, g = numbers(1, LENGTH, HEADS, VALUES, seed=1), -numbers(1, LENGTH, HEADS, seed=2).abs()
scales = numbers(1, LENGTH, HEADS, LEVELS, seed=3).abs()
given = {"q": q, "k": k, "v": v, "log_decay": g, "scales": scales}
found = given | {"out": naive_log_linear_attn(q, k, v, g, scales)}
save("log_linear", "torch flash-linear-attention", small={name: listed(x[0]) for name, x in found.items()})
