"""transformers' models of text, images and videos: positions, text layers and vision towers of Qwen2-VL and Qwen3-VL."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import longitude as lg
from longitude.checkpoints.config import from_hugging_face
from longitude.positions.coordinates import multimodal_positions
from longitude.positions.rotary import AxialRotary, MultimodalRotary
from tests.support import random_model, recorded

IMAGE, VIDEO = 61, 62
SPECIAL: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 63, "vision_end_token_id": 64,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 64, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 1, "in_channels": 3,
    "spatial_merge_size": 2,
}  # fmt: skip

# Texts, images and videos: tokens, or frames, height and width in tokens. A token merges two by two patches.
FIRST = [3, (1, 2, 3), 5, (4, 2, 2), 4]
SECOND = [2, (1, 3, 2), 9]
Segments = Sequence[int | tuple[int, int, int]]


def qwen2() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [2, 3, 3]}
    parts = {"text_config": TEXT | {"rope_parameters": rope}, "vision_config": VISION | {"embed_dim": 32}}
    return random_model(Qwen2VLForConditionalGeneration, Qwen2VLConfig(**parts, **SPECIAL))


def qwen3() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = VISION | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    parts = {"text_config": TEXT | {"head_dim": 16, "rope_parameters": rope}, "vision_config": vision}
    return random_model(Qwen3VLForConditionalGeneration, Qwen3VLConfig(**parts, **SPECIAL))


def tokens(segments: Segments) -> Tensor:
    ids = []
    for segment in segments:
        if isinstance(segment, int):
            ids.append(torch.randint(3, 60, (segment,)))
        else:
            frames, height, width = segment
            ids.append(torch.full((frames * height * width,), IMAGE if frames == 1 else VIDEO))
    return torch.cat(ids)


def batch(rows: Sequence[Segments]) -> dict[str, Tensor]:
    """Rows of segments, padded on the left, as the models take them; grids are counted in patches."""
    of_rows = [tokens(row) for row in rows]
    length = max(map(len, of_rows))
    ids = torch.stack([F.pad(row, (length - len(row), 0)) for row in of_rows])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "mm_token_type_ids": kinds}
    shapes = [segment for row in rows for segment in row if not isinstance(segment, int)]
    for kind, name, frames in (("image", "pixel_values", {1}), ("video", "pixel_values_videos", {*range(2, 10)})):
        if grids := [[f, 2 * height, 2 * width] for f, height, width in shapes if f in frames]:
            inputs[f"{kind}_grid_thw"] = torch.tensor(grids)
            inputs[name] = torch.randn(int(torch.tensor(grids).prod(1).sum()), 12)
    return inputs


def places(rows: Sequence[Segments], mask: Tensor) -> Tensor:
    """Our positions [B, L, 3], 0 at padding."""
    positions = torch.zeros(*mask.shape, 3, dtype=torch.long)
    for b, row in enumerate(rows):
        positions[b, mask[b].bool()] = multimodal_positions(row, "extent")
    return positions


def same(mine: Tensor, theirs: Tensor, real: Tensor) -> None:
    """[B, H, L, D] against [B, L, H * D] at real tokens, up to float32."""
    mine, theirs = mine.transpose(1, 2).flatten(2)[real], theirs[real]
    torch.testing.assert_close(mine, theirs, atol=2e-5 * float(theirs.std()), rtol=0)


# ---- text layers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [qwen2, qwen3])
@torch.no_grad()
def test_text_layers_padded_and_cached(model, ids):
    """A prompt of texts, images and (Qwen2-VL) a video, padded on the left, then text token by token with the cache."""
    rows = [FIRST, SECOND] if model is qwen2 else [[3, (1, 2, 3), 5, (1, 4, 5), 4], SECOND]
    theirs, inputs = model(), batch(rows)
    names = ["q_proj", "k_proj"] if model is qwen2 else ["q_norm", "k_norm"]
    seen = recorded(theirs.model.language_model, " ".join([*names, "v_proj"]), "o_proj")
    cache = theirs(**inputs).cache
    real, positions = inputs["attention_mask"].bool(), places(rows, inputs["attention_mask"])
    more = ids(2, 6)
    for step in range(6):
        real = torch.cat([real, torch.ones(2, 1, dtype=torch.bool)], 1)
        after = positions.amax((1, 2), keepdim=True) + 1
        positions = torch.cat([positions, after.expand(2, 1, 3)], 1)
        new = (real.sum(1, keepdim=True) - 1 + theirs.model.rope_deltas).expand(3, 2, 1)  # as generate() does
        theirs(more[:, step : step + 1], attention_mask=real.long(), cache=cache, position_ids=new)

    rope = from_hugging_face(theirs.config.text_config)
    arrangement = "interleaved" if rope.interleaved else "contiguous"
    assert rope.interleaved == (model is qwen3)
    encoding = MultimodalRotary(16, "half", base=rope.base, sections=rope.sections, arrangement=arrangement)
    assert len(seen) == 2
    for layer in seen.values():
        q, k, v = (layer[name] for name in (*names, "v_proj"))
        q, k, v = (x.flatten(2).unflatten(-1, (-1, 16)).transpose(1, 2) for x in (q, k, v))
        mask = lg.Causal() & lg.Padding(real)
        mine = lg.attend(q, k, v, encoding=encoding, mask=mask, q_positions=positions, k_positions=positions)
        same(mine, layer["mixed"], real)
        plain = lg.attend(q, k, v, encoding=lg.Rotary(16, "half", base=rope.base), mask=mask)
        assert (plain - mine).abs().max() > 1e-3


# ---- vision towers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [qwen2, qwen3])
@torch.no_grad()
def test_vision_layers(model):
    """Patches rotate by their row and column, in blocks of two by two; each frame is on its own; nothing is causal."""
    theirs = model().model.visual
    grids = [(1, 4, 6), (3, 4, 4), (1, 2, 8)]
    seen = recorded(theirs.blocks, "qkv", "proj")
    theirs(torch.randn(sum(t * h * w for t, h, w in grids), 12), grid_thw=torch.tensor(grids))
    positions, frames = [], []
    for t, h, w in grids:
        at = torch.cartesian_prod(*(torch.arange(n) for n in (h // 2, w // 2, 2, 2)))  # row and column of block, inner
        for _ in range(t):
            positions.append(2 * at[:, :2] + at[:, 2:])
            frames.append(torch.full((h * w,), len(frames)))
    where, frame = torch.cat(positions), torch.cat(frames)
    encoding = AxialRotary(16, "half")
    mask = lg.NoMask() & lg.Documents(frame[None])
    assert len(seen) == 2
    for layer in seen.values():
        q, k, v = layer["qkv"].unflatten(-1, (3, 2, 16)).permute(1, 2, 0, 3)[:, None]
        mine, swapped = (
            lg.attend(q, k, v, encoding=encoding, mask=mask, q_positions=at, k_positions=at)
            for at in (where, where.flip(1))
        )
        same(mine, layer["mixed"][None], torch.ones(1, len(where), dtype=torch.bool))
        assert (swapped - mine).abs().max() > 1e-3
