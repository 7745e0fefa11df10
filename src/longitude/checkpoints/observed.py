"""Positions by layer in the class of a config: a forward pass without weights that tracks the origin of tensors.

The model is built on the meta device, so a pass of the largest takes seconds and no memory. Each tensor is marked by its
origin: the tables of a rotary module, positions, places counted by arange, or the input of the layer. Attention is replaced by
a function that records the marks of its inputs and returns zeros, so a layer does not mark later layers. The content of marked
tables is then computed by calling the rotary modules on the CPU. The keys of the config that the class reads are recorded, too.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longitude.checkpoints.positions import is_rotary
from longitude.positions.config_keys import SCHEMAS
from longitude.positions.hugging_face import NotUnderstood, lost_type
from longitude.positions.layers import LayerPositions
from longitude.positions.scaling import Frequencies
from longitude.runs.quiet import quiet

NAME = "longitude_trace"
TOKENS = 3
MANY = 521
"""Tokens of a pass that shows the visible keys: more than any family compresses into one key."""
POSITIONS, PLACES, CONTENT = "positions", "places", "content"
"""Marks of position_ids, of results of arange, and of hidden states. Other marks are numbers of calls of rotary modules."""
RELEASED = {"item": int, "__int__": int, "__index__": int, "__bool__": bool, "__contains__": bool, "__float__": float}
"""Methods that read a tensor's value, and their types; tensors on the meta device have no values."""

Mark = str | int


