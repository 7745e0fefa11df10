"""The law of positions with several axes: coordinates of images and videos, and of the text after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.check.subject import CHECKPOINT_LAWS, Subject
from longitude.testing.engine import DoesNotApply, Measurement

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types with a supported rule for coordinates."""
STAMPED = ("qwen3_vl", "qwen3_vl_moe")
"""Model types of KINDS that write each frame of a video separately, after its time as text."""
SECONDS = (0.375, 0.5, 1.0, 2.0)
"""Seconds of video per step of time, passed as second_per_grid_ts. A fraction gives several frames one number."""
AXES = ("time", "height", "width")


@dataclass(frozen=True)
class Piece:
    """A piece of a sequence: text of a number of tokens, or the patches of an image or a video.

    Args:
        kind: 0 text, 1 image, 2 video, as transformers numbers token types.
        grid: (time, height, width) in tokens; of text (tokens, 1, 1).
    """

    kind: int
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return t * h * w


def text(tokens: int) -> Piece:
    return Piece(0, (tokens, 1, 1))


IMAGE, WIDE = Piece(1, (1, 3, 2)), Piece(1, (1, 2, 5))
SEQUENCES = {
    "text alone": [text(7)],
    "text after an image": [text(3), IMAGE, text(5)],
    "two images": [text(2), IMAGE, text(1), WIDE, text(4)],
    "an image first": [WIDE, text(4)],
    "a video": [text(3), Piece(2, (2, 3, 2)), text(5)],
    "a video of more frames than rows": [text(3), Piece(2, (6, 2, 2)), text(5)],
}


def published(pieces: list[Piece], interval: float) -> Tensor:
    """Coordinates [3, L] by the rule of Qwen2-VL: 2409.12191, section 2.1, https://arxiv.org/abs/2409.12191.

    Text has one number on all axes. A patch has its frame, row and column, counted from the first free number; frames are
    `interval` numbers apart, rounded down (Qwen2.5-VL: 2502.13923). The next piece begins one above the largest number so far.
    """
    start, out = 0, []
    for piece in pieces:
        if piece.kind == 0:
            at = torch.arange(piece.tokens).expand(3, -1)
        else:
            t, h, w = (torch.arange(size) for size in piece.grid)
            at = torch.stack(
                torch.meshgrid((t * interval if piece.kind == 2 else t).long(), h, w, indexing="ij")
            ).flatten(1)
        out.append(start + at)
        start = int(out[-1].max()) + 1
    return torch.cat(out, 1)


def written(pieces: list[Piece], stamped: bool) -> list[Piece]:
    """Pieces as the processor writes them; stamped: a video becomes its frames, each after two tokens of time."""
    out: list[Piece] = []
    for piece in pieces:
        of_video = stamped and piece.kind == 2
        out += [text(2), Piece(2, (1, *piece.grid[1:]))] * piece.grid[0] if of_video else [piece]
    return out


@CHECKPOINT_LAWS.law(threshold=0)
def image_positions(subject: Subject) -> Measurement:
    """Coordinates around images and videos = those of the published rule.

    Text after an image, two images, a video at several speeds, each in a row padded on the left too. The number is the largest
    distance: of the patches on each axis, counted from the first of their piece, and of where each piece and the first position
    that is generated begin.
    """
    model = getattr(subject.model, "model", subject.model)
    kind = subject.model.config.model_type
    if not hasattr(model, "get_rope_index"):
        raise DoesNotApply("its positions have one axis")
    if kind not in KINDS:
        raise DoesNotApply(f"the rule of {kind} is not read here; known: {', '.join(KINDS)}")
    far: dict[str, tuple[float, str]] = dict.fromkeys((*AXES, "beginnings"), (0.0, ""))
    for name, pieces in SEQUENCES.items():
        timed = kind == "qwen2_5_vl" and any(piece.kind == 2 for piece in pieces)
        for seconds in SECONDS if timed else SECONDS[-1:]:
            for pad in (0, 2):
                got, want, after = coordinates(model, pieces, kind, pad, seconds)
                where = f"{name}, {seconds:g} s a step" if timed else name
                off = distances(got, want, after, written(pieces, kind in STAMPED))
                far = {part: max(far[part], (by, where), key=lambda pair: pair[0]) for part, by in off.items()}
    wrong = "; ".join(f"{part}: by {off:g} in {where}" for part, (off, where) in far.items() if off)
    cause = f"coordinates are not those of the published rule ({wrong})"
    return Measurement(max(off for off, _ in far.values()), 0, cause=cause)


def distances(got: Tensor, want: Tensor, after: int, pieces: list[Piece]) -> dict[str, float]:
    """Part of coordinates [3, L] -> its largest distance: each axis within the pieces, and the beginnings of pieces."""
    ends = torch.tensor([0, *(piece.tokens for piece in pieces)]).cumsum(0)
    begins = ends[:-1]
    inside = [coordinates - coordinates[:, begins].repeat_interleave(ends.diff(), 1) for coordinates in (got, want)]
    off = (inside[0] - inside[1]).abs().amax(1).tolist()
    starts = max(float((got - want)[:, begins].abs().max()), abs(after - int(want.max()) - 1))
    return dict(zip(AXES, off, strict=True)) | {"beginnings": starts}


def coordinates(model: Any, pieces: list[Piece], kind: str, pad: int, seconds: float) -> tuple[Tensor, Tensor, int]:
    """Coordinates [3, L] of a row with `pad` tokens of padding on the left, those of the rule, and the position that follows."""
    config = model.config
    merge = config.vision_config.spatial_merge_size
    per_second = getattr(config.vision_config, "tokens_per_second", None)
    pieces = written(pieces, kind in STAMPED)
    interval = float(per_second) * seconds if kind == "qwen2_5_vl" and per_second else 1.0
    want = published(pieces, interval)
    kinds = torch.tensor([0] * pad + [piece.kind for piece in pieces for _ in range(piece.tokens)])[None]
    special = torch.tensor([3, config.image_token_id, config.video_token_id])
    mask = torch.ones_like(kinds)
    mask[:, :pad] = 0
    options: dict[str, Any] = {"attention_mask": mask}
    for key, number in (("image_grid_thw", 1), ("video_grid_thw", 2)):
        grids = [[t, h * merge, w * merge] for t, h, w in (piece.grid for piece in pieces if piece.kind == number)]
        if number == 2 and kind in STAMPED and grids:
            grids = [[len(grids), *grids[0][1:]]]  # one video again
        options[key] = torch.tensor(grids) if grids else None
    if kind == "qwen2_5_vl" and options["video_grid_thw"] is not None:
        options["second_per_grid_ts"] = torch.tensor([seconds])
    positions, delta = model.get_rope_index(special[kinds], mm_token_type_ids=kinds, **options)
    got = positions[-3:, 0, pad:].cpu()
    follows = int(delta[0]) + want.shape[1]  # the position of the first token that is generated
    return got, want, follows
