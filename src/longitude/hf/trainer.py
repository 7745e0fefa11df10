"""transformers' Trainer with our rule of weight decay."""

from __future__ import annotations

import transformers
from torch import nn

from longitude.training import decayed_names


class Trainer(transformers.Trainer):
    """As transformers', but what decays is chosen by `lg.parameter_groups`' rule: theirs goes by names ("bias", "norm"), and
    would let the rates of recurrences and tables of positions decay.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)
