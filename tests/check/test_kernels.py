"""A model whose kernels find no GPU is refused, by whatever way its laws are asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longitude.check import check_subject, quick as quick_models
from longitude.check.run import require_kernels


def subject(error: Exception) -> Any:
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        raise error

    return SimpleNamespace(model=torch.nn.Linear(2, 2), logits=logits, tokens=lambda n: torch.zeros(1, n))


def test_kernels_without_a_gpu_are_no_fault_of_the_model() -> None:
    """As of Qwen3-Next where flash-linear-attention is installed and there is no GPU; check blamed the model's class."""
    with pytest.raises(ValueError, match=r"Linear does not run here.*uninstall fla-core"):
        check_subject(subject(RuntimeError("0 active drivers ([]). There should only be one.")), ["causality"])


def test_kernels_without_a_gpu_are_no_fault_of_a_config(tmp_path, monkeypatch) -> None:
    """The same by --quick, which said that no model can be built of the config."""
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(quick_models, "random_of", fails)
    with pytest.raises(ValueError, match=r"does not run here.*uninstall fla-core"):
        quick_models.random_model(str(tmp_path))


def test_what_else_a_model_raises_is_left_to_the_laws() -> None:
    require_kernels(subject(RuntimeError("sizes do not match")))
