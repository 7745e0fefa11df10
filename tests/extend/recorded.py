"""Which rotary tables each layer multiplies with, recorded in one pass of the family's own class, without weights.

Weights stay on the meta device, where they have a shape and no numbers; rotary tables and activations are real and small. An
operation that meets both gives zeros of the right shape, so that a model of any size runs in a second, and what is multiplied
with a table is seen where it happens: in a layer that rotates nothing, nothing.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig

from longitude.errors import one_line_of
from longitude.positions.config_keys import WINDOWED
from longitude.runs.quiet import quiet

TOKENS = 3
LARGE = 2**26
"""Numbers that no table of positions has, and some weights have."""
FILLED = (
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.randn.default,
    torch.ops.aten.rand.default,
)
LAYER = re.compile(r"^.*?\.(\d+)(\.|$)")
"""The name of a module in a layer, with its number."""
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention")
"""Keys of the tokens that a layer with a window attends to."""
POSITIONS = ("position_ids", "positions")
"""What rotary modules call their argument of positions."""


class NotShown(ValueError):
    """Raised where a class cannot be run without weights, or shows no tables."""


class Table(NamedTuple):
    """What a rotary module rotates by: radians per position of each pair [pairs], float64, and what multiplies cos and sin."""

    inverse: Tensor
    factor: float


@dataclass(eq=False)
class Call:
    """One call of a rotary module, which can be made again at other positions.

    Attributes:
        module: That was called.
        label: The layer type that it was called with or made for; None where it has one kind of table.
        arguments: By name, as it was called.
    """

    module: nn.Module
    label: str | None
    arguments: dict[str, Any]

    def at(self, length: int) -> Table:
        """The table of a sequence of `length` tokens: read at position 1, the last position being length - 1."""
        name = next((name for name in POSITIONS if isinstance(self.arguments.get(name), Tensor)), None)
        if name is None:
            raise NotShown(f"{type(self.module).__name__} takes no positions")
        before = self.arguments[name]
        positions = torch.tensor([0, 1, max(1, length - 1)]).expand(*before.shape[:-1], 3)
        x = next(
            (x for x in self.arguments.values() if isinstance(x, Tensor) and x.is_floating_point()), torch.zeros(1)
        )
        given = {key: torch.zeros(1, 3, x.shape[-1]) if value is x else value for key, value in self.arguments.items()}
        fresh = copy.deepcopy(self.module)  # some keep the frequencies of the longest sequence that they met
        with torch.no_grad(), quiet():
            cos, sin = parts(fresh(**given | {name: positions}))
        cos, sin = (each.double().reshape(-1, *each.shape[-2:])[0] for each in (cos, sin))
        return Table(one_of_each(torch.atan2(sin[1], cos[1])), float(torch.hypot(cos[0], sin[0]).max()))


def one_of_each(x: Tensor) -> Tensor:
    """[pairs] of a table that has each pair once, twice in halves, or twice side by side."""
    half = len(x) // 2
    if len(x) % 2 == 0 and torch.equal(x[:half], x[half:]):
        return x[:half]
    return x[::2] if len(x) % 2 == 0 and torch.equal(x[::2], x[1::2]) else x


def number_of(name: str) -> int:
    """The layer that a module is in, by its name."""
    layer = LAYER.match(name)
    assert layer is not None
    return int(layer[1])


def parts(out: Any) -> tuple[Tensor, Tensor]:
    """(cos, sin) of what a rotary module returns. NotShown for anything else."""
    if isinstance(out, Tensor) and out.is_complex():
        return out.real, out.imag
    if isinstance(out, tuple | list) and len(out) == 2 and all(isinstance(x, Tensor) and x.dim() > 1 for x in out):
        return out[0], out[1]
    raise NotShown("its rotary module returns no cos and sin")


@dataclass
class Recorded:
    """What one pass showed.

    Attributes:
        calls: By the number of a layer that rotates, the calls whose tables it multiplied with, each once.
        windows: By the number of a layer with a window or chunks, how many tokens it attends to.
    """

    calls: dict[int, list[Call]]
    windows: dict[int, int]

    @property
    def places(self) -> list[tuple[int, str | None]]:
        """Layers that rotate, with the type of each of their tables."""
        return [(layer, call.label) for layer, calls in self.calls.items() for call in calls]


def recorded(kind: Any, config: PreTrainedConfig) -> Recorded:
    """A pass of three tokens through a model of this config, whose windows are made two tokens wide; kind: its Auto class.

    Raises:
        NotShown: For a class that does not run without weights.
    """
    narrow = copy.deepcopy(config)
    text: Any = narrow.get_text_config(decoder=True)
    given = text.to_dict()  # where layers have several, none is in it
    sizes = {key: size for key in WINDOWS if isinstance(size := given.get(key), int) and size >= TOKENS}
    for key in sizes:
        setattr(text, key, TOKENS - 1)
    try:
        with quiet(), init_empty_weights(include_buffers=False), LargeOnMeta():
            model = kind.from_config(narrow, dtype=torch.float32, attn_implementation="eager").eval()
        watch = Watch(model)
        with quiet(), torch.no_grad(), on_torch_alone(model), watch:
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long))
    except Exception as error:  # whatever a model's code raises
        raise NotShown(f"a pass of its {config.model_type} model fails ({one_line_of(error)})") from error
    types = given.get("layer_types") or []
    summaries = {
        layer for layer, kind in enumerate(types) if "compressed" in kind
    }  # by which a layer sees far behind its window
    near = watch.windowed - summaries | {layer for layer, kind in enumerate(types) if kind in WINDOWED}
    return Recorded(dict(sorted(watch.found.items())), dict.fromkeys(sorted(near), min(sizes.values(), default=0)))


# ---- the pass -----------------------------------------------------------------------------------------------------------
class LargeOnMeta(TorchDispatchMode):
    """Within: no memory is filled with weights before they lose their numbers, as some classes do it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = args[0] if args and func in FILLED and not any(isinstance(x, Tensor) for x in args) else ()
        large = math.prod(sizes) > LARGE
        return func(*args, **(kwargs or {}) | ({"device": torch.device("meta")} if large else {}))


