"""Recorder of attention inputs: it replaces the attention of each layer, and returns zeros.

Inputs of later layers therefore do not depend on positions, and one pass shows the queries and keys of all layers. A second
pass with identity rotations shows them before rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longitude.check.subject import Subject
from longitude.checkpoints.agreement import which_layers
from longitude.checkpoints.config import unread
from longitude.checkpoints.positions import is_rotary
from longitude.checkpoints.trace import NAME, recording
from longitude.models.cache_names import CACHES
from longitude.testing.engine import DoesNotApply


class Recorded(NamedTuple):
    """Inputs of a layer's attention: queries [B, H, L, D], keys [B, Hkv, Lk, D], mask [B, 1, L, Lk] or None, scale.

    options: all keyword arguments.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float | None
    options: dict[str, Any]


@contextmanager
def recorder(model: Any) -> Iterator[dict[int, Recorded]]:
    """Context that replaces attention by a recorder; the yielded dict fills with the inputs of each layer.

    DoesNotApply for a model with attention code that cannot be replaced.
    """
    found: dict[int, Recorded] = {}

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]) -> None:
        if (index := getattr(module, "layer_idx", None)) is not None:
            mask, scale = others["attention_mask"], others["scaling"]
            found.setdefault(index, Recorded(query.detach(), key.detach(), mask, scale, others))

    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise DoesNotApply("its attention is its own, and cannot be replaced by one that records") from error
    try:
        with recording(look):
            yield found
    finally:
        model.set_attn_implementation(before)


def recorded(subject: Subject, tokens: Tensor, **options: Any) -> dict[int, Recorded]:
    """Attention inputs of each layer, from one pass. DoesNotApply if no attention can be recorded."""
    if reason := unread(subject.config):
        raise DoesNotApply(reason)
    with recorder(subject.model) as found:
        subject.model(input_ids=tokens, **({"use_cache": any(name in options for name in CACHES)} | options))
    if not found:
        raise DoesNotApply("its attention is its own, and shows no queries and keys")
    return dict(sorted(found.items()))


def as_allowed(mask: Tensor) -> Tensor:
    """Visible keys [L, Lk] of the first row, as bool."""
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] >= 0


@contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Context in which rotary modules return the identity rotation, without a factor: cos 1, sin 0."""

    def none(module: nn.Module, given: Any, out: Any) -> Any:
        if isinstance(out, Tensor) and out.is_complex():
            return torch.ones_like(out)
        if isinstance(out, tuple) and len(out) == 2:
            return torch.ones_like(out[0]), torch.zeros_like(out[1])
        return out

    with ExitStack() as stack:
        for module in filter(is_rotary, model.modules()):
            stack.enter_context(module.register_forward_hook(none))
        yield


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, in units of the root mean square of `want`."""
    return float((got.double() - want).abs().max() / want.square().mean().sqrt())


# ---- where and by what two answers differ --------------------------------------------------------------------------------
SWITCHES = {"attn_logit_softcapping": None, "attn_temperature_tuning": False}
"""Attributes of attention modules, and the values that turn them off."""
NO_SINK = -1e4
"""Logit of a sink that takes no weight."""


def only_with(subject: Subject, differs: Callable[[], bool]) -> str:
    """The part of attention without which two answers no longer differ; an empty string if there is none."""
    for name, without in parts(subject.model).items():
        with without():
            if not differs():
                return f"without {name} they agree"
    return ""


