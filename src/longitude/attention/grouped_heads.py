"""Fewer heads of keys and values for a trained layer or model: the mean of each group."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longitude.attention.layers.multihead import MultiHeadAttention
from longitude.errors import UsageError, check_sizes
from longitude.linear import is_plain
from longitude.positions.base import Encoding
from longitude.positions.composed import compose

Model = TypeVar("Model")
POOLED = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def pool_heads(trained: Model, num_kv_heads: int) -> Model:
    """Copy a layer or model with fewer key and value heads (GQA), each the mean of a group of heads.

        W'_g = mean of W_h over the heads h with h // (heads / num_kv_heads) = g,   W of keys and of values

    The query heads of a group keep their order: query head h reads head h // (H / num_kv_heads) before and after. If the heads
    of a group are equal, the copy computes the same function. Otherwise it is a starting point for further training.

    Args:
        trained: A MultiHeadAttention, or a model whose config has num_key_value_heads and whose projections are called k_proj
            and v_proj: LongitudeForCausalLM, Llama, Mistral, Qwen and most others of transformers.
        num_kv_heads: Heads of keys and values of the copy; it divides those of `trained`.

    Returns:
        A new layer or model of the same class.

    Raises:
        ValueError: num_kv_heads does not divide the heads; there are no such projections; the encoding has parameters for each
            head of keys.

    Source:
        Ainslie et al. 2023, arXiv:2305.13245, https://arxiv.org/abs/2305.13245.
    """
    check_sizes("pool_heads", num_kv_heads=num_kv_heads)
    for module in trained.modules() if isinstance(trained, nn.Module) else ():
        convolved = isinstance(module, MultiHeadAttention) and {"qkv", "kv"} & {*module.short_conv}
        if convolved or isinstance(module, Encoding) and compose(module).passing_columns:
            raise ValueError(
                f"pool_heads: {type(module).__name__} is built for each head of keys, which cannot be averaged; "
                "expected another encoding, and no short_conv of keys"
            )
    if isinstance(trained, MultiHeadAttention):
        return pooled_layer(trained, num_kv_heads)
    if isinstance(trained, nn.Module) and hasattr(getattr(trained, "config", None), "num_key_value_heads"):
        return pooled_model(trained, num_kv_heads)
    raise UsageError(
        "pool_heads", "a MultiHeadAttention, or a model whose config has num_key_value_heads", type(trained).__name__
    )


def pooled_layer(layer: MultiHeadAttention, num_kv_heads: int) -> MultiHeadAttention:
    require_groups(layer.num_kv_heads, num_kv_heads)
    new = deepcopy(layer)
    if not is_plain(new.k_proj, new.v_proj):
        kinds = " and ".join(sorted({type(project).__name__ for project in (new.k_proj, new.v_proj)}))
        raise UsageError(
            "pool_heads",
            "k_proj and v_proj to be nn.Linear without hooks, whose weights are averaged",
            kinds,
            "merge an adapter, remove a hook, or convert a quantized layer first",
        )
    for project in (new.k_proj, new.v_proj):
        for name, given in [*project.named_parameters()]:
            fewer = nn.Parameter(pooled(given.detach(), layer.num_kv_heads, num_kv_heads), given.requires_grad)
            setattr(project, name, fewer)
        project.out_features = project.weight.shape[0]
    new.num_kv_heads = num_kv_heads
    return new


def pooled_model(model: Any, num_kv_heads: int) -> Any:
    heads = model.config.num_key_value_heads
    require_groups(heads, num_kv_heads)
    config = deepcopy(model.config)
    config.num_key_value_heads = num_kv_heads
    for spec in (getattr(config, "mixer", None), *(getattr(config, "mixers", None) or ())):
        if isinstance(spec, dict) and spec.get("num_kv_heads") is not None:
            spec["num_kv_heads"] = num_kv_heads
    new = type(model)(config)
    state, expected = model.state_dict(), new.state_dict()
    fewer = [name for name in state if name.endswith(POOLED) and state[name].shape != expected[name].shape]
    if not fewer and heads != num_kv_heads:
        raise ValueError(f"pool_heads: {type(model).__name__} has no projections called k_proj and v_proj")
    for name in fewer:
        own = num_kv_heads * len(state[name]) // len(expected[name])  # a mixer may have its own number
        require_groups(own, num_kv_heads)
        state[name] = pooled(state[name], own, num_kv_heads)
    new.load_state_dict(state)
    new.generation_config = getattr(model, "generation_config", None)
    return new.to(device=model.device, dtype=model.dtype).train(model.training)


def pooled(x: Tensor, heads: int, num_kv_heads: int) -> Tensor:
    """[heads * head_dim, ...] -> [num_kv_heads * head_dim, ...], the mean of each group, in float32 or wider."""
    groups = x.unflatten(0, (num_kv_heads, heads // num_kv_heads, -1))
    return groups.to(torch.promote_types(x.dtype, torch.float32)).mean(1).flatten(0, 1).to(x.dtype)


def require_groups(heads: int, num_kv_heads: int) -> None:
    if heads % num_kv_heads:
        raise UsageError("pool_heads", f"num_kv_heads to divide the {heads} heads of keys", num_kv_heads)
