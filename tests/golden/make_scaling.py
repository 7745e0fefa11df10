"""Writes scaling.json: the tables of transformers' ROPE_INIT_FUNCTIONS, float32 as published, for tests of our formulas.

Run with any Python that has torch and transformers: python tests/golden/make_scaling.py"""

import math

import torch
from tables import listed, save
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ORIGINAL = "original_max_position_embeddings"


def longrope_lists(pairs: int, top: float) -> dict:
    """Lists shaped as Phi-3's: short ones near 1, long ones rising from 1 to `top`."""
    short = [round(1 + 1.6 * (k / pairs) ** 1.5, 3) for k in range(pairs)]
    long = [round(top ** min(1.0, 1.15 * k / pairs), 4) for k in range(pairs)]
    return {"short_factor": short, "long_factor": long}


def cases() -> list[tuple[int, int, int | None, dict]]:
    """(head_dim, max_position_embeddings, seq_len, rope parameters)"""
    found: list[tuple[int, int, int | None, dict]] = []
    for head_dim, base, factor, partial in [
        (64, 10_000.0, 4.0, 1.0),
        (128, 500_000.0, 8.0, 1.0),
        (80, 1e6, 2.5, 0.4),
        (96, 10_000.0, 32.0, 0.25),
    ]:
        common = {"rope_theta": base, "partial_rotary_factor": partial, "factor": factor}
        found.append((head_dim, 4096, None, common | {"rope_type": "linear"}))
        for length in (None, 100, 2048, 2049, 3000, 8192, 100_000):
            found.append((head_dim, 2048, length, common | {"rope_type": "dynamic"}))
        for original in (2048, 4096, 32_768):
            yarn = common | {"rope_type": "yarn", ORIGINAL: original}
            declared = int(original * factor)
            found.append((head_dim, declared, None, yarn))
            found.append((head_dim, declared, None, yarn | {"truncate": False}))
            found.append((head_dim, declared, None, yarn | {"beta_fast": 128, "beta_slow": 2}))
        llama3 = common | {"rope_type": "llama3", ORIGINAL: 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        found.append((head_dim, 131_072, None, llama3))
        found.append((head_dim, 131_072, None, llama3 | {"high_freq_factor": 8.0, "low_freq_factor": 2.0}))
        for share in (0.75, 0.3, 0.0):
            found.append((head_dim, 4096, None, common | {"rope_type": "proportional", "partial_rotary_factor": share}))
        lists = longrope_lists(int(head_dim * partial) // 2, 64.0)
        phi = {k: v for k, v in common.items() if k != "factor"} | {"rope_type": "longrope", ORIGINAL: 4096} | lists
        for length in (None, 4096, 4097, 131_072):
            found.append((head_dim, 131_072, length, phi))
        found.append((head_dim, 32_768, 9000, phi | {"factor": 16.0}))
        found.append((head_dim, 131_072, 9000, phi | {"attention_factor": 1.25}))
        found.append((head_dim, 4096, None, phi))  # s = 1
    deepseek = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, ORIGINAL: 4096}
    for one, all_dim in [(0.707, 0.707), (1.0, 1.0), (1.0, 0.8), (0.0, 1.0), (0.707, 0.0)]:
        found.append((64, 163_840, None, deepseek | {"mscale": one, "mscale_all_dim": all_dim}))
    found.append((64, 163_840, None, deepseek | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.8}))
    # The ramp's upper end beyond d/2: no pair is fully interpolated; and both ends at the clamp d - 1, or equal.
    for base, original in [(10_000.0, 131_072), (10_000.0, 1_048_576), (100.0, 131_072), (10_000.0, 16), (10_000.0, 8)]:
        for truncate in (True, False):
            yarn = {"rope_type": "yarn", "rope_theta": base, "factor": 4.0, ORIGINAL: original, "truncate": truncate}
            found.append((64, original * 4, None, yarn))
            found.append((16, original * 4, None, yarn | {"beta_fast": 1.2, "beta_slow": 1.0}))
    return found


def table(head_dim: int, declared: int, length: int | None, parameters: dict) -> dict:
    options = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    config = LlamaConfig(**options, max_position_embeddings=declared, rope_parameters=dict(parameters))
    inverse, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    assert inverse.dtype == torch.float32 and math.isfinite(factor)
    row = {"head_dim": head_dim, "max_position_embeddings": declared, "length": length, "rope_parameters": parameters}
    return row | {"attention_factor": factor, "inverse": listed(inverse)}


if __name__ == "__main__":
    save("scaling", "torch transformers", cases=[table(*case) for case in cases()])
