"""What reading and training take: FLOPs counted without weights, and the rate of this machine from a part of the model."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.runs import costs
from longitude.runs.costs import WORDS, flops_per_second, forward_flops, smaller
from tests.support import refused

TINY = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
TINY |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY |= {"intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": 16}


def outline(kind: str, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "smollm3", "gpt_neox", "qwen3", "mistral"])
def test_counted_and_run_are_the_same_model(kind, monkeypatch) -> None:
    """The rate is what a pass counts over its seconds."""
    model = outline(kind, **TINY)
    calls = []
    monkeypatch.setattr(costs, "_seconds", lambda step, times: (calls.append(step()), 2.0)[1])
    want = 3 * forward_flops(model).of(32) / 2
    assert flops_per_second(model, 32, rows=3) == pytest.approx(want)
    assert len(calls) == 1


def test_of_a_large_model_a_few_layers_are_run(monkeypatch) -> None:
    """As many as the limit holds, one at least, with what is listed for each layer."""
    model = outline("gemma3_text", **TINY | {"vocab_size": 20_000})
    monkeypatch.setattr(costs, "LARGEST", 60_000)
    config = smaller(model)
    each = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    kept = 60_000 // each
    assert (config.num_hidden_layers, len(config.layer_types), config.vocab_size) == (kept, kept, WORDS)
    assert kept in (1, 2, 3)
    assert model.config.num_hidden_layers == 4, "it is another configuration"
    monkeypatch.setattr(costs, "LARGEST", 1)
    assert smaller(model).num_hidden_layers == 1
    assert flops_per_second(model, 32) > 0
    monkeypatch.undo()
    assert smaller(model).num_hidden_layers == 4


def test_what_cannot_be_counted_is_refused(monkeypatch) -> None:
    model = outline("llama", **TINY)
    monkeypatch.setattr(type(model), "forward", lambda self, **_: torch.empty(1, device="meta").item())
    with refused("LlamaForCausalLM", "FLOPs"):
        forward_flops(model)
    monkeypatch.setattr(type(model), "forward", lambda self, **_: {}["loss"])
    with refused("LlamaForCausalLM", "KeyError: 'loss'"):
        forward_flops(model)


@pytest.mark.slow
def test_flops_of_experts() -> None:
    """Mixtral's: of 8 experts the two that are chosen for each token; how they run outside of counting stays."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "dtype": torch.bfloat16}
    model = outline("mixtral", **TINY | experts)
    before = model.config._experts_implementation
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name]
    used = sum(count * (2 / 8 if ".experts." in name else 1) for name, count in matrices)
    assert forward_flops(model).per_token == pytest.approx(2 * used, rel=1e-2)
    assert model.config._experts_implementation == before


def test_a_layer_larger_than_memory_is_not_built(monkeypatch) -> None:
    """The experts of one layer may be: nothing is timed, and the plan says why."""
    model = outline("llama", **TINY)
    monkeypatch.setattr(costs, "available_memory", lambda device: 10**6)
    with refused("GiB"):
        flops_per_second(model, 32)
