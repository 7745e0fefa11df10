"""Writes rotary.json: rotations, angles and positions of independent implementations, as tables of numbers.

pip install torch "transformers==5.23.0" x-transformers rotary-embedding-torch
python tests/golden/make_rotary.py
"""

from types import SimpleNamespace

import rotary_embedding_torch
import tables
import torch
from tables import listed
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from x_transformers import x_transformers

LENGTH, DIM = 6, 12
SECTIONS = {"qwen2": ([16, 24, 24], [2, 3, 3]), "qwen3": ([24, 20, 20], [4, 2, 2], [2, 3, 3], [5, 3, 2])}
"""Sections of pairs for time, height and width; those of the published models first."""

STREAMS = [
    [3, (1, 4, 4), 2],
    [3, (10, 4, 4), 2],
    [(1, 2, 6), 4, (2, 6, 4), 1, (1, 8, 2)],
    [1, (3, 2, 2), 1, (5, 4, 8), 7],
]
"""Texts and grids of patches, (frames, height, width); each model merges patches two by two."""


def numbers(*shape: int) -> torch.Tensor:
    return tables.numbers(*shape, seed=len(shape) + shape[-1])


def rotated() -> list[dict]:
    """x at positions 0 .. as each source rotates it."""
    x = numbers(1, 2, LENGTH, DIM)
    positions = torch.arange(LENGTH)[None]
    lang = rotary_embedding_torch.RotaryEmbedding(DIM, freqs_for="lang", cache_if_possible=False)
    other = x_transformers.RotaryEmbedding(DIM)
    cos_sin = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2))(x, positions)
    sin, cos = gptj.create_sinusoidal_positions(LENGTH, DIM).chunk(2, -1)
    theirs = {
        "rotary_embedding_torch": ("interleaved", lang.rotate_queries_or_keys(x)),
        "x_transformers": (
            "interleaved",
            x_transformers.apply_rotary_pos_emb(x, other.forward_from_seq_len(LENGTH)[0]),
        ),
        "llama": ("half", llama.apply_rotary_pos_emb(x, x, *cos_sin)[0]),
        "gptj": ("interleaved", gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)),
    }
    return [
        {"source": name, "layout": layout, "x": listed(x), "rotated": listed(y)} for name, (layout, y) in theirs.items()
    ]


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


def multimodal() -> list[dict]:
    """cos and sin of each pair (these sources write each twice) at positions [L, 3]."""
    positions = torch.tensor([[0, 0, 0], [4, 4, 4], [3, 5, 7], [12, 4, 3], [1, 900, 40]])
    rows = []
    for source, kind, config in (
        ("qwen2", qwen2.Qwen2VLRotaryEmbedding, Qwen2VLTextConfig),
        ("qwen3", qwen3.Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig),
    ):
        for sections in SECTIONS[source]:
            dim = 2 * sum(sections)
            rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
            made = kind(config(hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=rope))
            cos, sin = (t[0, :, : dim // 2] for t in made(torch.zeros(1), positions.T[:, None]))
            rows.append(
                {"source": source, "sections": sections, "positions": positions.tolist(), "base": 1e6}
                | {"cos": listed(cos), "sin": listed(sin)}
            )
    return rows


def axial() -> dict:
    """The vision tower of Qwen2-VL: x [L, heads, head_dim] at rows and columns."""
    x, positions = numbers(LENGTH, 2, 16), torch.tensor([[0, 0], [0, 1], [2, 5], [7, 3], [31, 0], [4, 63]])
    config = SimpleNamespace(
        rope_parameters={"rope_type": "axial", "rope_theta": 10_000.0}, embed_dim=32, num_heads=2, head_dim=16
    )
    y, _ = qwen2.apply_rotary_pos_emb_vision(x, x, *qwen2.Qwen2VLVisionRotaryEmbedding(config)(x, positions))
    return {"x": listed(x), "positions": positions.tolist(), "rotated": listed(y)}


def streams() -> list[dict]:
    """Positions [3, L] of streams of texts and grids. Qwen3-VL takes a video as one grid per frame, with text between."""
    rows = []
    for source, kind in (("qwen2", qwen2.Qwen2VLModel), ("qwen3", qwen3.Qwen3VLModel)):
        model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
        model.get_vision_position_ids = kind.get_vision_position_ids.__get__(model)
        for stream in STREAMS:
            if source == "qwen3":
                stream = [s for s in stream if isinstance(s, int) or s[0] == 1]
            merged = [s if isinstance(s, int) else (s[0], s[1] // 2, s[2] // 2) for s in stream]
            kinds = [torch.zeros(s) if isinstance(s, int) else torch.ones(s).flatten() for s in merged]
            kinds = torch.cat(kinds).long()[None]
            grids = torch.tensor([s for s in stream if not isinstance(s, int)])
            positions, delta = kind.get_rope_index(model, torch.zeros_like(kinds), kinds, grids)
            rows.append(
                {"source": source, "segments": merged, "positions": positions[:, 0].tolist(), "delta": delta.item()}
            )
    return rows


if __name__ == "__main__":
    with torch.no_grad():
        tables.save(
            "rotary",
            "torch transformers x-transformers rotary-embedding-torch",
            rotated=rotated(),
            xpos=xpos(),
            multimodal=multimodal(),
            axial=axial(),
            streams=streams(),
        )