class Watch(TorchDispatchMode):
    """Within: operations on weights without numbers give zeros, and multiplications with rotary tables are noted."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.found: dict[int, list[Call]] = {}
        self.windowed: set[int] = set()
        self.path: list[str] = []
        self.of_storage: dict[int, tuple[Tensor, tuple[Call, ...]]] = {}

    def __enter__(self) -> Watch:
        self.hooks = []
        for name, module in self.model.named_modules():
            if LAYER.match(name):
                self.hooks.append(module.register_forward_pre_hook(partial(self.enter, name), with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self.leave))
            if re.search("Rotary|R[Oo]PE|Rope", type(module).__name__):
                self.hooks.append(module.register_forward_hook(self.note, with_kwargs=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def enter(self, name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A module within a layer; the mask that it gets shows whether the layer has a window."""
        self.path.append(name)
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape[-2:] == (TOKENS, TOKENS):
            open_ = mask.reshape(-1, TOKENS, TOKENS)[0, -1]
            if bool(open_[0] < open_[-1]):  # the last token does not attend to the first
                self.windowed.add(number_of(name))

    def leave(self, *_: Any) -> None:
        self.path.pop()

    def note(self, module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        """A call of a rotary module: its tables are watched from here on."""
        try:
            tables = parts(out)
        except NotShown:
            return
        arguments = inspect.signature(module.forward).bind(*given, **named).arguments
        label = next((word for word in arguments.values() if isinstance(word, str)), None)
        call = Call(module, label or getattr(module, "layer_type", None), arguments)
        for table in tables:
            self.of_storage[table.untyped_storage().data_ptr()] = table, (call,)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places, asked = {x.device.type for x in tensors}, kwargs.get("device")
        if places != {"meta"} and asked is not None:  # code that looks at where the weights are
            kwargs["device"] = torch.device("cpu")
        if places == {"cpu", "meta"} or (places == {"meta"} and asked == torch.device("cpu")):
            out = without_weights(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self.follow(tensors, out)
        return out

    def follow(self, tensors: list[Tensor], out: Any) -> None:
        """What is made of tables alone is a table; what is made of tables and other numbers is rotated by them."""
        real = [x for x in tensors if x.device.type == "cpu" and x.numel() > 1]
        calls = {x: self.of_storage[p][1] for x in real if (p := x.untyped_storage().data_ptr()) in self.of_storage}
        if not calls:
            return
        every = tuple(dict.fromkeys(call for each in calls.values() for call in each))
        if all(x in calls for x in real if x.is_floating_point() or x.is_complex()):
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.numel():
                    self.of_storage[x.untyped_storage().data_ptr()] = x, every
        elif self.path:
            noted = self.found.setdefault(number_of(self.path[-1]), [])
            noted += [call for call in every if call not in noted]


def without_weights(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on numbers and on weights without numbers: zeros of the shape that it has."""
    if func._schema.is_mutable:
        return args[0]
    if func is torch.ops.aten._grouped_mm.default:  # refuses other dtypes than bfloat16 on the meta device
        return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[-1])
    shaped = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, {**kwargs, **on_meta(kwargs)}))
    out = func(*shaped[0], **shaped[1])
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default) and args[0].device.type == "meta":
        return out  # some of the weights
    return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x, out)


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


@contextmanager
def on_torch_alone(model: nn.Module) -> Iterator[None]:
    """Within: functions that transformers replaces by another package's kernels are its own again, which run everywhere."""
    files = {type(module).__module__ for module in model.modules()}
    replaced = [
        (file, name, function)
        for file in map(vars, (sys.modules[name] for name in files))
        for name, function in file.items()
        if inspect.isfunction(function) and "torch_function" in function.__code__.co_freevars
    ]
    try:
        for file, name, function in replaced:
            file[name] = function.__wrapped__  # type: ignore[attr-defined]
        yield
    finally:
        for file, name, function in replaced:
            file[name] = function
