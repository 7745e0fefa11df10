"""What is read of configs against what their families' classes do: every causal family at toy size, and published configs."""

import json
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import longitude as lg
from longitude.checkpoints import observed
from longitude.checkpoints.declared import class_of, text_part
from longitude.checkpoints.lint import contradictions
from tests.checkpoints.families import FAMILIES, dependences, of_published, swept, toy_config
from tests.checkpoints.published import PUBLISHED, RELEASED
from tests.support import refused

QUICK = ("llama", "gemma3_text")


@pytest.fixture(autouse=True)
def _quiet():
    """Families warn of kernels that are not here, and of options of toys."""
    with warnings.catch_warnings(action="ignore"):
        yield


def quick_or_slow(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, QUICK))
def test_every_layer_rotates_as_it_is_read(family):
    """Measured frequencies and factors; or a refusal that names a key; or it is said what is unknown."""
    for scheme, (kind, why) in swept(family, ("default", "yarn") if family in QUICK else None).items():
        assert kind in ("equal", "refused", "unknown"), (scheme, why)
        assert kind == "equal" or why


TOKENS = 40
UNSEEN = {"hrm_text", "longcat_flash", "dory"}
"""Families of which several attentions have one layer_idx, all layers others than those of the config, or a softmax so sharp
that float64 does not see some keys."""


@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, QUICK))
def test_every_query_depends_on_the_keys_that_its_layer_has_in_sight(family):
    """Measured in the outputs of attention, which is run as its family has it; or no layers are returned."""
    layers, config = [], None
    with suppress(Exception):  # a refusal of ours, or of toys by their class
        layers = lg.checkpoints.layers_from_hugging_face(config := toy_config(family), "half")
    assert layers or family not in QUICK
    if family in UNSEEN or not any(layer.attends for layer in layers):
        return
    measured, at = dependences(config, TOKENS), torch.arange(TOKENS)
    for n, layer in enumerate(layers):
        if layer.attends:
            first = at - (layer.window or TOKENS) + 1 if layer.chunk is None else at // layer.chunk * layer.chunk
            assert torch.equal(measured[n], (at >= first[:, None]) & (at <= at[:, None])), n


SPARSE = {
    "deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention", "deepseek_v4": "DeepseekV4Attention",
    "minimax_m3_vl_text": "MiniMaxM3VLAttention", "doge": "DogeAttention", "qwen4_exp_text": "Qwen4ExpTextAttention",
    "zaya": "ZayaDecoderLayer", "falcon": "FalconDecoderLayer",
}  # fmt: skip
"""Family -> the class that its refusal names."""
MINIMAX = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 3, "index_n_heads": 2, "index_block_size": 4}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", SPARSE)
def test_attention_that_is_not_over_all_keys_in_sight_is_no_layer_of_ours(family):
    """Its class is named; its rotation is read all the same."""
    config = toy_config(family)
    for key, value in (MINIMAX if family.startswith("minimax") else {}).items():
        setattr(config, key, value)
    with refused(SPARSE[family], what="layers_from_hugging_face"):
        lg.checkpoints.layers_from_hugging_face(config, "half")
    assert lg.from_hugging_face(config)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", ["content", "fewer keys", "more keys", "values", "a window", "a convolution"])
def test_a_llama_with_other_attention_is_not_read_as_llama(change, monkeypatch):
    """Each changed in its published function; unchanged, its layers are returned."""
    attention = modeling_llama.LlamaAttention
    rotate, call = modeling_llama.apply_rotary_pos_emb, attention.forward

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **more):
        if change == "content":
            attention_mask = attention_mask + hidden_states.sum(-1)[:, None, None]
        if change == "a window":
            attention_mask = attention_mask.tril() + attention_mask.triu(-4)
        if change == "a convolution":
            mixed = hidden_states.transpose(1, 2)
            width = mixed.shape[1]
            weight = mixed.new_ones(width, 1, 3)
            mixed = torch.nn.functional.conv1d(mixed, weight, padding=2, groups=width)[..., :-2]
            hidden_states = mixed.transpose(1, 2)
        if change == "values":
            self.v_proj.register_forward_hook(
                lambda module, inputs, out: out * torch.arange(out.shape[1], device=out.device)[:, None]
            )
        return call(self, hidden_states, position_embeddings, attention_mask, **more)

    def rotated(q, k, cos, sin, *more):
        q, k = rotate(q, k, cos, sin, *more)
        if change == "fewer keys":
            k = k[:, :, ::2]
        if change == "more keys":
            k = torch.cat([k, k[:, :, :1]], 2)
        return q, k

    config = toy_config("llama")
    lg.checkpoints.layers_from_hugging_face(config, "half")
    monkeypatch.setattr(attention, "forward", forward)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    observed._OBSERVED.clear()
    try:
        with refused("LlamaAttention", what="layers_from_hugging_face"):
            lg.checkpoints.layers_from_hugging_face(config, "half")
    finally:
        observed._OBSERVED.clear()


# ---- published configs -----------------------------------------------------------------------------------------------
REFUSED = dict.fromkeys(("Llama 1 7B", "Falcon 7B", "Baichuan 2 13B"), "rope_theta")
REFUSED |= {"GPT-J 6B": "rotary_dim", "DBRX 132B": "base", "GLM-4.1V 9B": "glm4v_text"}
"""Config -> the key that its refusal names."""
UNKNOWN = (
    "GPT-2", "StarCoder", "OPT 1.3B", "XGLM 564M", "BLOOM 560M", "Falcon RW 1B", "MPT 7B", "MPT with alibi_bias_max 16",
    "RWKV 4 169M", "Kimi K2 by its own name", "InternLM2 7B", "Llama 3.2 11B Vision", "MiniMax M3",
)  # fmt: skip
"""What else of position they have, or that transformers has no class of them, is said."""


@pytest.mark.parametrize(
    "kinds", [["falcon_h1"], pytest.param([*CONFIG_MAPPING], marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_what_a_class_saves_is_read(kinds):
    """Infinities too, for which JSON has no number."""
    made = {}
    for kind in kinds:
        with suppress(Exception):  # two have no default
            made[kind] = CONFIG_MAPPING[kind]()
    assert len(made) >= len(kinds) - 2
    for kind, theirs in made.items():
        read = class_of(json.loads(theirs.to_json_string(use_diff=False)))
        assert read is None or type(read) is type(text_part(theirs)), kind


NO_TOY = "mamba2"  # its sizes depend on each other
OF_OTHER_KINDS = {
    raw["model_type"]: name
    for name, raw in reversed(RELEASED.items())
    if raw.get("model_type") in {*CONFIG_MAPPING} - {NO_TOY} - {raw["model_type"] for raw in PUBLISHED.values()}
}
"""The first released file of every class that PUBLISHED has not."""


@pytest.mark.parametrize("name", quick_or_slow([*PUBLISHED, *OF_OTHER_KINDS.values()], ("Llama 3.1 8B",)))
def test_published_configs(name):
    """Read at their real size, as a dict of their file; measured in a toy of their class with their layers and their widths."""
    kind, why = of_published(name)
    if name in REFUSED:
        assert kind == "refused" and REFUSED[name] in why
    else:
        assert kind == ("unknown" if name in UNKNOWN else "equal"), why
        raw = (PUBLISHED | RELEASED)[name]
        assert (theirs := class_of(raw)) is None or [*contradictions(raw, theirs)] == []
