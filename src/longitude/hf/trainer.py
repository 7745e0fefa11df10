"""transformers' Trainer with our rule of weight decay."""

from __future__ import annotations

import transformers
from torch import nn

from longitude.training import decayed_names


class Trainer(transformers.Trainer):
    """transformers' Trainer, whose weight decay follows the rule of `lg.parameter_groups`.

    Theirs selects by name ("bias", "norm") and would decay the rates of recurrences and tables of positions. Its arguments are
    those of transformers.Trainer.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)
