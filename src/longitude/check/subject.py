"""The model that laws are tried on: its tokens, its passes in one piece and in many, and how far two answers are apart."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from longitude.attention.state_mixer import StateMixer
from longitude.check.selection import Selection
from longitude.checkpoints.load import Checkpoint
from longitude.models.stock_caches import OF_KEYS, arguments_of, cache_name
from longitude.runs.quiet import greedy, quiet
from longitude.testing.engine import Battery, DoesNotApply, Measurement

EQUAL = 1e-4
"""Largest relative error of logits that count as equal, in float64. Rounding gives 1e-15 to 1e-7, because some models compute
parts in float32. The weakest bug of an untrained model gives about 1e-3."""
EQUAL_IN_FLOAT32 = 1e-3
"""Largest relative error of logits that count as equal, in float32. Rounding gives up to 1e-5."""

LAWS = "files rotation passes layers attention decoding batches caches images references"
CHECKPOINT_LAWS = Battery(
    "checkpoint",
    *(f"longitude.check.laws.{room}" for room in LAWS.split()),
)
"""The laws of a checkpoint, in this order; each may rest on those before it, so those that name a layer come first."""

RECURRENT = ("Mamba", "BambaMixer", "FalconH1Mixer", "Lightning", "ShortConv", "Recurrent", "DeltaNet", "Rwkv", "mLSTM")
"""Parts of the class names of recurrent layers in transformers."""
WORDS = 4096
"""Number of logits per token that are compared, so that a few long passes fit into memory."""


PLAIN = {*vars(nn.Module()), "config"}
"""Attributes of a module that are no state of its own."""


def held_by(container: dict | list | set) -> list[int]:
    """The objects in a container by identity: a slot of it may be filled without a change of its length."""
    ids = [id(entry) for entry in ([*container, *container.values()] if isinstance(container, dict) else container)]
    return sorted(ids) if isinstance(container, set) else ids


class Unused:
    """Attributes of a model's modules before its first pass, besides weights, to find and undo what passes change."""

    def __init__(self, model: nn.Module):
        self.numbers = {(module, name) for module, name, _ in Selection(model).numbers}  # of keys, which laws set
        self.kept = [(module, self.state_of(module), {*module._buffers}) for module in model.modules()]

    def state_of(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        """Attribute -> its value, and a copy of one that can grow."""
        return {
            name: (value, copy.copy(value) if type(value) in (dict, list, set) else value)
            for name, value in vars(module).items()
            if name not in PLAIN and (module, name) not in self.numbers
        }

    def changes(self) -> Iterator[tuple[nn.Module, str]]:
        """(module, name) of each attribute or buffer that passes have added or changed."""
        for module, before, buffers in self.kept:
            now = self.state_of(module)
            for name in sorted(before.keys() | now.keys()):
                (was, content), (value, _) = before.get(name, (PLAIN, None)), now.get(name, (PLAIN, None))
                if value is not was or (type(was) in (dict, list, set) and held_by(was) != held_by(content)):
                    yield module, name
            yield from ((module, name) for name in sorted(module._buffers.keys() - buffers))

    def left(self) -> list[str]:
        """Names of the changed attributes, with the class of their module."""
        return list(dict.fromkeys(f"{type(module).__name__}.{name}" for module, name in self.changes()))

    def restore(self) -> None:
        """Set the modules back to the state before the first pass."""
        states = {module: before for module, before, _ in self.kept}
        for module, name in [*self.changes()]:
            if name not in states[module]:
                delattr(module, name)
                continue
            value, content = states[module][name]
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, dict | set):
                value.clear()
                value.update(content)
            setattr(module, name, value)


