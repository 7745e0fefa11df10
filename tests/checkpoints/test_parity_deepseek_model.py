"""DeepSeek's models of transformers, at toy size: the same logits from ours."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, DeepseekV32ForCausalLM

import longitude as lg
from tests.checkpoints.copied import SIZES

YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
KINDS = {"v3": DeepseekV3ForCausalLM, "v2": DeepseekV2ForCausalLM, "v3.2": DeepseekV32ForCausalLM}
INDEXER = {"index_topk": 9, "index_n_heads": 16, "index_head_dim": 8}


def theirs(kind="v3", dense=2, seed=0, **options):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 5, "max_position_embeddings": 128, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": dense,
    }  # fmt: skip
    shape |= INDEXER if kind == "v3.2" else {}
    made = KINDS[kind](KINDS[kind].config_class(**{**shape, **options})).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


NAMES = {
    "self_attn": "mixer", "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "indexer": "", "wq_b": "index_q", "wk": "index_k",
    "weights_proj": "index_w", "k_norm": "index_norm",
}  # fmt: skip
"""Module names of DeepSeek -> our names, if they differ; those of the indexer are in the layer itself."""
RANKS = {
    "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip
CHOICE = {"k_top": "index_topk", "index_heads": "index_n_heads", "index_dim": "index_head_dim"}


def renamed(module):
    return {
        ".".join(filter(None, (NAMES.get(part, part) for part in name.split(".")))): tensor
        for name, tensor in module.state_dict().items()
    }


def rotation(config):
    """(options of RoPE, layout): checkpoints have neighbors as pairs, unless rope_interleave is false."""
    rope = lg.from_hugging_face(config).options(config.qk_rope_head_dim)
    return rope, "interleaved" if getattr(config, "rope_interleave", True) else "half"


def mixer_options(config):
    options = {ours: getattr(config, name) for ours, name in RANKS.items()} | {"eps": 1e-6}
    if hasattr(config, "index_topk"):
        options |= {ours: getattr(config, name) for ours, name in CHOICE.items()}
        rope = rotation(config)[0]
        options |= {"index_base": rope["base"], "index_scaling": rope["scaling"]}
        options |= {"index_rotary_dim": config.qk_rope_head_dim}
    return options


def copied(model):
    """A dense model of theirs as ours."""
    config, (rope, layout) = model.config, rotation(model.config)
    same = "intermediate_size num_attention_heads attention_bias max_position_embeddings rms_norm_eps".split()
    mixer = "indexed_latent" if hasattr(config, "index_topk") else "latent"
    ours = lg.LongitudeForCausalLM(
        lg.LongitudeConfig(
            **{name: getattr(config, name) for name in (*SIZES, *same)},
            mlp_bias=getattr(config, "mlp_bias", False),
            embedding_scale=1.0,
            pad_token_id=None,
            encoding={"name": "rope", "layout": layout, **rope},
            mixer={"name": mixer, **mixer_options(config)},
        )
    )
    ours.load_state_dict(renamed(model))
    return ours.eval()


CASES = {
    "plain": {},
    "full queries, tied, biases": {"q_lora_rank": None, "tie_word_embeddings": True, "attention_bias": True},
    "yarn with both mscales": {"rope_parameters": YARN},
    "yarn with one mscale": {"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale_all_dim"}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
}


OF_ONE = {
    "heads that do not divide the width": ("v3", {"hidden_size": 42}),
    "pairs that were taken apart": ("v3", {"rope_interleave": False}),
    "biases of the mlp": ("v2", {"mlp_bias": True}),
}
"""What only one of their two configs takes."""


EVERY = [pair for pair in product(KINDS, CASES) if pair != ("v3.2", "full queries, tied, biases")]
EVERY += [(kind, case) for case, (kind, _) in OF_ONE.items()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "case"), EVERY)
def test_logits_and_generated_tokens_are_equal(kind, case):
    options = CASES[case] if case in CASES else OF_ONE[case][1]
    model = theirs(kind, **options)
    ours = copied(model)
    assert ours.config.encoding["layout"] == ("half" if "rope_interleave" in options else "interleaved")
    ids = torch.randint(3, 60, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert_close(ours.generate(ids, **options), model.generate(ids, **options))


def test_left_padding_and_gradients_are_equal():
    model = theirs(rope_parameters=YARN)
    ours = copied(model)
    ids = torch.randint(3, 60, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    a = model(ids, attention_mask=mask, position_ids=places).logits[mask == 1]
    b = ours(ids, attention_mask=mask).logits[mask == 1]
    assert_close(b, a, rtol=1e-4, atol=1e-4)
    model(ids, labels=ids).loss.backward()
    ours(ids, labels=ids).loss.backward()
    names = {"self_attn.kv_b_proj": "mixer.kv_up", "self_attn.q_a_layernorm": "mixer.q_norm", "mlp.up_proj": "mlp.up"}
    for name, ours_name in names.items():
        wanted, got = (m.model.layers[0].get_submodule(n).weight.grad for m, n in ((model, name), (ours, ours_name)))
        assert_close(got, wanted, rtol=1e-3, atol=1e-5)
