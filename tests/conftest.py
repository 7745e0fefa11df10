"""For all tests: the same random numbers, fresh memory full of NaN, and one thread per worker."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _fresh_memory_is_nan():
    """torch.empty gives NaN, so that a read of what was never written shows. Kernels must be deterministic, too."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)
