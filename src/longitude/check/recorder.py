"""Recorder of attention inputs: it replaces the attention of each layer, and returns zeros.

Inputs of later layers therefore do not depend on positions, and one pass shows the queries and keys of all layers. A second
pass with identity rotations shows them before rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longitude.check.subject import Subject, with_attributes
from longitude.checkpoints.declared import unread
from longitude.checkpoints.observed import NAME, recording
from longitude.checkpoints.positions import is_rotary
from longitude.models.stock_caches import OF_KEYS
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
    layers: dict[int, Recorded] = {}

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]) -> None:
        if (index := getattr(module, "layer_idx", None)) is not None:
            mask, scale = others["attention_mask"], others["scaling"]
            layers.setdefault(index, Recorded(query.detach(), key.detach(), mask, scale, others))

    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise DoesNotApply("its attention is its own, and cannot be replaced by one that records") from error
    try:
        with recording(look):
            yield layers
    finally:
        model.set_attn_implementation(before)


def recorded(subject: Subject, tokens: Tensor, **options: Any) -> dict[int, Recorded]:
    """Attention inputs of each layer, from one pass. DoesNotApply if no attention can be recorded."""
    if reason := unread(subject.config):
        raise DoesNotApply(reason)
    with recorder(subject.model) as layers:
        subject.model(input_ids=tokens, **({"use_cache": bool({*OF_KEYS, "state"} & options.keys())} | options))
    if not layers:
        raise DoesNotApply("its attention is its own, and shows no queries and keys")
    return dict(sorted(layers.items()))


def as_allowed(mask: Tensor) -> Tensor:
    """Visible keys [L, Lk] of the first row, as bool."""
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] >= 0


@contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Context in which rotary modules return the identity rotation, without a factor: cos 1, sin 0."""

    def none(module: nn.Module, arguments: Any, out: Any) -> Any:
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
    want = want.double()
    return float((got.double() - want).abs().max() / want.square().mean().sqrt())


@contextmanager
def norms_without_weights(model: nn.Module) -> Iterator[None]:
    """Context in which norms that stand beside the projections of attention have weights of 1."""
    weights = [
        weight
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        for norm in module.children()
        if "norm" in type(norm).__name__.lower() and isinstance(weight := getattr(norm, "weight", None), Tensor)
    ]
    with with_attributes([(weight, "data", torch.ones_like(weight)) for weight in weights]):
        yield


def outputs(model: nn.Module, answer: Callable[[], Any], length: int) -> dict[str, Tensor]:
    """Outputs [1, length, ...] of modules, in the order of their first outputs; those of several calls are joined."""
    seen: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def look(_: Any, arguments: Any, out: Any, name: str = name) -> None:
                first = out[0] if isinstance(out, tuple) and out else out
                if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 and len(first) == 1:
                    seen.setdefault(name, []).append(first.detach())

            stack.enter_context(module.register_forward_hook(look))
        answer()
    alike = {name: parts for name, parts in seen.items() if len({(*x.shape[:1], *x.shape[2:]) for x in parts}) == 1}
    joined = {name: torch.cat(parts, 1) for name, parts in alike.items()}
    return {name: output for name, output in joined.items() if output.shape[1] == length}


def pairs_moved(subject: Subject, tokens: Tensor, positions: Tensor) -> dict[int, bool]:
    """Whether each layer of latent attention has interleaved pairs (rope_interleave).

    transformers permutes them to halves before rotation, which shows in unrotated keys compared with their projection.
    """
    projected: dict[int, Tensor] = {}
    with unrotated(subject.model), ExitStack() as stack:
        for module in subject.model.modules():
            if hasattr(module, "kv_a_proj_with_mqa") and hasattr(module, "layer_idx"):
                look = lambda _, arguments, out, at=module.layer_idx: projected.update({at: out.detach()})  # noqa: E731
                stack.enter_context(module.kv_a_proj_with_mqa.register_forward_hook(look))
        layers = recorded(subject, tokens, position_ids=positions)
    moved = {}
    for index, layer in layers.items():
        if index in projected:
            width = subject.config.qk_rope_head_dim
            raw = projected[index][..., -width:].double()
            pairs = torch.cat([raw[..., 0::2], raw[..., 1::2]], -1)
            got = layer.key[:, 0, :, -width:].double()
            moved[index] = apart(got, pairs) < apart(got, raw)
    return moved
