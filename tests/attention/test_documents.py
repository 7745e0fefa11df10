"""A number per token -> documents: a run is one, and padding ends nothing."""

import torch

from longitude.attention.documents import begins_of, runs_of


def test_runs_by_hand():
    documents = torch.tensor(
        [
            [0, 0, 1, 1, 0, 0, 0],
            [-1, -1, 7, 7, 3, -1, -1],
            [5, -1, 5, -2, 4, -1, 5],
            [-1, -1, -1, -1, -1, -1, -1],
        ]
    )
    expected = [[0, 0, 1, 1, 2, 2, 2], [-1, -1, 0, 0, 1, -1, -1], [0, -1, 0, -1, 1, -1, 2], [-1] * 7]
    assert runs_of(documents).tolist() == expected
    assert begins_of(documents).long().tolist() == [
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0, 1],
        [0] * 7,
    ]


def test_runs_of_random_rows():
    """Against a walk along each row; the numbers of a row's first tokens do not change as it grows."""
    documents = torch.randint(-1, 3, (40, 17), generator=torch.Generator().manual_seed(0))
    runs = runs_of(documents)
    for row, found in zip(documents.tolist(), runs.tolist(), strict=True):
        last, run, walked = None, -1, []
        for number in row:
            if number >= 0 and number != last:
                last, run = number, run + 1
            walked.append(run if number >= 0 else -1)
        assert found == walked
    for length in range(1, 17):
        assert torch.equal(runs_of(documents[:, :length]), runs[:, :length])
    assert torch.equal(runs_of(runs), runs)
