"""The one place where a model is run for its losses: windows over documents, batched, every target scored once."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 2**22  # logits turned to float32 at once: 16 MiB

Progress = Callable[[int, int], None]
# {(inputs in the window, inputs whose targets an earlier window scored): [(document, first input), ...]}
Plan = dict[tuple[int, int], list[tuple[int, int]]]


def plan_windows(counts: Sequence[int], window: int, stride: int) -> Plan:
    """The windows that score targets 0..count-1 of every document once each, grouped by shape so that they batch."""
    plan = defaultdict(list)
    for document, count in enumerate(counts):
        start = scored = 0
        while scored < count:
            stop = min(start + window, count)
            plan[stop - start, scored - start].append((document, start))
            start, scored = start + stride, stop
    return plan


class Run:
    """A model that answers plans with losses; `progress` hears of every forward pass, over all the plans."""

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[Tensor],
        plans: Sequence[Plan],
        batch_tokens: int,
        progress: Progress | None,
    ):
        self.model, self.documents, self.batch_tokens, self.progress = model, documents, batch_tokens, progress
        self.done, self.total = 0, sum(width * len(starts) for plan in plans for (width, _), starts in plan.items())
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, str(parameter.dtype).removeprefix("torch.")

    def nats(self, plan: Plan, counts: Sequence[int]) -> list[np.ndarray]:
        """[count] float64 for every document: entry t is -ln p(token t + 1 | its window's tokens up to t)."""
        nats = [np.empty(count) for count in counts]
        with _evaluating(self.model):
            for (width, skip), starts in plan.items():
                rows = max(1, self.batch_tokens // width)
                for first in range(0, len(starts), rows):
                    batch = starts[first : first + rows]
                    tokens = torch.stack([self.documents[document][at : at + width + 1] for document, at in batch])
                    losses = self._losses(tokens.to(self.device), skip).cpu().double().numpy()
                    for (document, at), loss in zip(batch, losses, strict=True):
                        nats[document][at + skip : at + width] = loss
                    self.done += tokens.shape[0] * width
                    if self.progress is not None:
                        self.progress(self.done, self.total)
        return nats

    def _losses(self, tokens: Tensor, skip: int) -> Tensor:
        """tokens [B, T + 1] -> -ln p of tokens skip + 1..T, [B, T - skip], in float32 or better, chunk by chunk."""
        inputs, targets = tokens[:, :-1], tokens[:, 1 + skip :]
        logits = getattr(self.model(input_ids=inputs, use_cache=False), "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != inputs.shape:
            got = f"logits {list(logits.shape)}" if isinstance(logits, Tensor) else f"logits {logits!r}"
            raise ValueError(
                f"the model must answer input_ids {list(inputs.shape)} with .logits [*, *, vocab], got {got} from "
                f"{type(self.model).__name__}; pass a causal language model such as AutoModelForCausalLM loads"
            )
        logits = logits[:, skip:]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        columns = max(1, CHUNK // (logits.shape[0] * logits.shape[2]))
        pieces = zip(logits.split(columns, dim=1), targets.split(columns, dim=1), strict=True)
        return torch.cat([_nats(x.to(dtype), y) for x, y in pieces], dim=1)


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [B, T, vocab], targets [B, T] -> -ln softmax(logits)[targets], [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every submodule has the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