# ---- what is found ---------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class RotaryTables:
    """Rotary tables of a call of a rotary module, for sequences of any length."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    width: int

    @property
    def label(self) -> str | None:
        """The layer type, or other name, that the tables were asked for by."""
        return self.kwargs.get("layer_type") or next((arg for arg in self.args if isinstance(arg, str)), None)

    @property
    def learned(self) -> bool:
        """Whether the frequencies are among the weights."""
        return any(True for _ in self.module.parameters())

    @property
    def axes(self) -> int:
        """Axes of positions (time, height and width of images); 0 if a token has one position."""
        several = [len(tensor) for tensor in tensors_in((self.args, self.kwargs)) if tensor.dim() == 3]
        return next((n for n in several if n > 1), 0)

    def at(self, *positions: int, axis: int | None = None) -> tuple[Tensor, Tensor]:
        """Cos and sin [..., positions, width], float64, computed on the CPU. axis: the axis of the positions; others are 0."""
        steps = torch.tensor(positions, device="cpu")

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():  # hidden states, for their dtype and device
                return torch.zeros(1, len(steps), 1)
            steps_of_axes = steps.expand(*value.shape[:-1], len(steps)).clone()
            if axis is not None:
                steps_of_axes[[other for other in range(len(steps_of_axes)) if other != axis]] = 0
            return steps_of_axes

        with torch.no_grad(), torch.device("cpu"):
            module = type(self.module)(config=self.module.config)
            out = module(*map(real, self.args), **{name: real(value) for name, value in self.kwargs.items()})
        cos, sin = (out.real, out.imag) if isinstance(out, Tensor) else out
        return cos.double(), sin.double()

    def frequencies(self, length: int, pairs: int | None = None) -> Frequencies:
        """Frequencies and factor of cos and sin in a sequence of `length`. pairs: how many are expected, if known."""
        cos, sin = (table.reshape(-1, *table.shape[-2:])[0] for table in self.at(0, 1, max(length, TOKENS) - 1))
        counts = (pairs or 0, cos.shape[-1] // 2, cos.shape[-1])
        take = next(columns for count in counts if (columns := _one_of_each(cos, count)) is not None)
        return Frequencies(torch.atan2(sin[1, take], cos[1, take]), float(torch.hypot(cos[0], sin[0]).max()))

    def axis_of_pair(self, pairs: int) -> list[int] | None:
        """The axis that each pair follows, -1 for one that does not turn; None if the module leaves it to attention."""
        axes = [-1] * pairs
        for axis in range(self.axes):
            _, sin = self.at(0, 1, axis=axis)
            if sin.dim() > 3 or (take := _one_of_each(sin[0], pairs)) is None:
                return None
            axes = [axis if turns else before for turns, before in zip(sin[0, 1, take].abs() > 0, axes, strict=True)]
        return axes


def _one_of_each(table: Tensor, pairs: int) -> slice | None:
    """Columns that contain each pair once, if pairs are repeated block by block or one by one; None for other widths."""
    if table.shape[-1] == pairs:
        return slice(None)
    if table.shape[-1] == 2 * pairs and torch.equal(table[..., :pairs], table[..., pairs:]):
        return slice(pairs)
    if table.shape[-1] == 2 * pairs and torch.equal(table[..., 0::2], table[..., 1::2]):
        return slice(0, None, 2)
    return None


@dataclass
class Layer:
    """Positions of a layer, as seen in a pass.

    Attributes:
        tables: RotaryTables that rotate its queries or keys; empty without rotation.
        attends: Whether its attention was seen.
        hidden: Whether it has attention that was not seen.
        width: Dimensions of its queries.
        scale: The number that multiplies its scores; None if attention gets none.
        warm: Whether only queries depend on their position, other than by rotation, for example by a temperature.
        turned: Whether queries and keys depend on positions without a rotary module.
        biased: Whether attention got another input that depends on positions, for example a bias.
        embedded: Whether the input of the layer already depends on positions.
        visible: The function of a query and a key by which transformers makes the mask; None if none was seen.
        unlike: Properties of its attention that mask, rotation and temperature do not describe.
        kind: The class of its attention; of the layer, if no attention was seen.
    """

    tables: list[RotaryTables] = field(default_factory=list)
    attends: bool = False
    hidden: bool = False
    width: int | None = None
    scale: float | None = None
    warm: bool = False
    turned: bool = False
    biased: bool = False
    embedded: bool = False
    visible: Callable[..., Tensor] | None = None
    unlike: dict[str, None] = field(default_factory=dict)
    kind: str = ""

    def unexplained(self, temperature: Any) -> str | None:
        """Position information that reaches attention other than by rotation and a declared temperature; None: none."""
        if self.embedded and not self.tables:
            return "positions are in its input, as of a table of positions"
        if self.turned:
            return "queries and keys depend on positions, and no module called rotary makes it so"
        if self.biased:
            return "attention gets something else that depends on positions, as a bias"
        if self.warm and temperature is None:
            return "queries are multiplied by something that depends on their position"
        return HIDDEN if self.hidden and not self.tables else None

    def window(self, length: int) -> int | None:
        """Keys in sight of the last of `length` queries, if they are the nearest ones; None without a mask of positions alone."""
        if self.visible is None or self.hidden:
            return None
        seen = seen_by(self.visible, length - 1, torch.arange(length))
        count = int(seen.sum())
        return count if 0 < count < length and bool(seen[-count:].all()) else None

    def not_as(self, declared: LayerPositions, length: int) -> str | None:
        """Difference between its visible keys at `length` tokens and the declared ones: earlier tokens, a window or a chunk."""
        if not declared.attends:
            return None
        if self.hidden or not self.attends:
            return f"{self.kind}: {HIDDEN}"
        if self.unlike:
            return f"{self.kind} {', '.join(self.unlike)}"
        if self.visible is None:
            return f"{self.kind} gets no mask that is made of positions alone"
        for query in sorted({0, declared.window or 0, declared.chunk or 0, length - 1}):
            keys = torch.arange(query + 2)
            got, want = seen_by(self.visible, query, keys), declared.allowed(torch.tensor([query]), keys)[0]
            if not torch.equal(got, want):
                return f"{self.kind}: query {query} attends to {int(got.sum())} keys, read of its config are {int(want.sum())}"
        return None


HIDDEN = "its attention cannot be looked into"


def seen_by(visible: Callable[..., Tensor], query: int, keys: Tensor) -> Tensor:
    """Whether a query attends to each of the keys, by transformers' function of a mask."""
    none = torch.zeros_like(keys)
    with Zeros():
        return visible(none, none, none + query, keys).expand_as(keys)


# ---- following tensors -----------------------------------------------------------------------------------------------
def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors, inside of lists and dicts, too."""
    return (leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor))


def marks(*values: Any) -> frozenset[Mark]:
    """All marks of tensors."""
    return frozenset().union(*(getattr(tensor, "_made_from", frozenset()) for tensor in tensors_in(values)))


def mark(values: Any, with_marks: frozenset[Mark]) -> None:
    for tensor in tensors_in(values):
        tensor._made_from = with_marks  # type: ignore[attr-defined]


def all_of(index: Any) -> Any:
    """An index in which lists of booleans keep everything, since the meta device cannot count what they select."""
    if isinstance(index, tuple):
        return tuple(map(all_of, index))
    return slice(None) if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1 else index


class Zeros(TorchFunctionMode):
    """Zeros for tensors of the meta device, such as the number of tokens of padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            with torch._C.DisableTorchFunction():
                args, kwargs = tree_map_only(
                    Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x, (args, kwargs)
                )
        return func(*args, **(kwargs or {}))


