"""A model whose kernels find no GPU is refused: they are no fault of its class, nor of its config."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longitude.check import quick as quick_models
from longitude.check.run import check_subject, require_kernels

NO_GPU = RuntimeError("0 active drivers ([]). There should only be one.")


def test_kernels_without_a_gpu_are_no_fault(tmp_path, monkeypatch) -> None:
    """As of Qwen3-Next where flash-linear-attention is installed; what else a model raises is left to the laws."""

    def raises(error: Exception) -> Any:
        def fail(*arguments: Any, **options: Any) -> None:
            raise error

        return fail

    def subject(error: Exception) -> Any:
        return SimpleNamespace(model=torch.nn.Linear(2, 2), logits=raises(error), tokens=lambda n: torch.zeros(1, n))

    with pytest.raises(ValueError, match=r"Linear does not run here.*uninstall fla-core"):
        check_subject(subject(NO_GPU), ["causality"])
    require_kernels(subject(RuntimeError("sizes do not match")))
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(quick_models, "random_of", raises(NO_GPU))
    with pytest.raises(ValueError, match=r"does not run here.*uninstall fla-core"):
        quick_models.random_model(str(tmp_path))