def parts(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Parts of attention that a model has, each with a context in which it is turned off."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    if sinks := [one for name, one in model.named_parameters() if name.rpartition(".")[2] == "sinks"]:
        found["sinks"] = partial(with_attributes, [(one, "data", torch.full_like(one.data, NO_SINK)) for one in sinks])
    for name, off in SWITCHES.items():
        if on := [one for one in model.modules() if vars(one).get(name) not in (None, False)]:
            found[name] = partial(with_attributes, [(one, name, off) for one in on])
    if any(map(is_rotary, model.modules())):
        found["rotation"] = partial(unrotated, model)
    return found


@contextmanager
def with_attributes(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context in which attributes of objects have other values: (object, name, value)."""
    with ExitStack() as stack:
        for holder, name, value in attributes:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def outputs(model: nn.Module, answer: Callable[[], Any], length: int) -> dict[str, Tensor]:
    """Outputs [1, length, ...] of modules, in the order of their first outputs; those of several calls are joined."""
    seen: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def look(_: Any, given: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, tuple) and out else out
                if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 and len(first) == 1:
                    seen.setdefault(name, []).append(first.detach())

            stack.enter_context(module.register_forward_hook(look))
        answer()
    joined = {name: each[0] if len(each) == 1 else torch.cat(each, 1) for name, each in seen.items() if alike(each)}
    return {name: one for name, one in joined.items() if one.shape[1] == length}


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors can be joined along their tokens."""
    return len({(*one.shape[:1], *one.shape[2:]) for one in tensors}) == 1


def first_apart(subject: Subject, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """The first part of a model, in the order of a pass, with other outputs than wanted, in words."""
    for name, one in want.items():
        other = got.get(name)
        if other is not None and other.shape == one.shape and not apart(other, one.double()) <= subject.threshold:
            return f"the first output that differs is that of {of_layer(subject.model, name)}"
    return ""


def of_layer(model: nn.Module, name: str) -> str:
    """Name of the innermost module with a layer_idx that contains a module, else the name of that module."""
    above = [".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)]
    held = [each for each in above if isinstance(getattr(model.get_submodule(each), "layer_idx", None), int)]
    return held[-1] if held else name


def inputs_apart(subject: Subject, tokens: Tensor, sizes: Sequence[int]) -> str:
    """Layers whose queries or keys in the last chunk differ from a whole pass, if attention outputs zeros."""
    tokens, want, words = tokens[:, : sum(sizes)], recorded(subject, tokens[:, : sum(sizes)]), list[str]()
    with recorder(subject.model) as got:
        cache = None
        for part in tokens.split([*sizes], 1):
            got.clear()
            answer = subject.model(input_ids=part, use_cache=True, **subject.with_cache(cache))
            cache = getattr(answer, subject.cache_name or "")
    for kind, plural in (("query", "queries"), ("key", "keys")):
        pairs = {
            index: [getattr(each, kind)[:, :, -sizes[-1] :].double() for each in (one, want[index])]
            for index, one in got.items()
        }
        off = [
            index
            for index, (mine, theirs) in pairs.items()
            if mine.shape == theirs.shape and not apart(mine, theirs) <= subject.threshold
        ]
        if off:
            words.append(f"{plural} of {which_layers(off, len(got))}")
    return f"{' and '.join(words)} differ, with zeros in place of what attention gives, too" if words else ""


def pairs_moved(subject: Subject, tokens: Tensor, positions: Tensor) -> dict[int, bool]:
    """Whether each layer of latent attention has interleaved pairs (rope_interleave).

    transformers permutes them to halves before rotation, which shows in unrotated keys compared with their projection.
    """
    projected: dict[int, Tensor] = {}
    with unrotated(subject.model), ExitStack() as stack:
        for module in subject.model.modules():
            if hasattr(module, "kv_a_proj_with_mqa") and hasattr(module, "layer_idx"):
                look = lambda _, given, out, at=module.layer_idx: projected.update({at: out.detach()})  # noqa: E731
                stack.enter_context(module.kv_a_proj_with_mqa.register_forward_hook(look))
        found = recorded(subject, tokens, position_ids=positions)
    moved = {}
    for index, one in found.items():
        if index in projected:
            width = subject.config.qk_rope_head_dim
            raw = projected[index][..., -width:].double()
            pairs = torch.cat([raw[..., 0::2], raw[..., 1::2]], -1)
            got = one.key[:, 0, :, -width:].double()
            moved[index] = apart(got, pairs) < apart(got, raw)
    return moved