class Following(TorchFunctionMode):
    """Marks all that a function returns, or changes in place, with the marks of its arguments."""

    def __init__(self, used: Callable[[frozenset[Mark]], None], mixed: Callable[[], None]):
        super().__init__()
        self.used, self.mixed = used, mixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "conv1d" and (args[1] if len(args) > 1 else kwargs["weight"]).shape[-1] > 1:
            self.mixed()
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if name in RELEASED:
                return RELEASED[name](0)
            if name == "tolist":
                return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
            if name == "nonzero":
                return torch.zeros(1, args[0].dim(), dtype=torch.long, device="meta")
            if name == "__getitem__":
                args = (args[0], all_of(args[1]))
        out = func(*args, **kwargs)
        origins = marks(args, kwargs) | ({PLACES} if name == "arange" else frozenset())
        if origins:
            self.used(origins)
            changed = [out]
            if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
                changed += [args[0], args[0]._base]
            for tensor in tensors_in(changed):
                mark(tensor, marks(tensor) | origins)
        return out


class Pass:
    """A pass of a model on the meta device, with the record of each layer."""

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, tokens: int):
        self.model, self.config, self.tokens = model, config, tokens
        self.calls: list[RotaryTables] = []
        self.modules = layers_of(model, config.num_hidden_layers)
        self.layers = [Layer(kind=type(module).__name__) for module in self.modules]
        self.inside: list[tuple[int, frozenset[Mark]]] = []
        self.rotated: list[set[int] | None] = [None] * len(self.layers)
        self.touched: list[set[int]] = [set() for _ in self.layers]

    def run(self) -> list[Layer]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(recording(self.attended))
            # It reads the values of positions, which meta tensors do not have, and takes each token for a document.
            stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None))
            for handle in self.hooks():
                stack.enter_context(handle)
            ids, positions = (torch.zeros(1, self.tokens, dtype=torch.long, device="meta") for _ in range(2))
            mark(positions, frozenset({POSITIONS}))
            stack.enter_context(Following(self.used, self.mixed))
            self.model(input_ids=ids, position_ids=positions, use_cache=False)
        for layer, rotated, touched in zip(self.layers, self.rotated, self.touched, strict=True):
            layer.tables = [self.calls[call] for call in sorted(touched if rotated is None else rotated)]
        types = getattr(self.config, "layer_types", None) or [None] * len(self.layers)
        for layer, module, kind in zip(self.layers, self.modules, types):
            named = any("attention" in type(part).__name__.lower() for part in module.modules())
            layer.hidden = named and not layer.attends and (kind is None or "linear" not in kind)
        count = self.config.num_hidden_layers
        if len(self.layers) != count:  # layers with two attentions (LongCat), or that are gone through again (HRM)
            if any(layer != self.layers[0] for layer in self.layers):
                raise NotUnderstood(f"{type(self.model).__name__} has no list of {count} layers", ["num_hidden_layers"])
            return self.layers[:1] * count
        return self.layers

    def hooks(self) -> Iterator[Any]:
        for layer, module in enumerate(self.modules):
            yield module.register_forward_pre_hook(lambda *args, layer=layer: self.enter(layer, args), with_kwargs=True)
            yield module.register_forward_hook(self.leave)
            for part in module.modules():
                if part is not module and type(part).__module__.startswith("transformers."):
                    yield tolerant(part)
        for name, module in self.model.named_modules():
            if is_rotary(module) and "vision" not in name:
                yield module.register_forward_hook(self.made, with_kwargs=True)

    def enter(self, layer: int, args: Any) -> None:
        first = next(tensors_in(args[1:]), None)
        before = marks(first) & {POSITIONS, PLACES}
        self.inside.append((layer, before))
        self.layers[layer].embedded |= bool(before)
        mark(first, marks(first) | {CONTENT})

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """Remove marks of a layer from its output, except of hidden states: later layers may share its selected keys."""
        before = self.inside.pop()[1]
        for tensor in tensors_in(out):
            mark(tensor, before | (marks(tensor) & {CONTENT}))

    def made(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        first = next(tensors_in(out), None)
        if first is not None:
            mark(out, frozenset({len(self.calls)}))
            self.calls.append(RotaryTables(module, args, kwargs, first.shape[-1]))

    def used(self, origins: frozenset[Mark]) -> None:
        if self.inside:
            self.touched[self.inside[-1][0]] |= {origin for origin in origins if isinstance(origin, int)}

    def mixed(self) -> None:
        if self.inside:
            at = self.inside[-1][0]
            kind = type(self.modules[at]).__name__
            self.layers[at].unlike[f"stands in a {kind} that mixes neighboring tokens by a convolution"] = None

    def attended(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]) -> None:
        if not self.inside:
            return
        at, before = self.inside[-1]
        if not hasattr(module, "layer_idx") and any(hasattr(part, "layer_idx") for part in self.modules[at].modules()):
            return  # attention over the outputs of earlier layers (Inkling 2), beside that over tokens
        layer, mine = self.layers[at], marks(query) | marks(key)
        layer.attends, layer.width, layer.scale = True, query.shape[-1], others["scaling"]
        self.rotated[at] = (self.rotated[at] or set()) | {origin for origin in mine if isinstance(origin, int)}
        layer.warm |= bool((marks(query) - marks(key)) & {POSITIONS, PLACES})
        layer.turned |= bool(((marks(query) & marks(key)) - before) & {POSITIONS, PLACES})
        floats = [tensor for tensor in tensors_in(others) if tensor.is_floating_point()]
        layer.biased |= bool((marks(floats) - mine) & {POSITIONS, PLACES})
        layer.visible = getattr(others["attention_mask"], "_visible", None)
        layer.kind, queries, keys = type(module).__name__, query.shape[-2], key.shape[-2]
        if CONTENT in marks(others):
            names = [name for name, value in others.items() if CONTENT in marks(value)]
            layer.unlike[f"selects or weighs keys by hidden states ({', '.join(names)})"] = None
        if keys != queries:
            what = "adds keys" if keys > queries else "compresses or leaves out keys"
            layer.unlike[f"{what} ({keys} for {queries} tokens)"] = None
        if any(isinstance(origin, int) for origin in marks(value)) or (marks(value) - before) & {POSITIONS, PLACES}:
            layer.unlike["makes values depend on positions"] = None


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """The layers of a model: the ModuleList with the most submodules, among those of length `count` if there are any."""
    lists = [modules for modules in model.modules() if isinstance(modules, nn.ModuleList) and len(modules)]
    if not lists:
        raise NotUnderstood(f"{type(model).__name__} has no list of layers", ["model_type"])
    return max(lists, key=lambda modules: (len(modules) == count, sum(1 for _ in modules.modules())))


