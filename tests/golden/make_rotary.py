"""Writes rotary.json: rotations of independent implementations, as tables of numbers.

pip install torch x-transformers rotary-embedding-torch
python tests/golden/make_rotary.py
"""

import rotary_embedding_torch
import tables
import torch
from tables import listed
from x_transformers import x_transformers

LENGTH, DIM = 6, 12


def numbers(*shape: int) -> torch.Tensor:
    return tables.numbers(*shape, seed=len(shape) + shape[-1])


def rotated() -> list[dict]:
    """x at positions 0 .. as each source rotates it."""
    x = numbers(1, 2, LENGTH, DIM)
    lang = rotary_embedding_torch.RotaryEmbedding(DIM, freqs_for="lang", cache_if_possible=False)
    other = x_transformers.RotaryEmbedding(DIM)
    theirs = {
        "rotary_embedding_torch": lang.rotate_queries_or_keys(x),
        "x_transformers": x_transformers.apply_rotary_pos_emb(x, other.forward_from_seq_len(LENGTH)[0]),
    }
    return [{"source": name, "x": listed(x), "rotated": listed(y)} for name, y in theirs.items()]


def xpos() -> list[dict]:
    """Scores q . k between positions 0 ..; where sources put the origin of their exponents does not show in them."""
    q, k = numbers(1, 2, LENGTH, DIM), numbers(2, 1, 2, LENGTH, DIM)[0]
    rows = []
    for scale_base in (512, 8):
        first = rotary_embedding_torch.RotaryEmbedding(
            DIM, use_xpos=True, xpos_scale_base=scale_base, cache_if_possible=False
        )
        rotated_q, rotated_k = first.rotate_queries_and_keys(q, k)
        second = x_transformers.RotaryEmbedding(DIM, use_xpos=True, scale_base=scale_base)
        angles, scale = second.forward_from_seq_len(LENGTH)
        other_q = x_transformers.apply_rotary_pos_emb(q, angles, scale)
        other_k = x_transformers.apply_rotary_pos_emb(k, angles, scale**-1)
        rows += [
            {"source": source, "scale_base": scale_base, "q": listed(q), "k": listed(k), "scores": listed(s)}
            for source, s in (
                ("rotary_embedding_torch", rotated_q @ rotated_k.mT),
                ("x_transformers", other_q @ other_k.mT),
            )
        ]
    return rows


if __name__ == "__main__":
    with torch.no_grad():
        tables.save("rotary", "torch x-transformers rotary-embedding-torch", rotated=rotated(), xpos=xpos())
