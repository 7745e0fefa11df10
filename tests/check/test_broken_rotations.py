"""Rotations with one bug each, caught by one law alone; and models whose rope_parameters nobody reads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from longitude.check import check
from longitude.hf import set_positions

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, intermediate_size=64, num_key_value_heads=2)).eval()


def one_back_in_the_cache() -> Any:
    """Positions of all but a pass from the start are one too small: far away, too, where it is no rounding."""
    model = llama()
    tables = model.model.rotary_emb
    plain = tables.forward
    tables.forward = lambda x, position_ids: plain(x, position_ids - 1 if position_ids.min() > 0 else position_ids)
    return model


def the_other_way_round() -> Any:
    model = llama()
    tables = model.model.rotary_emb
    plain = tables.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = plain(x, position_ids)
        return cos, -sin

    tables.forward = forward
    return model


def interleaved_tables() -> Any:
    """Right numbers, repeated for the other layout."""
    model = llama()
    tables = model.model.rotary_emb
    plain = tables.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in plain(x, position_ids))

    tables.forward = forward
    return model


class KeysNotRotated(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **options):
        cos, sin = position_embeddings
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, _ = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out, _ = modeling_llama.eager_attention_forward(self, q, k, v, attention_mask, self.scaling)
        return self.o_proj(out.reshape(*split[:-2], -1)), None


def keys_not_rotated() -> Any:
    model = llama()
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = KeysNotRotated
    return model


def falcon() -> Any:
    """With ALiBi, and rope_parameters that nothing reads beside it."""
    torch.manual_seed(0)
    shape = {"alibi": True, "new_decoder_architecture": False, "multi_query": False}
    return FalconForCausalLM(FalconConfig(**SHAPE, **shape)).eval()


def replaced() -> Any:
    model = llama()
    set_positions(model, "alibi")
    return model


BROKEN = {
    "all but the start off by minus one": (one_back_in_the_cache, "cached_decoding"),
    "sin has the wrong sign": (the_other_way_round, "rotary_frequencies"),
    "tables for the other layout": (interleaved_tables, "relative_positions"),
    "keys not rotated": (keys_not_rotated, "relative_positions"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("referred", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_bug_is_caught_by_its_law_and_by_no_other(name, referred):
    make, law = BROKEN[name]
    results = check(make(), reference=llama() if referred else None)
    broken = {result.law: result for result in results.values() if result.status == "broken"}
    assert list(broken) == [law], broken
    assert broken[law].reason and broken[law].measured > 2 * broken[law].threshold


@pytest.mark.slow
@pytest.mark.parametrize("make", [falcon, replaced])
def test_positions_that_are_not_the_configs_break_no_law(make):
    found = check(make())
    assert [result for result in found.values() if result.status == "broken"] == []
    for law in ("rotary_frequencies", "relative_positions", "scaling_border"):
        assert found[law].status == "does not apply" and found[law].reason.startswith("its positions are")
    assert found["cached_decoding"].status == "holds"