def tolerant(module: nn.Module) -> Any:
    """Context in which a module that cannot run on the meta device, such as a kernel, gives zeros, unless it gets tables.

    Some modules are shared by all models of a class (activations of the first GPT), so they get their forward back.
    """
    forward = module.forward
    takes = {
        name for name, parameter in signature(forward).parameters.items() if parameter.kind is not parameter.VAR_KEYWORD
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            first = next(tensors_in((args, kwargs)), None)
            tabled = [value for name, value in kwargs.items() if name in takes]
            tables = {origin for origin in marks(args, tabled) if isinstance(origin, int)}
            if first is None or tables:
                raise
            return torch.zeros_like(first)

    return patch.object(module, "forward", call)


# ---- attention and masks in its place --------------------------------------------------------------------------------
Look = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], None]
"""Callback with a module, its queries, keys and values, and the other arguments of attention by name."""
_LOOK: list[Look] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _LOOK[-1](
        module, query, key, value, {"attention_mask": attention_mask, "scaling": scaling, "others": args, **kwargs}
    )
    return torch.zeros(*query.transpose(1, 2).shape[:3], value.shape[-1], dtype=query.dtype, device=query.device), None


def _mask(*args: Any, **kwargs: Any) -> Any:
    mask = eager_mask(*args, **kwargs)
    mark(mask, frozenset())
    if mask is not None:
        mask._visible = kwargs.get("mask_function")  # type: ignore[attr-defined]
    return mask


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


@contextmanager
def recording(look: Look) -> Iterator[None]:
    """Context in which `look` gets the arguments of every attention call, in models with the attention NAME."""
    _LOOK.append(look)
    try:
        yield
    finally:
        _LOOK.pop()


