"""Recurrent models of transformers at toy size, in which no parameter is zero or one."""

from contextlib import contextmanager
from inspect import signature

import torch
from torch import nn
from transformers import FalconMambaForCausalLM, Mamba2ForCausalLM, MambaForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

GROUPED = "group_size" in signature(MambaRMSNormGated).parameters
"""Whether transformers norms each group of Mamba-2 alone, as its authors do; 5.21 norms all of them as one."""
VOCABULARY = 40
CASES = {
    "mamba": (MambaForCausalLM, {"state_size": 5, "conv_kernel": 3, "use_bias": True, "layer_norm_epsilon": 1e-3}),
    "mamba, narrow, without biases": (MambaForCausalLM, {"expand": 1, "use_conv_bias": False, "time_step_rank": 3}),
    "mamba, untied": (MambaForCausalLM, {"tie_word_embeddings": False}),
    "falcon": (FalconMambaForCausalLM, {"state_size": 5, "mixer_rms_eps": 1e-2, "tie_word_embeddings": False}),
    "falcon, width not by expand": (FalconMambaForCausalLM, {"expand": 16, "intermediate_size": 48}),
    "mamba2": (
        Mamba2ForCausalLM,
        {"n_groups": 3 if GROUPED else 1, "chunk_size": 4, "use_bias": True, "layer_norm_epsilon": 1e-3},
    ),
    "mamba2, one group, tied": (Mamba2ForCausalLM, {"n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True}),
}  # fmt: skip


def theirs(case, **more):
    """A model of transformers, filled with random numbers."""
    kind, options = CASES[case]
    shape = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3}
    if kind is Mamba2ForCausalLM:
        shape |= {"num_heads": 6, "head_dim": 8, "state_size": 5}
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**shape, **options, **more})).eval()
    perturb(model.named_parameters())
    return model


def perturb(named):
    for name, parameter in named:
        nn.init.normal_(parameter, std=0.2)
        if name.endswith("weight") and ("norm" in name or "ln" in name.split(".")[-2]):
            parameter.data += 1


def some_ids():
    """Tokens [2, 13] without 0."""
    return torch.randint(1, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))


@contextmanager
def in_float64():
    """What transformers computes in float32 whatever the model's dtype is, in float64."""
    narrow, method = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = narrow, method


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def in_steps(model, ids):
    """Logits by a cache: some tokens at once, then one by one."""
    with torch.no_grad():
        out = model(ids[:, :4], use_cache=True)
        parts = [out.logits]
        for token in ids[:, 4:].split(1, 1):
            out = model(token, cache=out.cache)
            parts.append(out.logits)
    return torch.cat(parts, 1)
