"""transformers' Trainer with our rules of weight decay and of learning rates, and for sequences that processes share."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from torch.utils.data import DataLoader

from longitude.errors import UsageError
from longitude.hf.stock import attentions
from longitude.models.decoder import LongitudePreTrainedModel
from longitude.models.sequence import cut_sequence
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
            found = [p for p in group["params"] if id(p) in tables]
            if found:
                group["params"] = [p for p in group["params"] if id(p) not in tables]
                optimizer.add_param_group({**group, "params": found, "lr": SCORE_RATE * group["lr"]})
        return optimizer


class SequenceParallelTrainer(Trainer):
    """Trainer with sequence parallelism: each of n processes has 1/n of the tokens of every sequence.

    A step equals the step of a single process with the same batch. Every process reads whole batches, which `cut_sequence`
    cuts. Evaluation uses whole sequences, each on a single process. The model is a LongitudeForCausalLM with attention, or a
    Transformers model with rotary attention in all layers and attn_implementation="longitude".

    Args:
        arguments: As in transformers.Trainer.
        named: As in transformers.Trainer.

    Raises:
        ValueError: For a model that does not support sequence parallelism, and options that read labels of whole sequences.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        model: Any = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        require_shareable(model)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError("SequenceParallelTrainer: expected neither label_smoothing_factor nor compute_loss_func")
        if not (self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs):
            raise ValueError(
                "SequenceParallelTrainer: expected average_tokens_across_devices=True and a model that takes num_items_in_batch"
            )

    def get_cp_size(self) -> int:
        """Number of processes that share a batch; transformers divides its counts over processes by it."""
        return self.args.world_size

    def get_train_dataloader(self) -> DataLoader:
        """Data loader with the same whole batches in every process."""
        loader = super().get_train_dataloader()
        if hasattr(shard := loader.batch_sampler, "num_processes"):  # accelerate gives each process other batches
            shard.num_processes, shard.process_index = 1, 0  # type: ignore[union-attr]
        return loader

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            inputs = cut_sequence(inputs)
            own = inputs.pop("num_items_in_batch", None)
            num_items_in_batch = own if num_items_in_batch is None else num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def require_shareable(model: Any) -> None:
    """Raise ValueError for a Transformers model unless all its layers use our attention. Longitude models check themselves."""
    if isinstance(model, LongitudePreTrainedModel):
        return
    try:
        attentions(model.base_model)
    except ValueError as error:
        reason = str(error).removeprefix("set_positions: ")
        raise ValueError(f"sequences on several processes: {reason}") from None
    if model.config._attn_implementation != "longitude":
        raise UsageError(
            "sequences on several processes", "attn_implementation='longitude'", repr(model.config._attn_implementation)
        )
