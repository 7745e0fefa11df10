"""Laws of attention: its output by the formula of the config, and ALiBi's slopes.

The inputs of attention are read from the projections before it, so models with their own attention code are measured as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from longitude.check.causes import in_parts
from longitude.check.laws.layers import (
    BACKWARDS,
    EXTRA,
    LONGEST,
    RESTS_ON,
    TOKENS,
    as_declared,
    promised,
)
from longitude.check.laws.rotation import ropes
from longitude.check.recorder import apart, recorded
from longitude.check.subject import CHECKPOINT_LAWS, EQUAL, Subject
from longitude.checkpoints.compare import which_layers
from longitude.checkpoints.declared import class_of
from longitude.checkpoints.observed import observe
from longitude.checkpoints.positions import alibi_of, has_alibi, is_rotary
from longitude.positions.composed import compose
from longitude.positions.config_keys import as_mapping
from longitude.positions.hugging_face import NotUnderstood
from longitude.positions.layers import LayerPositions
from longitude.positions.rotation import Layout
from longitude.testing.engine import DoesNotApply, Measurement

INPUTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
"""Modules that output queries, keys and values."""
NORMS = {"q_norm": "query", "k_norm": "key"}
"""Modules that normalize them, before the rotation."""
OUTPUTS = ("o_proj", "out_proj", "dense")


# ---- what stands around attention ----------------------------------------------------------------------------------------
@dataclass
class Around:
    """Queries [B, H, L, D], keys and values [B, Hkv, L, D] of the projections, their norms, and the output [B, L, H D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    norms: Mapping[str, nn.Module]

    def normed(self, kind: str, x: Tensor) -> Tensor:
        """Queries or keys [B, H, L, D] after the norm of the layer, over each head or over all; unchanged without one."""
        if (norm := self.norms.get(kind)) is None:
            return x
        by_token = x.transpose(1, 2)
        weight = getattr(norm, "weight", None)
        width = weight.shape[-1] if isinstance(weight, Tensor) else x.shape[-1]
        return norm(by_token if width == x.shape[-1] else by_token.flatten(2)).reshape(by_token.shape).transpose(1, 2)


def plain(module: nn.Module) -> str | None:
    """Name of the output projection of attention that has only projections, and norms of queries and keys; else None."""
    children = dict(module.named_children())
    if not INPUTS.keys() <= children.keys() or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    others = {name for name, child in children.items() if not isinstance(child, nn.Dropout) and not is_rotary(child)}
    outputs = [name for name in OUTPUTS if name in children]
    has_weights = any(True for _ in module.parameters(recurse=False))
    return outputs[0] if len(outputs) == 1 and not has_weights and others <= {*INPUTS, *NORMS, *outputs} else None


def around(subject: Subject, tokens: Tensor) -> dict[int, Around]:
    """Inputs and output of attention for each layer with plain attention, from one pass."""
    modules = {module.layer_idx: module for module in subject.model.modules() if plain(module)}
    seen: dict[int, dict[str, Tensor]] = {index: {} for index in modules}
    with ExitStack() as stack:
        for index, module in modules.items():
            for name, kind in INPUTS.items():
                look = lambda _, args, out, at=index, kind=kind: seen[at].update({kind: out.detach()})  # noqa: E731
                stack.enter_context(getattr(module, name).register_forward_hook(look))
            before = lambda _, args, at=index: seen[at].update({"out": args[0].detach()})  # noqa: E731
            stack.enter_context(getattr(module, str(plain(module))).register_forward_pre_hook(before))
        subject.logits(tokens)
    length, layers = tokens.shape[1], {}
    for index, tensors in seen.items():
        module = modules[index]
        width = getattr(module, "head_dim", None)
        if len(tensors) == 4 and isinstance(width, int) and tensors["out"].dim() == 3:
            query, key = (by_heads(tensors[kind], width, length) for kind in ("query", "key"))
            value = by_heads(tensors["value"], tensors["value"].numel() // (length * key.shape[1]), length)
            if (
                value.shape[3] != width or query.shape[1] * width != tensors["out"].shape[2]
            ):  # of another width, or gated
                continue
            norms = {kind: getattr(module, name) for name, kind in NORMS.items() if hasattr(module, name)}
            layers[index] = Around(query, key, value, tensors["out"], norms)
    return layers


def by_heads(x: Tensor, width: int, length: int) -> Tensor:
    """[1, L, H D], [1, L, H, D] or [1, H, L, D] -> [1, H, L, D]."""
    if x.dim() == 4 and x.shape[1] != length:
        return x
    return x.reshape(1, length, -1, width).transpose(1, 2)


# ---- the formula ---------------------------------------------------------------------------------------------------------
def formula(config: Any, layer: LayerPositions, near: Around) -> Tensor:
    """Attention output [1, L, H D] of a layer as the config declares it, from what the projections give.

    out = softmax(cap tanh(scale R(N(q)) R(N(k))^T / cap)) v over the visible keys, each key head for a group of query heads. N is
    the norm of the layer, R the rotation.
    """
    at = torch.arange(near.query.shape[2], device=near.query.device)
    group = near.query.shape[1] // near.key.shape[1]
    query = as_declared(near.normed("query", near.query), layer.encoding, at[None], True)
    key = as_declared(near.normed("key", near.key), layer.encoding, at[None], False)
    key, value = (x.repeat_interleave(group, 1) for x in (key, near.value.double()))
    scores = query @ key.transpose(2, 3) * promised_scale(config, query.shape[3])
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~layer.allowed(at, at), -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=(*RESTS_ON, "layer_rotations", "layer_masks"))
def attention_outputs(subject: Subject) -> Measurement:
    """The attention output of each layer = its formula, with rotation, mask, scale and groups of heads of the config.

    The scale of scores of every layer; the output of layers that consist of projections, and norms of queries and keys.
    """
    return in_parts(subject, {"scale": scale_of_scores, "output": outputs_of_layers})


def scale_of_scores(subject: Subject) -> Measurement:
    """Error of the scale of scores, relative to the declared one."""
    wrong = {}
    layers = recorded(subject, subject.tokens(4))
    for index, layer in layers.items():
        width = layer.query.shape[3]
        want = promised_scale(subject.config, width)
        got = width**-0.5 if layer.scale is None else float(layer.scale)
        if abs(got / want - 1) > EQUAL:
            wrong[index] = got, want
    worst = max((abs(got / want - 1) for got, want in wrong.values()), default=0.0)
    cause = ""
    if wrong:
        got, want = next(iter(wrong.values()))
        cause = f"scores of {which_layers([*wrong], len(layers))} are multiplied by {got:.6g}, expected {want:.6g}"
    return Measurement(worst, EQUAL, cause=cause)


def promised_scale(config: Any, width: int) -> float:
    """Scale of scores that a config declares, for heads of this width."""
    keys = as_mapping(config)
    if "attention_multiplier" in keys:
        return float(keys["attention_multiplier"])
    if "query_pre_attn_scalar" in keys:
        return float(keys["query_pre_attn_scalar"]) ** -0.5
    scale = width**-0.5
    if "qk_rope_head_dim" not in keys:
        with suppress(NotUnderstood):  # some classes have a scale of their own, which no key names
            scales = {layer.scale for layer in observe(class_of(config) or config).layers if layer.attends}
            scale_of_class = scales.pop() if len(scales) == 1 else None
            scale = scale if scale_of_class is None else scale_of_class
    else:
        factors = [
            compose(rope.encoding(keys["qk_rope_head_dim"], "half")).softmax_factor for rope in ropes(config).values()
        ]
        scale *= max(factors, default=1.0)
    return scale


def fits(layer: LayerPositions, width: int) -> bool:
    """Whether the rotation of a layer is declared for heads of this width."""
    return all(spec.get("head_dim", width) == width for spec in layer.encoding)


def outputs_of_layers(subject: Subject) -> Measurement:
    """Error of the attention output of each layer, relative to its formula."""
    layers = {layout: promised(subject.config, layout) for layout in get_args(Layout)}
    if subject.config.model_type in BACKWARDS:
        raise DoesNotApply("it rotates by the negative angles")
    if not any(plain(module) for module in subject.model.modules()):
        raise DoesNotApply("no layer consists of projections of queries, keys and values alone")
    windows = [layer.window or layer.chunk or 0 for layer in layers["half"]]
    length = max([TOKENS - 1, *(size + EXTRA for size in windows if size + EXTRA <= LONGEST)])
    inputs = around(subject, subject.tokens(length))
    if not inputs:
        raise DoesNotApply("its attention does not call its projections as modules")
    errors: dict[Layout, dict[int, float]] = {layout: {} for layout in layers}
    inputs = {index: near for index, near in inputs.items() if fits(layers["half"][index], near.query.shape[3])}
    if not inputs:
        raise DoesNotApply("its heads have another width than its rotation declares")
    for layout, declared in layers.items():
        for index, near in inputs.items():
            errors[layout][index] = apart(near.out, formula(subject.config, declared[index], near))
    layout = min(errors, key=lambda layout: sum(off > subject.threshold for off in errors[layout].values()))
    wrong = [index for index, off in errors[layout].items() if not off <= subject.threshold]
    cause = ""
    if wrong:
        cause = (
            f"attention of {which_layers(wrong, len(inputs))} gives something else than its formula; declared for layer "
            f"{wrong[0]} is {layers[layout][wrong[0]].encoding}"
        )
    return Measurement(max(errors[layout].values()), subject.threshold, f"pairs in the layout {layout!r}", cause)


# ---- ALiBi ---------------------------------------------------------------------------------------------------------------
GIVEN = ("alibi", "position_bias")
"""Argument names of biases that the model computes once for all layers."""


def biases(subject: Subject, tokens: Tensor, **options: Any) -> list[Tensor]:
    """Biases that are passed to layers in one pass, each that differs from the one before."""
    seen: list[Tensor] = []

    def look(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        seen.extend(named[name].detach() for name in GIVEN if isinstance(named.get(name), Tensor))

    with ExitStack() as stack:
        for module in subject.model.modules():
            stack.enter_context(module.register_forward_pre_hook(look, with_kwargs=True))
        subject.logits(tokens, **options)
    return [made for n, made in enumerate(seen) if n == 0 or not torch.equal(made, seen[n - 1])]


@CHECKPOINT_LAWS.law(threshold=EQUAL, rests_on=("files",))
def alibi_slopes(subject: Subject) -> Measurement:
    """Slopes of ALiBi's biases = the published ones of as many heads (relative)."""
    if not has_alibi(subject.config):
        raise DoesNotApply("its positions are not ALiBi's")
    tokens = subject.tokens(8)
    masks = [{}, {"attention_mask": torch.ones_like(tokens)}] if "attention_mask" in subject.takes else [{}]
    made = [bias for mask in masks for bias in biases(subject, tokens, **mask)]
    if not made:
        raise DoesNotApply("its layers are given no biases that show")
    heads = subject.config.num_attention_heads
    want = torch.tensor(alibi_of(subject.config), dtype=torch.float64)
    rows = torch.stack([bias.double().flatten(0, -2)[:heads, -8:].cpu() for bias in made])
    got = (rows[..., -1] - rows[..., -2]).flatten()
    want = want.repeat(len(made))
    off = got / want - 1
    head = int(off.abs().argmax())
    cause = f"head {head % heads} of {heads} has the slope {float(got[head]):.4g}, expected {float(want[head]):.4g}"
    return Measurement(float(off.abs().max()), EQUAL, cause=cause)
