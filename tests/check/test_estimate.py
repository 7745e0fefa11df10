"""An estimate, or why a model cannot be run here at all."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longitude.check.estimate import calibrated


def subject(error: Exception) -> Any:
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        raise error

    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(model=model, kind=torch.float32, length=8, logits=logits, tokens=lambda n: torch.zeros(1, n))


def test_kernels_without_a_gpu_are_no_fault_of_the_model() -> None:
    """As of Qwen3-Next where flash-linear-attention is installed and there is no GPU; check blamed the model's class."""
    with pytest.raises(ValueError, match=r"Linear does not run here.*uninstall fla-core"):
        calibrated(subject(RuntimeError("0 active drivers ([]). There should only be one.")))


def test_what_else_a_model_raises_is_left_to_the_laws() -> None:
    assert calibrated(subject(RuntimeError("sizes do not match"))) is None
