"""Writes temperature.json: attention layers of transformers whose queries have a temperature, or whose heads have sinks.

pip install torch transformers
python tests/golden/make_temperature.py

Llama4TextAttention in a layer without rotation, Ministral3Attention and GptOssAttention, toys in float64 with eager attention.
"""

import tables
import torch
from tables import listed
from torch import Tensor, nn
from transformers import GptOssConfig, Llama4TextConfig, Ministral3Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention, Ministral3RotaryEmbedding

LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 11, 6, 2, 1, 4
SHAPE = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "num_hidden_layers": 4, "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"


def answer(layer: nn.Module, embeddings: tuple[Tensor, Tensor] | None) -> dict:
    """The layer's parameters, tokens x [tokens, width], its output, and the gradients of x and of sinks along ones."""
    layer.double()
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(tables.numbers(*parameter.shape, seed=sum(map(ord, name))))
    x = tables.numbers(1, LENGTH, WIDTH, seed=1).double().requires_grad_()
    future = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    out = layer(x, position_embeddings=embeddings, attention_mask=future, position_ids=torch.arange(LENGTH)[None])[0]
    out.sum().backward()
    found = {"x": x[0], "out": out[0], "gradient": x.grad[0]}
    if (sinks := getattr(layer, "sinks", None)) is not None:
        found["gradient of sinks"] = sinks.grad
    return {name: listed(t) for name, t in (found | dict(layer.named_parameters())).items()}


def llama4() -> dict:
    config = Llama4TextConfig(**SHAPE, attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5)
    return answer(Llama4TextAttention(config, 3), None)  # the fourth layer does not rotate


def ministral3() -> dict:
    rope = {"rope_type": "default", "rope_theta": 50.0, ORIGINAL: 4, "llama_4_scaling_beta": 0.3}
    config = Ministral3Config(**SHAPE, rope_parameters=rope)
    positions = torch.arange(LENGTH)[None]
    tables_ = Ministral3RotaryEmbedding(config).double()(torch.zeros(1, dtype=torch.float64), positions)
    return answer(Ministral3Attention(config, 0), tables_)


def gpt_oss() -> dict:
    config = GptOssConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 50.0}, attention_bias=False)
    positions = torch.arange(LENGTH)[None]
    tables_ = GptOssRotaryEmbedding(config).double()(torch.zeros(1, dtype=torch.float64), positions)
    return answer(GptOssAttention(config, 1), tables_)  # of full attention


if __name__ == "__main__":
    tables.save("temperature", "torch transformers", llama4=llama4(), ministral3=ministral3(), gpt_oss=gpt_oss())
