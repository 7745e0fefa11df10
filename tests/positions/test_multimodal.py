"""Positions of text, images and videos: the published rule by hand; tests/models has those of transformers."""

from longitude.positions.coordinates import multimodal_positions
from tests.support import refused_calls


def test_positions() -> None:
    """An image from 3, text after it at 6; after a video of 10 frames from 3, text at 13, by the rule of extent at 5."""
    image = multimodal_positions([3, (1, 2, 3), 2])
    assert image.tolist() == [
        *([n, n, n] for n in range(3)),
        *([3, 3 + row, 3 + column] for row in range(2) for column in range(3)),
        *([n, n, n] for n in (6, 7)),
    ]
    video = multimodal_positions([3, (10, 2, 2), 2])
    assert video[3:43].tolist() == [[3 + t, 3 + h, 3 + w] for t in range(10) for h in range(2) for w in range(2)]
    assert video[43:].tolist() == [[13] * 3, [14] * 3]
    assert multimodal_positions([3, (10, 2, 2), 2], next_text="extent")[43:].tolist() == [[5] * 3, [6] * 3]
    assert multimodal_positions([(1, 5, 2), (1, 2, 4), 1], next_text="extent")[-1].tolist() == [9, 9, 9]
    assert multimodal_positions([]).shape == (0, 3)


test_wrong_segments = refused_calls(
    [
        (lambda: multimodal_positions(3), "multimodal_positions", "3"),
        (lambda: multimodal_positions([3, (1, 2), 2]), "1", "2"),
        (lambda: multimodal_positions([0]), "1", "0"),
        (lambda: multimodal_positions([(1, 2, 0)]), "1", "2", "0"),
    ]
)