@dataclass
class Subject:
    """A causal model in eval mode, with the data that laws need.

    Args:
        model: The model.
        raw: Content of config.json, before transformers reads it.
        length: Tokens that equality laws compare.
        reach: Tokens to compare, not limited by the border of a length-dependent scaling.
        kind: The dtype that equality laws compute in.
        reference: A model that must give the same logits.
        seed: Seed for the random input tokens.
        folder: Folder of its files, if it was loaded from a folder.
        checkpoint: The loaded checkpoint; None: the model was built in memory.
        on_progress: Called with the share of a law that is done.

    Attributes:
        unused: What its modules held before the first pass; None: not known.
    """

    model: Any
    raw: Mapping[str, Any]
    length: int
    reach: int
    kind: torch.dtype = torch.float64
    reference: Any = None
    seed: int = 0
    folder: Path | None = None
    checkpoint: Checkpoint | None = None
    on_progress: Callable[[float], None] = field(default=lambda share: None)
    unused: Unused | None = field(default=None, init=False)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def stock(self) -> bool:
        """Whether the code of every part of the model is as transformers and torch published it."""
        return not patched(type(self.model)) and all(
            type(module).__module__.startswith(("transformers.", "torch.")) and "forward" not in vars(module)
            for module in self.model.modules()
        )

    @property
    def threshold(self) -> float:
        return EQUAL if self.kind == torch.float64 else EQUAL_IN_FLOAT32

    @cached_property
    def selection(self) -> Selection:
        """Selection of keys by top-k in the model."""
        return Selection(self.model)

    @cached_property
    def takes(self) -> set[str]:
        """Names of the arguments of forward; if it has **kwargs, also those of the forwards that it overrides."""
        return arguments_of(self.model)

    @cached_property
    def cache_name(self) -> str | None:
        """Name of the cache argument of forward."""
        return cache_name(self.model)

    @cached_property
    def attends(self) -> bool:
        """Whether it has a cache of keys, and attention_mask covers those too.

        A model of recurrent layers alone masks the tokens of a call.
        """
        return self.cache_name in OF_KEYS and not all(DynamicCache(config=self.model.config).is_linear)

    def require(self, argument: str, so: str) -> None:
        """DoesNotApply if forward does not take an argument; so: words for what cannot be tried without it."""
        if argument not in self.takes:
            raise DoesNotApply(f"forward takes no {argument}, so {so}")

    def rebuilt(self, kind: Any, **options: Any) -> Any:
        """A second model of its weights, by from_pretrained of a class. DoesNotApply if there is no room for it."""
        state = self.model.state_dict()
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        if self.device.type != "cpu" or 2 * size > psutil.virtual_memory().available:
            raise DoesNotApply("a second copy of its weights is not made on this device, or does not fit into memory")
        with quiet():
            return kind.from_pretrained(
                None, config=copy.deepcopy(self.model.config), state_dict=dict(state), **options
            )

    def with_cache(self, cache: Any) -> dict[str, Any]:
        """A cache as an argument of forward."""
        return {self.cache_name or "cache": cache}

    @property
    def recurrent(self) -> bool:
        """Whether layers have a recurrent state, as in Mamba."""
        if any(DynamicCache(config=self.model.config).is_linear):
            return True
        kinds = {type(module) for module in self.model.modules()}
        return any(issubclass(kind, StateMixer) or any(word in kind.__name__ for word in RECURRENT) for kind in kinds)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def tokens(self, length: int, rows: int = 1, seed: int = 0) -> Tensor:
        """Random tokens [rows, length], none of them special."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        ends = (
            getattr(self.config, key, None) for key in ("bos_token_id", "eos_token_id")
        )  # some text configs have none
        special = {self.pad, *(token for end in ends for token in listed(end))}
        usable = [token for token in range(min(self.config.vocab_size, 100_000)) if token not in special]
        return torch.tensor(usable)[torch.randint(len(usable), (rows, length), generator=generator)].to(self.device)

    @property
    def pad(self) -> int:
        """The token id of padding."""
        known = [getattr(self.config, "pad_token_id", None), *listed(getattr(self.config, "eos_token_id", None)), 0]
        return next(token for token in known if token is not None and 0 <= token < self.config.vocab_size)

    def padded(self, tokens: Tensor, pads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] with pads[r] padding tokens at the start of row r, and their attention_mask [B, L]."""
        mask = (torch.arange(tokens.shape[1]) >= torch.tensor(pads)[:, None]).long().to(tokens.device)
        return tokens.masked_fill(mask == 0, self.pad), mask

    # ---- passes -------------------------------------------------------------------------------------------------------
    def logits(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits [B, L, words] of tokens [B, L] in a pass without a cache; without options, the reference of other passes."""
        return self.some(self.model(input_ids=tokens, use_cache=False, **options).logits)

    def some(self, logits: Tensor) -> Tensor:
        """[B, L, vocabulary] -> [B, L, words]: at most WORDS of them, evenly spread; an error of positions shows in all."""
        step = max(1, -(-logits.shape[-1] // WORDS))
        return logits.detach()[..., ::step].clone()

    def positions(self, mask: Tensor) -> dict[str, Tensor]:
        """position_ids as generate() makes them from a mask [B, L], if forward takes them."""
        if "position_ids" not in self.takes:
            return {}
        return {"position_ids": (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)}

    def in_chunks(
        self,
        tokens: Tensor,
        sizes: Sequence[int],
        given: bool = False,
        start: int = 0,
        cache: Any = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, L, words] of tokens [B, L] with a cache, in chunks of these sizes.

        Args:
            tokens: [B, L].
            sizes: Tokens of each chunk.
            given: attention_mask and position_ids are passed with each chunk, as generate() does.
            start: Where the position_ids begin.
            cache: The cache, which may already store tokens; None: the one that the model makes.
            mask: attention_mask [B, tokens in the cache + L]; None: of ones.
        """
        name = self.cache_name
        if name is None:
            raise DoesNotApply("its forward takes no cache, so tokens cannot be given to it in parts")
        held, out = 0 if cache is None else int(cache.get_seq_length()), []
        mask = tokens.new_ones(len(tokens), held + tokens.shape[1]) if mask is None else mask
        made = cache
        for chunk in tokens.split([*sizes], 1):
            seen, options = mask[:, : held + chunk.shape[1]], dict[str, Any]()
            if given:
                options = {"attention_mask": seen} if "attention_mask" in self.takes else {}
                options |= {key: at[:, held:] + start for key, at in self.positions(seen).items()}
            answer = self.model(input_ids=chunk, use_cache=True, **{name: made}, **options)
            if not hasattr(answer, name):
                raise DoesNotApply(f"its answers have no {name}, so tokens cannot be given to it in parts")
            held, made = held + chunk.shape[1], getattr(answer, name) if cache is None else cache
            out.append(self.some(answer.logits))
            if made is None:
                raise ValueError(f"use_cache=True gave no {name}")
        return torch.cat(out, 1)

    def generated(self, tokens: Tensor, prompt: int, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits [B, L - prompt, words] of generate(), forced to choose the tokens [B, L] after the prompt.

        They predict the tokens from index `prompt` on. options: of its GenerationConfig.
        """

        def forced(seen: Tensor, scores: Tensor) -> Tensor:
            only = torch.full_like(scores, float("-inf"))
            return only.scatter(1, tokens[:, seen.shape[1], None], 0.0)

        mask = torch.ones_like(tokens) if mask is None else mask
        plain = {"max_new_tokens": tokens.shape[1] - prompt, "output_logits": True, "return_dict_in_generate": True}
        with greedy(self.model, pad_token_id=self.pad, **plain, **options):
            answer = self.model.generate(tokens[:, :prompt], attention_mask=mask[:, :prompt], logits_processor=[forced])
        return self.some(torch.stack(answer.logits, 1))

    def error(self, got: Tensor, want: Tensor) -> Tensor:
        """[B, L, words] twice -> [L]: max |got - want| over rows and words, in units of how much logits vary.

        That is their root mean square about the mean of each position. Infinite if a logit is not finite.
        """
        want, got = want.double(), got.double()
        spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
        gap = (got - want).abs().amax(-1) / spread
        return gap.nan_to_num(nan=float("inf"), posinf=float("inf")).amax(0)

    def measurement(self, error: Tensor | Mapping[str, Tensor], cause: str) -> Measurement:
        """Measurement of an error by position [L], or of one of each way; its cause names ways, and the first position, above."""
        ways = error if isinstance(error, Mapping) else {"": error}
        broken = "; ".join(way for way, off in ways.items() if way and self.first_above(off) is not None)
        worst = torch.stack([*ways.values()]).amax(0)
        first = self.first_above(worst)
        where = "" if first is None else f" (from position {first} on)"
        cause += f" ({broken})" if broken else ""
        return Measurement(float(worst.max()), self.threshold, cause=cause + where, position=first)

    def first_above(self, error: Tensor) -> int | None:
        """The first position at which error [L] exceeds the threshold."""
        above = (error > self.threshold).nonzero()
        return int(above[0]) if len(above) else None


def patched(kind: type) -> str:
    """A function of a class's module that was replaced by code from outside of transformers, as libraries do; "" if none was."""
    module = sys.modules[kind.__module__]
    if not module.__name__.startswith("transformers."):
        return ""
    packages = [Path(package.__file__ or "").parent for package in (transformers, torch)]
    defined = {*re.findall(r"^\s*def (\w+)", inspect.getsource(module), re.MULTILINE)}
    classes = [held for held in vars(module).values() if isinstance(held, type) and held.__module__ == module.__name__]
    for holder in (module, *classes):
        for name in sorted(vars(holder).keys() & defined):
            function = vars(holder)[name]
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            if code is None or code.co_filename.startswith("<"):  # made by exec, as methods of a dataclass are
                continue
            if not any(Path(code.co_filename).is_relative_to(package) for package in packages):
                return f"{holder.__name__}.{name}"
    return ""


def listed(token: int | Sequence[int] | None) -> list[int]:
    return [] if token is None else [token] if isinstance(token, int) else list(token)


# ---- the dtype of equality laws --------------------------------------------------------------------------------------
@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype, tables: bool = True) -> Iterator[None]:
    """Context in which weights and tables of `model` have another dtype, in place; then it restores the same tensors.

    tables: False leaves them as they are, as from_pretrained(dtype=...) has them.
    """
    changes: list[tuple[Any, str, Any]] = [(p, "data", p.data) for p in model.parameters()]
    for module in model.modules() if tables else ():
        changes += [(module, name, table) for name, table in module._buffers.items() if table is not None]
    floats = ((holder, name, tensor.to(dtype)) for holder, name, tensor in changes if tensor.is_floating_point())
    with with_attributes(floats):
        yield


@contextmanager
def with_attributes(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context in which attributes of objects have other values: (object, name, value)."""
    with ExitStack() as stack:
        for holder, name, value in attributes:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def widest(model: nn.Module) -> torch.dtype:
    """float64 if a copy of the weights in it fits into 0.6 of the free memory, and the device supports it; else float32."""
    device = next(model.parameters()).device
    needed = 8 * sum(p.numel() for p in model.parameters())
    if device.type == "mps":
        return torch.float32
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return torch.float64 if needed < 0.6 * free else torch.float32
