"""Laws of attention: its output by the formula of the config, and ALiBi's slopes.

The inputs of attention are read from the projections before it, so models with their own attention code are measured as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from longitude.check.family import by_its_class
from longitude.check.layers import (
    EXTRA,
    LONGEST,
    RESTS_ON,
    TOKENS,
    allowed,
    as_declared,
    backwards,
    promised,
    promised_scale,
)
from longitude.check.recorder import apart
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.agreement import which_layers
from longitude.checkpoints.positions import alibi_of, has_alibi, is_rotary
from longitude.positions.bias import alibi_slopes as slopes
from longitude.positions.layers import LayerPositions
from longitude.positions.layouts import Layout
from longitude.testing.engine import DoesNotApply, Measurement

INPUTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "q_norm": "query", "k_norm": "key"}
"""Modules that output queries, keys and values for attention; a norm follows its projection."""
OUTPUTS = ("o_proj", "out_proj", "dense")


# ---- what stands around attention ----------------------------------------------------------------------------------------
@dataclass
class Around:
    """Queries [B, H, L, D], keys and values [B, Hkv, L, D] before rotation, and the output of attention [B, L, H D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


def plain(module: nn.Module) -> str | None:
    """Name of the output projection of attention that has only projections, and norms of queries and keys; else None."""
    children = dict(module.named_children())
    if not {"q_proj", "k_proj", "v_proj"} <= children.keys() or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    others = {name for name, child in children.items() if not isinstance(child, nn.Dropout) and not is_rotary(child)}
    outputs = [name for name in OUTPUTS if name in children]
    own = any(True for _ in module.parameters(recurse=False))
    return outputs[0] if len(outputs) == 1 and not own and others <= {*INPUTS, *outputs} else None


def around(subject: Subject, tokens: Tensor) -> dict[int, Around]:
    """Inputs and output of attention for each layer with plain attention, from one pass."""
    modules = {module.layer_idx: module for module in subject.model.modules() if plain(module)}
    seen: dict[int, dict[str, Tensor]] = {index: {} for index in modules}
    with ExitStack() as stack:
        for index, module in modules.items():
            for name in INPUTS.keys() & dict(module.named_children()):
                look = lambda _, given, out, at=index, kind=INPUTS[name]: seen[at].update({kind: out.detach()})  # noqa: E731
                stack.enter_context(getattr(module, name).register_forward_hook(look))
            before = lambda _, given, at=index: seen[at].update({"out": given[0].detach()})  # noqa: E731
            stack.enter_context(getattr(module, str(plain(module))).register_forward_pre_hook(before))
        subject.logits(tokens)
    length, found = tokens.shape[1], {}
    for index, one in seen.items():
        width = getattr(modules[index], "head_dim", None)
        if len(one) == 4 and isinstance(width, int) and one["out"].dim() == 3:
            heads = {kind: by_heads(one[kind], width, length) for kind in ("query", "key")}
            groups = heads["key"].shape[1]
            value = by_heads(one["value"], one["value"].numel() // (length * groups), length)
            found[index] = Around(heads["query"], heads["key"], value, one["out"])
    return found


def by_heads(x: Tensor, width: int, length: int) -> Tensor:
    """[1, L, H D], [1, L, H, D] or [1, H, L, D] -> [1, H, L, D]."""
    if x.dim() == 4 and x.shape[1] != length:
        return x.double()
    return x.double().reshape(1, length, -1, width).transpose(1, 2)


# ---- the formula ---------------------------------------------------------------------------------------------------------
Rotation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Formula:
    """out = softmax(cap tanh(scale R(q) R(k)^T / cap)) v over the visible keys, each key head for a group of query heads."""

    query: Rotation
    key: Rotation
    scale: float
    visible: Tensor
    cap: float | None = None
    value: Rotation = lambda v: v
    order: Callable[[Tensor, int], Tensor] = lambda x, n: x.repeat_interleave(n, 1)

    def __call__(self, one: Around) -> Tensor:
        group = one.query.shape[1] // one.key.shape[1]
        key, value = (self.order(x, group) for x in (self.key(one.key), self.value(one.value)))
        scores = self.query(one.query) @ key.transpose(2, 3) * self.scale
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        weights = scores.masked_fill(~self.visible, -math.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)


def formula(
    subject: Subject, layer: LayerPositions, width: int, length: int, specs: Sequence[Mapping[str, Any]]
) -> Formula:
    """Attention formula of a layer as the config declares it, with these encodings."""
    at = torch.arange(length, device=subject.device)
    return Formula(
        lambda q: as_declared(q, specs, at[None], True),
        lambda k: as_declared(k, specs, at[None], False),
        promised_scale(subject.config, width),
        allowed(layer, at),
        getattr(subject.config, "attn_logit_softcapping", None),
    )


def mistakes(subject: Subject, layer: LayerPositions, width: int, length: int) -> Iterator[tuple[str, Formula]]:
    """Typical mistakes in attention code, with the formula of each."""
    right = formula(subject, layer, width, length, layer.encoding)
    changed = lambda **to: Formula(**{**vars(right), **to})  # noqa: E731
    at = torch.arange(length, device=subject.device)[None]

    def turned(positions: Tensor, queries: bool) -> Rotation:
        return lambda x: as_declared(x, layer.encoding, positions, queries)

    for scale in (1.0, 1 / width, subject.config.hidden_size**-0.5):
        yield f"scores are multiplied by {scale:.6g}, expected {right.scale:.6g}", changed(scale=scale)
    yield (
        "key heads are tiled: query head h has key head h modulo their number, and the weights are for groups of neighbors",
        changed(order=lambda x, n: x.repeat(1, n, 1, 1)),
    )
    yield "keys are in another order of heads than values", changed(key=lambda k: right.key(k.flip(1)))
    yield "values are rotated, too", changed(value=right.key)
    yield "queries and keys are not rotated", changed(query=lambda q: q, key=lambda k: k)
    yield "keys are not rotated", changed(key=lambda k: k)
    yield "queries are not rotated", changed(query=lambda q: q)
    yield (
        "queries and keys are rotated by twice their positions",
        changed(query=turned(2 * at, True), key=turned(2 * at, False)),
    )
    other_way = backwards(layer.encoding)
    yield (
        "queries and keys turn the other way, as where cos and sin are swapped",
        changed(query=lambda q: other_way(right.query(other_way(q))), key=lambda k: other_way(right.key(other_way(k)))),
    )
    yield "keys turn the other way than queries", changed(key=lambda k: other_way(right.key(other_way(k))))
    for root in (1.0, 0.5):
        half = [
            {**spec, "rotary_dim": width // 2, "base": spec["base"] ** root} if spec["name"] == "rope" else spec
            for spec in layer.encoding
        ]
        yield "half of the channels are rotated", formula(subject, layer, width, length, half)
    yield (
        "no query attends to its own token",
        changed(visible=right.visible.tril(-1) | torch.eye(length).bool().triu() & (at == 0)),
    )
    yield (
        "each query attends to the token behind it",
        changed(visible=right.visible | right.visible.roll(1, -1) & (at > 0)),
    )
    if layer.window is not None:
        yield (
            f"the window of {layer.window} is not applied",
            changed(visible=allowed(layer._replace(window=None), at[0])),
        )
        for step in (1, -1):
            window = layer._replace(window=layer.window + step)
            yield (
                f"the window is {layer.window + step}, expected {layer.window}",
                changed(visible=allowed(window, at[0])),
            )


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*RESTS_ON, "layer_rotations", "layer_masks", "score_scale"))
@by_its_class
def attention_outputs(subject: Subject) -> Measurement:
    """The attention output of each layer = its formula, with rotation, mask, scale and groups of heads of the config.

    It covers layers that consist of projections, and norms of queries and keys.
    """
    layers = {layout: promised(subject.config, layout) for layout in get_args(Layout)}
    if not any(plain(module) for module in subject.model.modules()):
        raise DoesNotApply("no layer consists of projections of queries, keys and values alone")
    windows = [one.window or one.chunk or 0 for one in layers["half"]]
    length = max([TOKENS - 1, *(size + EXTRA for size in windows if size + EXTRA <= LONGEST)])
    found = around(subject, subject.tokens(length))
    if not found:
        raise DoesNotApply("its attention does not call its projections as modules")
    errors: dict[Layout, dict[int, float]] = {layout: {} for layout in layers}
    for layout, each in layers.items():
        for index, one in found.items():
            declared = formula(subject, each[index], one.query.shape[3], length, each[index].encoding)
            errors[layout][index] = apart(one.out, declared(one))
    layout = min(errors, key=lambda layout: sum(off > subject.threshold for off in errors[layout].values()))
    wrong = [index for index, off in errors[layout].items() if not off <= subject.threshold]
    cause = ""
    if wrong:
        one, layer = found[wrong[0]], layers[layout][wrong[0]]
        known = (
            mistake
            for each in layers.values()
            for mistake, by in mistakes(subject, each[wrong[0]], one.query.shape[3], length)
            if apart(one.out, by(one)) <= 10 * subject.threshold
        )
        why = (
            " or ".join(dict.fromkeys(known)) or f"none of the known mistakes explains it; declared is {layer.encoding}"
        )
        cause = f"attention of {which_layers(wrong, len(found))} gives something else than its formula: {why}"
    return Measurement(max(errors[layout].values()), subject.threshold, f"pairs in the layout {layout!r}", cause)


# ---- ALiBi ---------------------------------------------------------------------------------------------------------------
GIVEN = ("alibi", "position_bias")
"""Argument names of biases that the model computes once for all layers."""


def biases(subject: Subject, tokens: Tensor, **options: Any) -> Tensor | None:
    """The first biases that are passed to a layer in one pass; None if none are."""
    seen: list[Tensor] = []

    def look(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        seen.extend(named[name].detach() for name in GIVEN if isinstance(named.get(name), Tensor))

    with ExitStack() as stack:
        for module in subject.model.modules():
            stack.enter_context(module.register_forward_pre_hook(look, with_kwargs=True))
        subject.logits(tokens, **options)
    return seen[0] if seen else None


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=("config",))
@by_its_class
def alibi_slopes(subject: Subject) -> Measurement:
    """Slopes of ALiBi's biases = the published ones of as many heads (relative)."""
    if not has_alibi(subject.config):
        raise DoesNotApply("its positions are not ALiBi's")
    tokens = subject.tokens(8)
    masks = [{}, {"attention_mask": torch.ones_like(tokens)}] if "attention_mask" in subject.takes else [{}]
    made = [one for mask in masks if (one := biases(subject, tokens, **mask)) is not None]
    if not made:
        raise DoesNotApply("its layers are given no biases that show")
    heads = subject.config.num_attention_heads
    want = torch.tensor(alibi_of(subject.config), dtype=torch.float64)
    rows = torch.stack([one.double().flatten(0, -2)[:heads, -8:].cpu() for one in made])
    got = (rows[..., -1] - rows[..., -2]).flatten()
    want = want.repeat(len(made))
    off = got / want - 1
    head = int(off.abs().argmax())
    cause = f"head {head % heads} of {heads} has the slope {float(got[head]):.4g}, expected {float(want[head]):.4g}"
    others = {
        f"{n} heads and a largest bias of {b}": torch.tensor(slopes(n, bias_max=b)[:heads]).double()
        for n in range(heads, 2 * heads)
        for b in (4, 8, 16)
    }
    row = got.view(-1, heads)[head // heads]
    others["its heads in another order"] = want[:heads].sort().values[row.argsort().argsort()]
    known = [name for name, one in others.items() if bool((row / one - 1).abs().max() <= EQUAL)]
    return Measurement(
        float(off.abs().max()), EQUAL, cause=cause + (f"; they are those of {known[0]}" if known else "")
    )
