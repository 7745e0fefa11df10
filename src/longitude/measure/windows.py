"""Run a model for its losses, here only: windows over documents, batched, every target scored once, in bounded memory."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.attention.mixer import Mixer
from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import rope_types
from longitude.errors import one_line_of
from longitude.models.stock_caches import cache_name
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.positions.config_keys import FULL
from longitude.runs.costs import Memory, forward_memory
from longitude.runs.files import append_json, cut_json_lines

CHUNK = 2**22  # logits converted to float32 at once: 16 MiB
LOGITS = 2**24  # numbers of the head's output that a bounded reader keeps, about three times over: 200 MiB

Progress = Callable[[int, int], None]
"""progress(done, total), in tokens."""


# {(inputs in the window, inputs whose targets an earlier window scored): [(document, first input), ...]}
Windows = dict[tuple[int, int], list[tuple[int, int]]]


def plan_windows(counts: Sequence[int], window: int, stride: int) -> Windows:
    """The windows that score targets 0..count-1 of every document once each, grouped by shape so that they batch."""
    plan = defaultdict(list)
    for document, count in enumerate(counts):
        start = scored = 0
        while scored < count:
            stop = min(start + window, count)
            plan[stop - start, scored - start].append((document, start))
            start, scored = start + stride, stop
    return plan


def plan_ends(counts: Sequence[int], window: int, targets: int, span: int) -> Windows:
    """The windows that end with the last `targets` targets of every `span`, and score those alone."""
    starts = [
        (document, stop - window) for document, count in enumerate(counts) for stop in range(span, count + 1, span)
    ]
    return {(window, window - targets): starts}


def score(
    model: nn.Module,
    documents: Sequence[Tensor],
    counts: Sequence[int],
    plans: Sequence[Windows],
    batch_tokens: int,
    progress: Progress | None,
    reader: "Reader | None" = None,
) -> Iterator[list[np.ndarray]]:
    """For each plan, [count] float64 for every document: entry t is -ln p(token t + 1 | its window's tokens up to t).

    NaN for a target that no window scores.

    `progress` is called after every forward pass, over all the plans.
    """
    reader, device = reader or Reader(model), next((parameter.device for parameter in model.parameters()), "cpu")
    done, total = 0, sum(width * len(starts) for plan in plans for (width, _), starts in plan.items())
    for plan in plans:
        nats = [np.full(count, np.nan) for count in counts]
        with evaluating(model):
            for (width, skip), starts in plan.items():
                rows = max(1, batch_tokens // width)
                for first in range(0, len(starts), rows):
                    batch = starts[first : first + rows]
                    tokens = torch.stack([documents[document][at : at + width + 1] for document, at in batch])
                    if reader.bos is not None:
                        tokens[:, 0] = reader.bos  # its own target was scored in the window before
                    losses = reader.losses(tokens.to(device), skip).cpu().double().numpy()
                    for (document, at), loss in zip(batch, losses, strict=True):
                        nats[document][at + skip : at + width] = loss
                    done += len(batch) * width
                    if progress is not None:
                        progress(done, total)
        yield nats


class Reader:
    """Reader of windows in a single forward pass, with all its logits in memory.

    bos: a token that replaces the first token of every window, so that windows keep their width and every target is scored
    once. The first target of a window is predicted from this token only, the others from it and the earlier text of the window.
    """

    size: int | None = None
    """Tokens that are read at once; None: the whole window."""

    def __init__(self, model: Any, bos: int | None = None):
        self.model, self.bos = model, bos

    def losses(self, tokens: Tensor, skip: int) -> Tensor:
        """Tokens [B, T + 1] -> -ln p of tokens skip + 1..T, [B, T - skip], in float32 or better, chunk by chunk."""
        inputs, targets = tokens[:, :-1], tokens[:, 1 + skip :]
        logits = getattr(self.model(input_ids=inputs, use_cache=False), "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != inputs.shape:
            got = f"logits {list(logits.shape)}" if isinstance(logits, Tensor) else f"logits {logits!r}"
            raise ValueError(
                f"the model must answer input_ids {list(inputs.shape)} with .logits [*, *, vocab], got {got} from "
                f"{type(self.model).__name__}; pass a causal language model such as AutoModelForCausalLM loads"
            )
        logits = logits[:, skip:]
        columns = max(1, CHUNK // (logits.shape[0] * logits.shape[2]))
        chunks = zip(logits.split(columns, dim=1), targets.split(columns, dim=1), strict=True)
        return torch.cat([_nats(x, y) for x, y in chunks], dim=1)


class Bounded(Reader):
    """Reads a window of a transformers model in bounded memory, also for long windows and large vocabularies.

    size: tokens that the model reads at once, before it continues with its own cache; None: the whole window. Either way
    the head computes few positions at a time, so that no more than `logits` numbers of its output are held.
    restart: read one token first, which resets the tables of a model that keeps those of the longest text it read.
    """

    def __init__(
        self, model: Any, size: int | None, logits: int = LOGITS, restart: bool = False, bos: int | None = None
    ):
        super().__init__(model, bos)
        self.size, self.restart = size, restart
        self.cache_name = cache_name(model) or "cache"
        self.logits, self.vocabulary = logits, model.get_output_embeddings().weight.shape[0]

    def losses(self, tokens: Tensor, skip: int) -> Tensor:
        """Tokens [B, T + 1] -> -ln p of tokens skip + 1..T, [B, T - skip], in float32 or better."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        width = inputs.shape[1]
        size = self.size or width
        if self.restart:
            self.model(input_ids=inputs[:, :1], use_cache=False, logits_to_keep=1)
        losses, cache = [], {"use_cache": size < width}
        for start in range(0, width, size):
            chunk = slice(start, min(start + size, width))
            losses.append(self._chunk(inputs[:, chunk], targets[:, chunk], max(0, skip - start), cache))
        return torch.cat(losses, dim=1)

    def _chunk(self, inputs: Tensor, targets: Tensor, skip: int, cache: dict[str, Any]) -> Tensor:
        """inputs, targets [B, C] -> [B, C - skip]; `cache` grows. The body runs once, the head for a few positions at a time."""
        rows, width = inputs.shape
        columns = max(1, self.logits // (rows * self.vocabulary))
        first, *others = torch.arange(min(skip, width - 1), width, device=inputs.device).split(columns)
        body, outputs = self.model.base_model, []
        hook = body.register_forward_hook(lambda module, arguments, output: outputs.append(output))
        try:
            answer = self.model(input_ids=inputs, logits_to_keep=first, **cache)
        finally:
            hook.remove()
        if cache["use_cache"]:
            cache[self.cache_name] = getattr(answer, self.cache_name)
        losses = [_nats(answer.logits, targets[:, first])]
        if others:
            del answer
            body.forward = lambda *args, **kwargs: outputs[0]  # the model's own way from the body's output to logits
            try:
                for some in others:
                    logits = self.model(input_ids=inputs, logits_to_keep=some, use_cache=False).logits
                    losses.append(_nats(logits, targets[:, some]))
            finally:
                del body.forward
        return torch.cat(losses, dim=1)[:, max(0, skip - width + 1) :]


def nats_of(model: nn.Module, ids: Tensor) -> np.ndarray:
    """-ln p of each token of a text [n + 1] except the first, given all tokens before it: float64 [n]."""
    count = len(ids) - 1
    [[nats]] = score(model, [ids], [count], [plan_windows([count], count, count)], count, None)
    return nats


class Resumable(Reader):
    """Reads through another reader and keeps the losses of each pass in a journal, so that after a kill none is read again.

    path: a journal for one unit only, since losses depend on more than tokens. Losses that are not finite are not kept.
    """

    def __init__(self, reader: Reader, path: Path):
        super().__init__(reader.model, reader.bos)
        self.reader, self.path = reader, path
        self.known = {entry["pass"]: entry["nats"] for entry in cut_json_lines(path)}

    def losses(self, tokens: Tensor, skip: int) -> Tensor:
        """Tokens [B, T + 1] -> -ln p of tokens skip + 1..T, [B, T - skip], in float32 or better."""
        name = sha256(f"{[*tokens.shape]} {skip} ".encode() + tokens.cpu().numpy().tobytes()).hexdigest()
        if name in self.known:
            return torch.tensor(self.known[name], dtype=torch.float64)
        losses = self.reader.losses(tokens, skip)
        if bool(losses.isfinite().all()):
            append_json(self.path, {"pass": name, "nats": losses.tolist()})
        return losses


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits [B, T, vocab], targets [B, T] -> -ln softmax(logits)[targets], [B, T], in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every submodule has the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# ---- how a checkpoint is read ----------------------------------------------------------------------------------------
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference of logits between a full pass and chunks, relative to the largest logit; other dtypes: 5e-2.

Some models compute the softmax in float32 even for float64 (BLOOM).
"""
FOLLOWING = ("dynamic", "longrope")
"""Rotary types of transformers with frequencies that depend on the longest position of a call."""


@dataclass(frozen=True)
class Reading:
    """How a checkpoint reads windows: in chunks with its cache, or in one pass and why. finite: whether its logits are."""

    reader: Reader
    reason: str | None
    finite: bool

    def described(self, width: int) -> str:
        """For the column `prefill` of a row."""
        return f"one pass: {self.reason}" if self.reason is not None else described(self.reader.size, width)


def described(chunk: int | None, width: int) -> str:
    """How a window of `width` tokens is read."""
    return f"chunks of {chunk} with the cache" if chunk is not None and chunk < width else "one pass"


def follows_length(model: Any) -> str | None:
    """Why chunks of a text would have other positions than the whole text; None if they would not."""
    for module in model.modules():
        if isinstance(module, Encoding) and (at := compose(module).length_at)(0, 0) != at(0, 2**40):
            return "its positions follow the length of the whole sequence"
    following = [kind for kind in rope_types(model.config) if kind in FOLLOWING]
    return f"its rotary frequencies follow the length ({following[0]})" if following else None


def memory_to_read(model: Any, dtype: torch.dtype, length: int, batch: int, chunk: int) -> Memory:
    """Memory of a `Bounded` reader for windows of a length, as many at once as have `batch` tokens, `chunk` tokens in a pass.

    The model may be on the meta device.
    """
    head_dim = head_dim_of(model.config.get_text_config(), FULL) if keeps_keys(model) else 0
    return forward_memory(model, head_dim, dtype, length, max(1, batch // length), chunk, LOGITS)


def keeps_keys(model: Any) -> bool:
    """Whether a layer has attention heads, with keys and values that grow with the context: Mamba and RWKV have none."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]  # of our own models
    if mixers:
        return any(mixer.growth != "O(1)" for mixer in mixers)
    return hasattr(model.config.get_text_config(), "num_attention_heads")


def reading_of(model: Any, chunk: int, bos: int | None = None) -> Reading:
    """Chunks of `chunk` tokens, if the model's logits are the same in chunks as in one pass. ValueError: it is not causal.

    A few random tokens are read both ways. A model with other logits in chunks, or without a cache, reads windows in one pass.
    """
    reason = follows_length(model)
    restart = "dynamic" in rope_types(model.config)
    ids, size = _probe(model)
    with evaluating(model):
        whole, first = (model(input_ids=some, use_cache=False).logits for some in (ids, ids[:, :size]))
        scale = TOLERANCE.get(model.dtype, 5e-2) * float(whole.abs().max())
        if not _near(whole[:, :size], first, scale):
            raise ValueError(
                f"{type(model).__name__} is not causal: its answer for a token depends on later ones, so that its perplexity "
                f"has no meaning; take a model that predicts the next token"
            )
        reason = reason or _unlike(model, ids, size, whole, scale)
    finite = bool(whole.isfinite().all())
    return Reading(Bounded(model, None if reason else chunk, restart=restart, bos=bos), reason, finite)


def _probe(model: Any) -> tuple[Tensor, int]:
    """Random tokens [1, 3 * size], and the size of a chunk: at least a sliding window, if that is short."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    size = max(8, window) if window <= 256 else 8
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.get_input_embeddings().weight.shape[0], (1, 3 * size), generator=generator)
    return ids.to(model.device), size


def _unlike(model: Any, ids: Tensor, size: int, whole: Tensor, scale: float) -> str | None:
    """Why ids cannot be read in chunks with the logits of one pass; None if they can."""
    cache, answers, name = None, [], cache_name(model) or "cache"
    for some in ids.split(size, dim=1):
        try:
            answer = model(input_ids=some, **{name: cache}, use_cache=True)
        except Exception as error:  # whatever a model raises that cannot continue
            return f"with its cache it stops ({one_line_of(error)})"
        cache = getattr(answer, name, None)
        if cache is None:
            return "it keeps no cache of keys and values"
        answers.append(answer.logits)
    near = _near(whole, torch.cat(answers, dim=1), scale)
    return None if near else "in chunks, with its cache, its logits differ from those of one pass"


def _near(a: Tensor, b: Tensor, scale: float) -> bool:
    difference = (a - b).abs()
    finite = bool(difference.isfinite().all())  # a diverged model is no error of the cache
    return not finite or float(difference.max()) <= scale
