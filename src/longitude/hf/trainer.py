"""transformers' Trainer with our rules of weight decay and of learning rates."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from longitude.training import SCORE_RATE, decayed_names, score_table_names


class Trainer(transformers.Trainer):
    """transformers.Trainer with the parameter groups of `lg.parameter_groups`.

    transformers.Trainer selects parameters by name ("bias", "norm") and would apply weight decay to rates of recurrences and
    position tables. Tables of scores get 10 times the learning rate. Its arguments are those of transformers.Trainer; an
    optimizer that is passed in is not changed.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is not None:
            return self.optimizer
        optimizer: Any = super().create_optimizer(model)
        whole: Any = self.model if model is None else model
        tables = {id(whole.get_parameter(name)) for name in score_table_names(whole)}
        for group in [*optimizer.param_groups]:
            scores = [p for p in group["params"] if id(p) in tables]
            if scores:
                group["params"] = [p for p in group["params"] if id(p) not in tables]
                optimizer.add_param_group({**group, "params": scores, "lr": SCORE_RATE * group["lr"]})
        return optimizer