# ---- keys that are read ----------------------------------------------------------------------------------------------
class Recorded(dict[str, Any]):
    """A dict of a config that records which of its entries are read, with their place: rope_parameters.factor."""

    def __init__(self, entries: Mapping[str, Any], place: str, read: set[str]):
        inner = {
            key: Recorded(value, f"{place}.{key}", read) if isinstance(value, Mapping) else value
            for key, value in entries.items()
        }
        super().__init__(inner)
        self.place, self.read = place, read

    def __getitem__(self, key: str) -> Any:
        self.record(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.record(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.record(*self)
        return super().items()

    def record(self, *keys: str) -> None:
        self.read |= {f"{self.place}.{key}" for key in keys}

    def __deepcopy__(self, memo: Any) -> Recorded:
        return self


@contextmanager
def recording_keys(config: PreTrainedConfig, read: set[str]) -> Iterator[None]:
    """Context in which the keys of a config that any code reads are added to `read`, as places: attn_config.alibi."""
    with ExitStack() as stack:
        for place, part in parts_of(config).items():
            # Of the class, since Python looks there, and models copy their config: other configs of it count as well.
            kind, names, lookup = type(part), {*vars(part)}, type(part).__getattribute__
            for name, value in vars(part).items():
                if isinstance(value, dict) and name in SCHEMAS:
                    stack.enter_context(patch.dict(vars(part), {name: Recorded(value, f"{place}{name}", read)}))

            def get(
                self: Any, name: str, kind: Any = kind, names: Any = names, lookup: Any = lookup, place: str = place
            ) -> Any:
                usual = kind.attribute_map.get(name, name)
                if usual in names:
                    read.add(f"{place}{usual}")
                return lookup(self, name)

            stack.enter_context(patch.object(kind, "__getattribute__", get, create=True))
        yield


def parts_of(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """A config, and the configs in it (MPT's attn_config), by the beginning of the places of their keys."""
    inner = {f"{name}.": part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    return {"": config} | inner


# ---- the question ----------------------------------------------------------------------------------------------------
class Observation(NamedTuple):
    """What a pass shows.

    Attributes:
        layers: The record of each layer.
        read: Places of the keys of the config that the class reads, as it has them: rope_parameters.factor.
    """

    layers: list[Layer]
    read: frozenset[str]


_OBSERVED: dict[Any, Observation | NotUnderstood] = {}
"""Results by class, keys and tokens: the newest 64."""


def observe(config: PreTrainedConfig, tokens: int = TOKENS) -> Observation:
    """Positions of each layer as a config's class computes them, and the keys that it reads.

    Args:
        config: The config of a text model.
        tokens: Tokens of the pass. Few suffice for rotations; with many, layers may select or compress some.

    Raises:
        NotUnderstood: Transformers has no model for the config, or its pass does not run on the meta device.
    """
    key = type(config), json.dumps(config.to_dict(), sort_keys=True, default=str), tokens
    if key not in _OBSERVED:
        if len(_OBSERVED) >= 64:
            _OBSERVED.pop(next(iter(_OBSERVED)))
        _OBSERVED[key] = _pass(config, tokens)
    seen = _OBSERVED[key]
    if isinstance(seen, NotUnderstood):
        raise seen
    return seen


def _pass(config: PreTrainedConfig, tokens: int) -> Observation | NotUnderstood:
    read, config = set[str](), copy.deepcopy(config)
    try:
        with quiet(), catch_warnings(action="ignore"), recording_keys(config, read):  # of kernels that are not here
            with torch.device("meta"):
                model = skeleton(config)
            layers = Pass(model, config, tokens).run()
            with suppress(Exception):  # caches of other kinds
                DynamicCache(config=config)
        return Observation(layers, frozenset(read))
    except NotUnderstood as error:
        return error
    except Exception as error:
        reason = lost_type(config, error) or " ".join(str(error).split())[:160] or type(error).__name__
        return NotUnderstood(
            f"the class of model_type {config.model_type!r} cannot be tried without weights ({reason})", ["model_type"]
        )


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The Auto class that has the causal model of a config; AutoModel if none has."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModel)


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the class that transformers has for a config, in eval mode. NotUnderstood if it has none."""
    auto = auto_class_of(config)
    model = auto.from_config(config) if type(config) in auto._model_mapping else _by_module(config)(config)
    with suppress(AttributeError, ValueError):  # attention or experts of its own
        model.set_attn_implementation(NAME)
        model.set_experts_implementation("batched_mm")
    return model.eval()


def _by_module(config: PreTrainedConfig) -> Any:
    """The model of a text part, which no Auto class knows, beside its config."""
    room = type(config).__module__.replace("configuration_", "modeling_")
    with suppress(ImportError):
        for name, entry in vars(import_module(room)).items():
            if getattr(entry, "config_class", None) is type(config) and re.fullmatch(r"(?!.*PreTrained)\w+Model", name):
                return entry
    raise NotUnderstood(f"transformers has no model for a config of model_type {config.model_type!r}", ["model_type"])
