"""Writes polar.json: queries and keys as an independent implementation of PoPE turns them, and their products.

pip install torch PoPE-pytorch
python tests/golden/make_polar.py
"""

import math

import torch
from PoPE_pytorch import PoPE
from tables import listed, numbers, save

LENGTH, HEADS, WIDTH = 7, 2, 4


def scores(base: float) -> dict:
    """q, k [heads, tokens, width], phase [heads, width] -> q . k before any scale [heads, tokens, tokens]."""
    q, k, phase = (numbers(*shape, seed=n) for n, shape in enumerate([(HEADS, LENGTH, WIDTH)] * 2 + [(HEADS, WIDTH)]))
    pope = PoPE(WIDTH, heads=HEADS, theta=base)
    with torch.no_grad():
        pope.bias.copy_(2 * phase - math.pi)  # some are beyond the ends
        turned_q, turned_k = pope.apply_pope_to_qk(pope(LENGTH), q[None], k[None])
    found = (turned_q @ turned_k.mT)[0]
    return {"base": base, "q": listed(q), "k": listed(k), "phase": listed(pope.bias.detach()), "scores": listed(found)}


save("polar", "torch PoPE-pytorch", small=scores(100.0), usual=scores(10_000.0))
