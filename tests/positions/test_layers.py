"""Position by layer: what configs of transformers say of each layer, against the attention of their own layers."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2MoeConfig,
    Gemma3TextConfig,
    Llama4TextConfig,
    Ministral3Config,
    MistralConfig,
    SmolLM3Config,
)
from transformers.models.cohere2.modeling_cohere2 import Cohere2Model
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.llama4.modeling_llama4 import Llama4TextModel
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Model

import longitude as lg
from tests.support import close, refused_calls

SHAPE = {
    "vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager",
    "initializer_range": 0.4,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 50.0}
GEMMA = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0}, "sliding_attention": PLAIN}
TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
COHERE = {"rope_parameters": PLAIN, "sliding_window": 4}
EXPERTS = {"first_k_dense_replace": 1, "sliding_window_pattern": 2, "num_experts": 2, "experts_implementation": "eager"}
EXPERTS |= {"prefix_dense_intermediate_size": 8}
CHUNKS = {"no_rope_layer_interval": 2, "attention_chunk_size": 4, "floor_scale": 2, "use_qk_norm": False}
CHUNKS |= {"intermediate_size_mlp": 8, "num_local_experts": 1}
MODELS = {
    "smollm3": (SmolLM3Model, SmolLM3Config(**SHAPE, rope_parameters=PLAIN, no_rope_layer_interval=2), "half"),
    "cohere2": (Cohere2Model, Cohere2Config(**SHAPE, **COHERE), "interleaved"),
    "cohere2_moe": (Cohere2MoeModel, Cohere2MoeConfig(**SHAPE, **COHERE, **EXPERTS), "interleaved"),
    "llama4": (Llama4TextModel, Llama4TextConfig(**SHAPE, rope_parameters=PLAIN, **CHUNKS), "interleaved"),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**SHAPE, rope_parameters=GEMMA, sliding_window=4, **TYPES), "half"),
}


class Normed(torch.nn.Module):
    """A projection, and the norm of each head behind it."""

    def __init__(self, project, norm):
        super().__init__()
        self.project, self.norm = project, norm

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (-1, 8))
        return (heads if self.norm is None else self.norm(heads)).flatten(-2)


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_attends_as_theirs(kind):
    """Outputs of each layer's attention, with its own base, window, or no rotation, in a model of ours built of the config."""
    make, config, layout = MODELS[kind]
    torch.manual_seed(0)
    theirs = make(config).double().eval()
    layers = lg.checkpoints.layers_from_hugging_face(config, layout)
    ours = lg.LongitudeForCausalLM(
        lg.LongitudeConfig(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
            encodings=[one.encoding for one in layers], mixers=[one.mixer for one in layers],
        )
    ).double()  # fmt: skip
    ids, seen = torch.arange(10)[None], {}
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda m, given, named, out, n=n: seen.setdefault(n, (named["hidden_states"], out[0])), with_kwargs=True
        )
        for n, layer in enumerate(theirs.layers)
    ]
    theirs(ids, use_cache=False)
    for n, (mixer, own) in enumerate(zip(ours.model.mixers, ours.model.encoding_of_layer, strict=True)):
        x, want = seen[n]
        attention = theirs.layers[n].self_attn
        mixer.q_proj = Normed(attention.q_proj, getattr(attention, "q_norm", None))
        mixer.k_proj = Normed(attention.k_proj, getattr(attention, "k_norm", None))
        mixer.v_proj, mixer.o_proj, mixer.scale = attention.v_proj, attention.o_proj, attention.scaling
        mixer.head_dim = 8
        close(mixer(x, encoding=own), want.view_as(x), 5e-6)
        if n == 1:
            other = ours.model.encoding_of_layer[0]
            assert kind.startswith("cohere2") or (mixer(x, encoding=other) - want).abs().max() > 1e-3
    for hook in hooks:
        hook.remove()


def test_llama4_ministral3_and_mistral():
    more = {"num_hidden_layers": 4, "max_position_embeddings": 64}
    llama4 = lg.checkpoints.layers_from_hugging_face(Llama4TextConfig(**more, attention_chunk_size=32), "interleaved")
    read = [(one.encoding[0]["name"], one.chunk) for one in llama4]
    assert read == [*[("rope", 32)] * 3, ("llama4_temperature", None)]
    assert [one.mixer for one in llama4] == [{"name": "chunks", "size": 32}] * 3 + [{"name": "attention"}]
    [ministral, *_] = lg.checkpoints.layers_from_hugging_face(Ministral3Config(num_hidden_layers=2), "half")
    assert [one["name"] for one in ministral.encoding] == ["rope", "ministral3_temperature"]
    assert ministral.window is None
    mistral = lg.checkpoints.layers_from_hugging_face(MistralConfig(num_hidden_layers=2, sliding_window=7), "half")
    assert [one.mixer for one in mistral] == [{"name": "window", "size": 7}] * 2


test_wrong_use = refused_calls([
    (lambda: lg.checkpoints.layers_from_hugging_face({"rope_theta": 1e4}, "half"), "num_hidden_layers", "None"),
    (lambda: lg.checkpoints.layers_from_hugging_face(MODELS["smollm3"][1], "halves"), "'half'", "'interleaved'"),
    (lambda: lg.checkpoints.layers_from_hugging_face({"rope_parameters": GEMMA, "num_hidden_layers": 2, "head_dim": 8}, "half"),
     "layer_types"),
    (lambda: lg.LongitudeConfig(num_hidden_layers=6, encodings=["rope", "rope", "rope", "nope"]),
     "encodings", "6", "4"),
])  # fmt: skip
