"""A number per token -> documents: a run is one, and padding ends nothing."""

import torch

from longitude.attention.documents import begins_of, runs_of


def test_runs_of_random_rows():
    """Against a walk along each row; the numbers of a row's first tokens do not change as it grows."""
    documents = torch.randint(-1, 3, (40, 17), generator=torch.Generator().manual_seed(0))
    walked, begins = torch.full_like(documents, -1), torch.zeros_like(documents, dtype=torch.bool)
    for row in range(40):
        last = run = -1
        for t, number in enumerate(documents[row].tolist()):
            if number >= 0:
                begins[row, t] = run >= 0 and number != last
                last, run = number, run + (number != last)
                walked[row, t] = run
    for length in range(1, 18):
        assert torch.equal(runs_of(documents[:, :length]), walked[:, :length])
        assert torch.equal(begins_of(documents[:, :length]), begins[:, :length])
    assert torch.equal(runs_of(walked), walked)
