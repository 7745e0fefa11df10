"""Rotary tables of transformers' modules and of our import: of every family's own config, and of random ones."""

import importlib
import inspect
import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

import longitude as lg
from longitude.checkpoints.config import from_hugging_face
from longitude.positions.hugging_face import NotUnderstood, RopeConfig

ORIGINAL = "original_max_position_embeddings"


def maybe(r: random.Random, **options: Any) -> dict[str, Any]:
    """Each option or not."""
    return {name: value for name, value in options.items() if r.random() < 0.5}


def parameters(r: random.Random, kind: str, pairs: int) -> dict[str, Any]:
    """Random options of a rope type, and its base."""
    factor = r.choice([2, 3.5, 8.0, 32.0, r.uniform(1.0, 50.0)])
    original = r.choice([32, 64, 1000, 4096])
    match kind:
        case "linear" | "dynamic":
            return {"factor": factor}
        case "proportional":
            return {"partial_rotary_factor": r.choice([0.25, 0.3, 0.5, 0.9])} | maybe(r, factor=factor)
        case "llama3":
            low = r.choice([1.0, 0.5, 2.0])
            ramp = {"low_freq_factor": low, "high_freq_factor": low * r.choice([1.5, 4.0])}
            return {"factor": factor} | ramp | maybe(r, **{ORIGINAL: original})
        case "yarn":
            options = {"factor": factor} | maybe(r, **{ORIGINAL: original}, truncate=r.random() < 0.5)
            options |= maybe(r, mscale=r.uniform(0.5, 1.5), mscale_all_dim=r.uniform(0.5, 1.5))
            if r.random() < 0.3:
                options |= {"beta_fast": r.choice([16, 64.0]), "beta_slow": r.choice([0.5, 2])}
            return options | ({"attention_factor": r.uniform(0.5, 2.0)} if r.random() < 0.3 else {})
        case "longrope":
            names = ("short_factor", "long_factor")
            lists = {name: sorted(r.uniform(1.0, 9.0) for _ in range(pairs)) for name in names}
            return lists | {ORIGINAL: r.choice([32, 64, 100])} | maybe(r, factor=factor)
    return {}


KINDS = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]


def close(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], length: int) -> None:
    """cos and sin [L, pairs], theirs doubled [1, L, 2 pairs], up to what float32 angles of `length` positions allow."""
    for got, want in zip(mine, theirs, strict=True):
        pairs = got.shape[-1]
        assert torch.equal(want[0, :, :pairs], want[0, :, pairs:])
        torch.testing.assert_close(got.float(), want[0, :, :pairs], atol=4e-7 * length, rtol=0)


def same_tables(config: Any, theirs: nn.Module, head_dim: int) -> lg.Rotary:
    """Ours, read from a config, makes their tables on both sides of the lengths that dynamic and longrope follow."""
    rope = from_hugging_face(config)
    assert isinstance(rope, RopeConfig)
    mine = lg.Rotary(head_dim, "half", **rope.options(head_dim))
    assert mine.frequencies().attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    for length in (20, 41, 120):
        places, lengths_of_mine = torch.arange(length), mine.length_at(length - 1, length - 1)
        close(mine.prepare(places, lengths_of_mine), theirs(torch.zeros(1), places[None]), length)
        torch.testing.assert_close(
            mine.frequencies(lengths_of_mine).inverse.float(), theirs.inv_freq, rtol=3e-6, atol=1e-12
        )
    return mine


