"""The rotation of every family of models that transformers has: its own config as it comes, read by our import."""

import importlib
import inspect

import pytest
import torch

import longitude as lg

FAMILIES = """
    apertus arcee bamba cohere cohere2 deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5 exaone4 falcon gemma gemma2
    gemma3 glm glm4 gpt_neox gpt_oss granite helium hunyuan_v1_dense jetmoe lfm2 llama llama4 longcat_flash minimax ministral
    mistral mixtral modernbert moonshine nemotron olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_next seed_oss
    smollm3 stablelm starcoder2 vaultgemma zamba2
"""


def of(module, ending: str, without: tuple[str, ...] = ("Vision", "Audio")) -> list[type]:
    """Classes of a module whose names end so, those of text first."""
    found = [
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and name.endswith(ending) and kind.__module__ == module.__name__
    ]
    found = [kind for kind in found if not any(word in kind.__name__ for word in without)]
    return sorted(found, key=lambda kind: "Text" not in kind.__name__)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES.split())
@pytest.mark.filterwarnings("default")  # of code that is not ours
def test_family(family):
    """Frequencies, their number, and the factor of cos and sin; per layer type where there are several."""
    modeling, configuration = (
        importlib.import_module(f"transformers.models.{family}.{part}_{family}")
        for part in ("modeling", "configuration")
    )
    config = of(configuration, "Config")[0]()
    theirs, read = of(modeling, "RotaryEmbedding")[0](config), lg.from_hugging_face(config)
    head_dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    for layer, rope in (read if isinstance(read, dict) else {"": read}).items():
        assert isinstance(rope, lg.RopeConfig)
        start = f"{layer}_" if layer else ""
        mine = lg.rope_frequencies(head_dim, **rope.options(head_dim))
        torch.testing.assert_close(mine.inverse.float(), getattr(theirs, f"{start}inv_freq").float(), rtol=2e-6, atol=0)
        assert getattr(theirs, f"{start}attention_scaling", 1.0) == pytest.approx(mine.attention_factor, rel=1e-12)
