"""Costs of every --plan: FLOPs from a model without weights, time from a short run of some of its layers, memory.

FLOPs are those of matrix products. For our models they are those of every Linear layer, and those that a mixer declares
(`Mixer.products`): scores and weighted values, or updates and reads of a matrix or diagonal state. Norms, gates, decays,
convolutions, biases, the scores of cross-attention, and the vector state of rwkv4 are not counted. The backend does not matter.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from longitude.checkpoints.load import SMALLER, one_line_of
from longitude.checkpoints.positions import last_position
from longitude.checkpoints.quiet import quiet
from longitude.models.decoder import LongitudeModel
from longitude.runs.memory import Memory, available_memory, forward_memory, require_memory, training_memory

H100 = 0.4 * 989e12
"""FLOP/s of one H100 in bfloat16: 40%, which good code reaches, of the peak for dense products in its data sheet."""
HERE, ON_H100 = "Time here: as busy as now.", "One H100: bfloat16 at 40% of 989 TFLOP/s."
"""Protocols of the times of a table of costs, on this machine and on one H100."""
TRAINING = 3
"""Cost of a training step in forward passes."""
LARGEST = 250_000_000
"""Maximum parameters of a model that is timed on this machine; a larger one gets fewer layers and a smaller vocabulary."""
WORDS, WIDEST = 8192, 1024
"""Size of the smaller vocabulary, and largest window that is timed, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimated cost of a part of a command. Unknown values, and those that do not apply, are None.

    Attributes:
        model: A folder, a name or a label.
        part: "training", "measuring", "searching".
        parameters: Number of parameters of the model.
        steps: Steps of its training.
        length: Length of windows and prompts, in tokens.
        tokens: Maximum number of processed tokens.
        flops: FLOPs of matrix products.
        memory: Peak memory.
        seconds: Seconds on this machine under its current load.
        h100_seconds: Seconds on one H100 in bfloat16 at 40% of its peak rate.
        reason: Reason why there is no time, or why the command would raise an error.
    """

    model: str
    part: str
    parameters: int | None = None
    steps: int | None = None
    length: int
    tokens: int
    flops: float
    memory: Memory | None = None
    seconds: float | None = None
    h100_seconds: float | None = None
    reason: str = ""

    @property
    def as_json(self) -> dict[str, Any]:
        """Its fields, with the sum of the memory."""
        return asdict(self) | {"memory": self.memory and asdict(self.memory) | {"total": self.memory.total}}


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products in a forward pass, per token and per pair of query and key.

    Every layer counts as attending to all earlier tokens, those with a window too.
    """

    per_token: float
    per_pair: float

    def of(self, length: int) -> float:
        """FLOPs of a window of `length` tokens."""
        return self.per_token * length + self.per_pair * length * (length + 1) / 2


def products_per_token(model: Any, keys: float) -> float:
    """Multiply-adds per token in a Longitude model, with `keys` visible keys per query on average."""
    stacks = [module for module in model.modules() if isinstance(module, LongitudeModel)]
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    mixed = sum(mixer.products(keys) for stack in stacks for mixer in stack.mixers)
    return (linear + mixed) / len(stacks)  # a token of an encoder-decoder is in one of its stacks


def forward_flops(outline: Any) -> Flops:
    """FLOPs of a model on the meta device, counted at two lengths. ValueError for a model that does not run there."""
    if any(isinstance(module, LongitudeModel) for module in outline.modules()):
        none, one = (products_per_token(outline, keys) for keys in (0, 1))
        return Flops(2 * none, 2 * (one - none))

    def count(length: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), quiet(), countable_experts(outline):
            outline(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"))
        return counter.get_total_flops()

    near, far = 256, 512
    try:
        a, b = count(near), count(far)
    except Exception as error:  # any error of code that needs values of tensors
        name = type(outline).__name__
        raise ValueError(f"{name}: its FLOPs cannot be counted without weights ({one_line_of(error)})") from error
    per_pair = (b / far - a / near) / (far - near)
    return Flops(a / near - per_pair * near, per_pair)


@contextmanager
def countable_experts(outline: Any) -> Iterator[None]:
    """Context in which experts of a mixture run on the meta device, as products of the tokens that each is chosen for."""
    before = getattr(outline.config, "_experts_implementation", None)
    if before is None:
        yield
        return
    outline.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        outline.set_experts_implementation(before)


def flops_per_second(
    outline: Any,
    length: int,
    rows: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    times: int = 5,
) -> float:
    """FLOP/s of this machine for a model under the current load, on windows of `length` random tokens.

    A large model is built with as many layers as LARGEST allows. ValueError if its class cannot be built with fewer layers.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, width = smaller(outline), min(length, WIDEST, last_position(outline) or WIDEST)
    try:
        with quiet(), torch.device("meta"):
            skeleton = type(outline)(copy.deepcopy(config))
            counted = forward_flops(skeleton)
        text = skeleton.config.get_text_config()
        if training:
            needed = training_memory(skeleton, text, rows, width, False).total
        else:  # built in float32, whatever it is cast to
            logits = width * rows * text.vocab_size
            needed = forward_memory(skeleton, 0, torch.float32, width, rows, chunk=width, logits=logits).total
        require_memory(needed, min(map(available_memory, {"cpu", device})), "its smallest part takes", SMALLER)
        with quiet():
            model = type(outline)(config).to(device, torch.float32 if training else dtype)
    except Exception as error:
        name = type(outline).__name__
        raise ValueError(f"{name}: no part of it can be run to time it ({one_line_of(error)})") from error
    ids = torch.randint(0, config.get_text_config().vocab_size, (rows, width), device=device)
    step = _training_step(model, ids) if training else _forward(model, ids)
    passes = TRAINING if training else 1
    return passes * rows * counted.of(width) / _seconds(step, times)


def smaller(outline: Any) -> Any:
    """The configuration, with fewer layers and a smaller vocabulary if the model is large."""
    config = copy.deepcopy(outline.config)
    size = sum(parameter.numel() for parameter in outline.parameters())
    if size <= LARGEST:
        return config
    text = config.get_text_config()
    layers = text.num_hidden_layers
    ends = [end for end in (outline.get_input_embeddings(), outline.get_output_embeddings()) if end is not None]
    inside = size - sum({id(end.weight): end.weight.numel() for end in ends}.values())
    kept = min(layers, max(1, int(LARGEST * layers / inside)))
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, key, value[:kept])
    text.num_hidden_layers, text.vocab_size = kept, min(WORDS, text.vocab_size)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(text, key):
            setattr(text, key, None)
    return config


def _forward(model: Any, ids: Any) -> Callable[[], object]:
    model.eval()

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)

    return step


def _training_step(model: Any, ids: Any) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(step: Callable[[], object], times: int) -> float:
    """Median seconds of a call, without the first; fewer calls if they take long."""
    step()
    found: list[float] = []
    while len(found) < times and sum(found) < 20:
        begun = time.perf_counter()
        step()
        found.append(time.perf_counter() - begun)
    return median(found)
