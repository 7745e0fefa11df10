"""Models of which single layers do not do what config.json declares, though each agrees with itself."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    HunYuanDenseV1ForCausalLM,
    MistralForCausalLM,
    SmolLM3ForCausalLM,
    StaticCache,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.llama import modeling_llama

from tests.check.building import LENGTH, ORIGINAL, SHAPE, YARN, built, by_layer, changed, llama, with_tables


class Rotates(modeling_llama.LlamaAttention):
    """With another function in the place of its rotation: self.change(right, q, k, cos, sin)."""

    def forward(self, *given, **options):
        right = modeling_llama.apply_rotary_pos_emb
        with patch.object(modeling_llama, "apply_rotary_pos_emb", partial(self.change, right)):
            return super().forward(*given, **options)


def rotates(change: Callable[..., Any], rope: dict[str, Any] = {}, layers: slice = slice(None)) -> Any:  # noqa: B006
    model = llama(rope=rope, num_hidden_layers=4)
    for layer in model.model.layers[layers]:
        layer.self_attn.__class__ = Rotates
        layer.self_attn.change = change
    return model


def keys_later(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Keys one position further than queries: the same shift everywhere. Tables of no rotation have no further ones."""
    if sin.shape[1] > 1 and not sin.any():
        return right(q, k, cos, sin)
    angle = torch.atan2(sin, cos) + 10_000.0 ** -(torch.arange(8) % 4 / 4)
    return right(q, k, cos, sin)[0], right(q, k, angle.cos(), angle.sin())[1]


def factor_on_queries(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    factor = torch.hypot(cos, sin)
    return right(q, k, cos, sin)[0], right(q, k, cos / factor, sin / factor)[1]


def gemma3() -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    shape = {"rope_parameters": rope, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 6}
    return by_layer(Gemma3ForCausalLM, **shape)


def other_table() -> Any:
    """A local layer takes the global table."""
    model, tables = gemma3(), {}
    right = model.model.rotary_emb.forward

    def noted(x, position_ids, layer_type):
        tables[layer_type] = right(x, position_ids, layer_type)
        return tables[layer_type]

    def swapped(module, given, named):
        sin = named["position_embeddings"][1]
        if sin.shape[1] > 1 and not sin.any():  # tables of no rotation
            return None
        return given, named | {"position_embeddings": tables["full_attention"]}

    model.model.rotary_emb.forward = noted
    model.model.layers[2].self_attn.register_forward_pre_hook(swapped, with_kwargs=True)
    return model


def smollm3_inverted() -> Any:
    model = by_layer(SmolLM3ForCausalLM)
    for layer in model.model.layers:
        layer.self_attn.use_rope = not layer.self_attn.use_rope
    return model


def deepseek(**rope: Any) -> Any:
    given = {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: LENGTH // 4} | rope
    given = {"rope_type": "default", "rope_theta": 1e4} if not rope else given
    shape = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    shape |= {"first_k_dense_replace": 4, "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 4}
    return built(
        DeepseekV3ForCausalLM, **SHAPE | shape, max_position_embeddings=LENGTH, rope_parameters=given, pad_token_id=0
    )


def no_mscale() -> Any:
    model = deepseek(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0)
    for layer in model.model.layers:
        layer.self_attn.scaling = 16**-0.5
    return model


class Halves(modeling_deepseek_v3.DeepseekV3Attention):
    def forward(self, *given, **options):
        halves = modeling_deepseek_v3.apply_rotary_pos_emb
        with patch.object(modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", halves):
            return super().forward(*given, **options)


def interleave_ignored() -> Any:
    model = deepseek()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Halves
    return model


def no_mask_in_static_cache() -> Any:
    def before(named: dict[str, Any]) -> None:
        if isinstance(cache := named.get("cache"), StaticCache):
            rows, queries = named["input_ids"].shape
            if queries == 1:
                named["attention_mask"] = torch.zeros(
                    rows, 1, queries, cache.layers[0].max_cache_len, dtype=model.dtype
                )

    model = llama()
    return changed(model, before)


def indexed(**options: Any) -> Any:
    """Sparse attention that chooses its keys by top-k."""
    shape = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 48, "mlp_layer_types": ["dense"] * 2, "index_head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    options = {"index_n_heads": 16, "index_topk": 8, "pad_token_id": 0} | options
    return built(
        DeepseekV32ForCausalLM, **SHAPE | shape | options, max_position_embeddings=LENGTH, rope_parameters=rope
    )


class OtherKeys(modeling_deepseek_v32.DeepseekV32Indexer):
    def forward(self, hidden_states, *given, **named):
        """Of one new token the choice looks at half of its numbers."""
        if hidden_states.shape[1] == 1:
            hidden_states = hidden_states * (torch.arange(hidden_states.shape[-1]) % 2)
        return super().forward(hidden_states, *given, **named)


def other_choice() -> Any:
    model = indexed()
    model.model.layers[1].self_attn.indexer.__class__ = OtherKeys
    return model


def hunyuan() -> Any:
    """A norm follows the rotation, with weights as of a trained model."""
    model = by_layer(HunYuanDenseV1ForCausalLM, num_hidden_layers=2)
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


BROKEN: dict[str, dict[str, Callable[[], Any]]] = {
    "layer_rotations": {
        "row 0 for all rows": partial(with_tables, lambda right, x, at: right(x, at[:1].expand_as(at))),
        "the other of two tables": other_table,
        "YaRN's factor on queries alone": lambda: rotates(factor_on_queries, YARN),
        "keys one position further": lambda: rotates(keys_later),
        "keys not rotated": lambda: rotates(lambda right, q, k, cos, sin: (right(q, k, cos, sin)[0], k)),
        "tables for the other layout": partial(
            with_tables, lambda right, x, at: tuple(t[..., :4].repeat_interleave(2, -1) for t in right(x, at))
        ),
        "all but the start off by minus one": partial(  # far away, too, where it is no rounding
            with_tables, lambda right, x, at: right(x, at - 1 if at.min() > 0 else at)
        ),
        "layers without rotation inverted": smollm3_inverted,
        "only the first layer rotates": lambda: rotates(lambda right, q, k, cos, sin: (q, k), layers=slice(1, None)),
        "rope_interleave ignored": interleave_ignored,
    },
    "layer_masks": {
        "no mask in a static cache": no_mask_in_static_cache,
    },
    "cached_decoding": {"other keys are chosen while decoding": other_choice},
    "attention_outputs: scale": {"DeepSeek's mscale missing": no_mscale},
}
HEALTHY: dict[str, Callable[[], Any]] = {
    "gemma3": gemma3,
    "hunyuan": hunyuan,
    "deepseek": partial(deepseek, rope_type="yarn", mscale=1.0, mscale_all_dim=1.0),
    "sparse attention": indexed,
    "mistral": partial(by_layer, MistralForCausalLM, sliding_window=8),
}
