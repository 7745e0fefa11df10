"""Writes biases.json: slopes, buckets and sinusoids of independent implementations, as tables of numbers.

pip install torch "transformers==5.23.0" x-transformers
python tests/golden/make_biases.py
"""

import torch
from tables import save
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

BUCKETS = [(32, 128), (64, 1024), (32, 256), (128, 2048), (64, 128), (8, 20), (4, 3), (6, 10), (10, 37)]
RELATIVE = torch.arange(-300, 301)
"""key - query, as these sources count."""

BIASED = [(8, 8), (3, 5), (6, 12), (1, 4)]
"""(biased heads, all heads)."""


def column_slopes(alibi: torch.Tensor) -> list[float]:
    """Of a bias [heads, 1, keys] that is linear in the key: its slope per head."""
    return (alibi[:, 0, 1] - alibi[:, 0, 0]).tolist()


def alibi() -> dict:
    ones = torch.ones(1, 2)
    return {
        "x_transformers": [AlibiPositionalBias(n).slopes.flatten().tolist() for n in range(1, 41)],
        "bloom": [column_slopes(bloom_alibi(ones, n, torch.float32)) for n in range(1, 41)],
        "falcon_bfloat16": [column_slopes(falcon_alibi(ones, n, torch.float32)) for n in range(1, 41)],
        "mpt": [column_slopes(build_mpt_alibi_tensor(n, 2)) for n in range(1, 34)],
        "x_transformers_bias": [
            {"biased_heads": n, "num_heads": total, "bias": AlibiPositionalBias(n, total)(4, 6).tolist()}
            for n, total in BIASED
        ],
    }


def buckets() -> list[dict]:
    rows = []
    for shape in BUCKETS:
        for causal in (True, False):
            t5 = T5Attention._relative_position_bucket(RELATIVE, not causal, *shape)
            other = RelativePositionBias._relative_position_bucket(RELATIVE, causal, *shape)
            assert torch.equal(t5, other), "two sources disagree"
            rows.append(
                {"num_buckets": shape[0], "max_distance": shape[1], "bidirectional": not causal, "buckets": t5.tolist()}
            )
    return rows


def sinusoids() -> list[dict]:
    rows = []
    for dim in (4, 5, 16, 17):
        m2m = M2M100SinusoidalPositionalEmbedding.get_embedding(12, dim)
        speech = Speech2TextSinusoidalPositionalEmbedding.get_embedding(12, dim)
        assert torch.equal(m2m, speech), "two sources disagree"
        rows.append({"dim": dim, "codes": m2m.tolist()})
    return rows


if __name__ == "__main__":
    save(
        "biases",
        "torch transformers x-transformers",
        alibi=alibi(),
        t5_buckets=buckets(),
        fairseq_sinusoids=sinusoids(),
    )