@pytest.mark.one_in(10)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_llama(kind, style, seed):
    """Both styles of config. Llama ignores partial_rotary_factor for "default" alone, so it is not given there."""
    r = random.Random(f"{kind} {style} {seed}")
    head_dim, base = r.choice([8, 16, 20, 64, 128]), r.choice([100.0, 10_000.0, 500_000.0, 1e7, r.uniform(50, 1e6)])
    share = r.choice([1.0, 0.5]) if kind not in ("default", "proportional") else 1.0
    options = parameters(r, kind, int(head_dim * share) // 2)
    if share != 1:
        options["partial_rotary_factor"] = share
    most = 128 if kind == "longrope" else r.choice([40, 128])
    config = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": most}
    if style == "rope_parameters":
        config["rope_parameters"] = {"rope_type": kind, "rope_theta": base, **options}
    else:
        config |= {"rope_theta": base, "rope_scaling": {r.choice(["type", "rope_type"]): kind, **options}}
    same_tables(config, LlamaRotaryEmbedding(LlamaConfig(**deepcopy(config))), head_dim)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("seed", range(15))
def test_random_partial(seed):
    """GPT-NeoX and Phi-3 (only with LongRoPE) honour partial_rotary_factor; exponents count the dimensions that rotate."""
    r, phi = random.Random(seed), seed % 3 == 0
    head_dim, share, base = r.choice([16, 48, 96]), r.choice([0.25, 0.5, 0.75, 1.0]), r.uniform(100, 1e6)
    kind = "longrope" if phi else r.choice([kind for kind in KINDS if kind != "proportional"])
    pairs = int(head_dim * share) // 2
    options = {"rope_type": kind, "rope_theta": base, "partial_rotary_factor": share, **parameters(r, kind, pairs)}
    config_class, module = (Phi3Config, Phi3RotaryEmbedding) if phi else (GPTNeoXConfig, GPTNeoXRotaryEmbedding)
    config = config_class(
        hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=90,
        rope_parameters=options, pad_token_id=0, original_max_position_embeddings=options.get(ORIGINAL, 90),
    )  # fmt: skip
    assert same_tables(config, module(config), head_dim).rotary_dim == 2 * pairs


@pytest.mark.one_in(8)
@pytest.mark.parametrize("seed", range(8))
def test_random_layer_types(seed):
    """Gemma 3: one rotation for layers that see all, another for those with a window."""
    r = random.Random(seed)
    kinds = ["default", "linear", "yarn", "llama3", "proportional"]
    ropes = {}
    for layer in ("full_attention", "sliding_attention"):
        kind = r.choice(kinds)
        options = {"rope_type": kind, "rope_theta": r.uniform(100, 1e6), **parameters(r, kind, 8)}
        options.pop("truncate", None)  # transformers looks for it outside of the layer's own dict
        ropes[layer] = options
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, num_hidden_layers=2, layer_types=types,
        max_position_embeddings=64, rope_parameters=ropes,
    )  # fmt: skip
    theirs, read = Gemma3RotaryEmbedding(config), from_hugging_face(config)
    assert isinstance(read, dict) and read.keys() == ropes.keys()
    places = torch.arange(100)
    for layer, rope in read.items():
        assert rope is not None
        table = lg.Rotary(16, "half", **rope.options(16)).prepare(places)
        close(table, theirs(torch.zeros(1), places[None], layer), 100)


# ---- every family ----------------------------------------------------------------------------------------------------
NONE_BY_DEFAULT = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a class makes no model of while it is None, by family."""
FAMILIES = """
    apertus arcee bamba cohere cohere2 deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5 exaone4 falcon gemma gemma2
    gemma3 glm glm4 gpt_neox gpt_oss granite helium hunyuan_v1_dense jetmoe lfm2 llama llama4 longcat_flash minimax ministral
    mistral mixtral modernbert nemotron olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_next seed_oss
    smollm3 stablelm starcoder2 vaultgemma zamba2
"""


def first_of(module, ending: str) -> type:
    """The class of a module whose name ends so: of text, if there are several."""
    classes = [kind for name, kind in vars(module).items() if inspect.isclass(kind) and name.endswith(ending)]
    classes = [kind for kind in classes if kind.__module__ == module.__name__]
    others = ("Vision", "Audio")
    return min(classes, key=lambda kind: (any(x in kind.__name__ for x in others), "Text" not in kind.__name__))


@pytest.mark.slow
def test_a_class_that_cannot_be_tried_is_not_read_by_its_keys():
    """An encoder-decoder takes no tokens alone, and its keys could mean anything."""
    with pytest.raises(NotUnderstood, match="moonshine"):
        lg.from_hugging_face(AutoConfig.for_model("moonshine"))


@pytest.mark.one_in(54)
@pytest.mark.parametrize("family", FAMILIES.split())
@pytest.mark.filterwarnings("default")  # of code that is not ours
def test_family(family):
    """Frequencies, their number, and the factor of cos and sin; per layer type where there are several."""
    parts = [f"transformers.models.{family}.{part}_{family}" for part in ("modeling", "configuration")]
    modeling, configuration = map(importlib.import_module, parts)
    config = first_of(configuration, "Config")(**NONE_BY_DEFAULT.get(family, {}))
    theirs, read = first_of(modeling, "RotaryEmbedding")(config), lg.from_hugging_face(config)
    head_dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    for layer, rope in (read if isinstance(read, dict) else {"": read}).items():
        assert isinstance(rope, lg.RopeConfig)
        start = f"{layer}_" if layer else ""
        mine = lg.rope_frequencies(head_dim, **rope.options(head_dim))
        torch.testing.assert_close(mine.inverse.float(), getattr(theirs, f"{start}inv_freq").float(), rtol=2e-6, atol=0)
        assert getattr(theirs, f"{start}attention_scaling", 1.0) == pytest.approx(mine.attention_factor, rel=1e-12)
