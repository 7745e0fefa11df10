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

from longitude.errors import one_line_of
from longitude.runs.machine import available_memory, require_memory
from longitude.runs.quiet import quiet

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


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of a forward pass or a training step.

    Attributes:
        weights: Bytes of the weights; in training with gradients and moments.
        cache: Keys and values of the longest window.
        layer: Intermediate results of one layer for a chunk of tokens; in training those kept for the backward pass.
        logits: Bytes of the logits that are computed at once.
        python: Python and its libraries.
    """

    weights: int
    cache: int
    layer: int
    logits: int
    python: int = 2**29

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in asdict(self).items())
        return f"about {self.total / 1e9:.1f} GB ({parts})"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimated cost of a part of a command. Unknown values, and those that do not apply, are None.

    Attributes:
        model: A folder, a name or a label.
        part: "training" or "measuring".
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


# ---- FLOPs -----------------------------------------------------------------------------------------------------------
def stacks_of(model: Any) -> list[Any]:
    """The stacks of layers of a Longitude model, whose mixers declare their products; none in other models."""
    return [module for module in model.modules() if hasattr(module, "mixers")]


def products_per_token(model: Any, keys: float) -> float:
    """Multiply-adds per token in a Longitude model, with `keys` visible keys per query on average."""
    stacks = stacks_of(model)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    mixed = sum(mixer.products(keys) for stack in stacks for mixer in stack.mixers)
    return (linear + mixed) / len(stacks)  # a token of an encoder-decoder is in one of its stacks


def forward_flops(outline: Any) -> Flops:
    """FLOPs of a model on the meta device, counted at two lengths. ValueError for a model that does not run there."""
    if stacks_of(outline):
        alone, with_key = (products_per_token(outline, keys) for keys in (0, 1))
        return Flops(2 * alone, 2 * (with_key - alone))

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
    if before is not None:
        outline.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        if before is not None:
            outline.set_experts_implementation(before)


def flops_per_second(
    outline: Any,
    length: int,
    rows: int = 1,
    dtype: torch.dtype = torch.float32,
    times: int = 5,
) -> float:
    """FLOP/s of this machine for a model under the current load, on windows of `length` random tokens.

    Windows are no wider than WIDEST, and `length` is at most the number of the model's positions. A large model is built with as
    many layers as LARGEST allows. ValueError if its class cannot be built with fewer layers.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = smaller(outline)
    text = config.get_text_config()
    width = min(length, WIDEST)
    try:
        with quiet(), torch.device("meta"):
            skeleton = type(outline)(copy.deepcopy(config))
            counted = forward_flops(skeleton)
        # built in float32, whatever it is cast to
        logits = width * rows * text.vocab_size
        needs = forward_memory(skeleton, 0, torch.float32, width, rows, chunk=width, logits=logits)
        free = min(map(available_memory, {"cpu", device}))
        require_memory(needs.total, free, "its smallest part takes", "take a machine with more")
        with quiet():
            model = type(outline)(config).to(device, dtype).eval()
    except Exception as error:
        name = type(outline).__name__
        raise ValueError(f"{name}: no part of it can be run to time it ({one_line_of(error)})") from error
    ids = torch.randint(0, text.vocab_size, (rows, width), device=device)

    @torch.inference_mode()
    def step() -> None:
        model(input_ids=ids, use_cache=False)

    return rows * counted.of(width) / _seconds(step, times)


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


def _seconds(step: Callable[[], object], times: int) -> float:
    """Median seconds of a call, without the first; fewer calls if they take long."""
    step()
    taken: list[float] = []
    while len(taken) < times and sum(taken) < 20:
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return median(taken)


# ---- memory ----------------------------------------------------------------------------------------------------------
def forward_memory(
    model: Any, head_dim: int, dtype: torch.dtype, width: int, rows: int, chunk: int, logits: int
) -> Memory:
    """Memory to read `rows` windows of `width` tokens, `chunk` tokens at once, with `logits` numbers of the head's output.

    The model may be on the meta device. head_dim: 0 if no layer keeps keys and values.
    """
    config, chunk = model.config.get_text_config(), min(chunk, width)
    heads, hidden = getattr(config, "num_attention_heads", 0), config.hidden_size
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    groups = max(getattr(layer, "num_key_value_heads", None) or heads for layer in layers)
    inner = inner_size(config)
    keys_and_values = 2 * width * head_dim * (groups + heads)  # grown by a chunk, and repeated for all heads
    layer = chunk * (10 * hidden + 3 * inner) + keys_and_values
    if has_square_scores(config):
        layer += 3 * heads * chunk * width
    elif chunk < width:
        layer += 2 * chunk * width  # the mask of a chunk
    size = dtype.itemsize
    return Memory(
        weights=sum(parameter.numel() for parameter in model.parameters()) * size,
        cache=2 * config.num_hidden_layers * groups * head_dim * width * rows * size if chunk < width else 0,
        layer=layer * rows * size,
        logits=3 * 4 * min(logits, chunk * rows * config.vocab_size),
    )


def inner_size(config: Any) -> int:
    """Inner width of the MLPs; the largest if layers differ (Gemma 3n)."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list | tuple) else size


def has_square_scores(config: Any) -> bool:
    """Whether attention stores a score for every pair of tokens. Our models attend with our backends."""
    if config.model_type == "longitude":
        return config.attention_backend == "reference"
    return getattr(config, "_attn_implementation", None) == "eager"


def training_memory(model: Any, config: Any, batch: int, length: int, gradient_checkpointing: bool) -> Memory:
    """Peak memory of a training step with Adam, for `batch` windows of `length` tokens.

    Weights, gradients and two moments; what layers keep for the backward pass; logits and their gradient in float32.
    """
    fixed = sum(p.numel() * (p.element_size() + (12 if p.requires_grad else 0)) for p in model.parameters())
    tokens, width = batch * length, config.hidden_size
    inner = inner_size(config)
    size = next(model.parameters()).element_size()
    layer = tokens * (10 * width + 4 * inner) * size
    saved = config.num_hidden_layers * (tokens * width * size if gradient_checkpointing else layer)
    kept = saved + (layer if gradient_checkpointing else 0)
    return Memory(weights=fixed, cache=0, layer=kept, logits=3 * tokens * config.vocab_size * 4)
