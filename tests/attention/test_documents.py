"""A number per token -> documents: a run is one, and padding ends nothing."""

import torch

from longitude.attention.documents import begins_of, runs_of


def test_runs_by_hand():
    for documents, runs, begins in (
        ([0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 0, 1, 0, 0]),
        ([-1, -1, 7, 7, 3, -1, -1], [-1, -1, 0, 0, 1, -1, -1], [0, 0, 0, 0, 1, 0, 0]),
        ([5, -1, 5, -2, 4, -1, 5], [0, -1, 0, -1, 1, -1, 2], [0, 0, 0, 0, 1, 0, 1]),
        ([-1] * 7, [-1] * 7, [0] * 7),
    ):
        assert runs_of(torch.tensor([documents])).tolist() == [runs]
        assert begins_of(torch.tensor([documents])).long().tolist() == [begins]


def test_runs_of_random_rows():
    """Against a walk along each row; the numbers of a row's first tokens do not change as it grows."""
    documents = torch.randint(-1, 3, (40, 17), generator=torch.Generator().manual_seed(0))
    walked = torch.full_like(documents, -1)
    for row in range(40):
        last = run = -1
        for t, number in enumerate(documents[row].tolist()):
            if number >= 0:
                last, run = number, run + (number != last)
                walked[row, t] = run
    for length in range(1, 18):
        assert torch.equal(runs_of(documents[:, :length]), walked[:, :length])
    assert torch.equal(runs_of(walked), walked)
