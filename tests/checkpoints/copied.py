"""Our models with the weights of others, by a table of prefixes for each family: for parity tests only."""

import re

from torch import nn

import longitude as lg

MAMBA = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.layers.{n}.norm.": "model.layers.{n}.mixer_norm.",
    "backbone.layers.{n}.mixer.": "model.layers.{n}.mixer.",
    "backbone.norm_f.": "model.norm.",
}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")


def renamed(state, names):
    """Tensors under new prefixes; {n} stands for the number of a layer."""
    rules = [(re.compile(re.escape(old).replace(r"\{n\}", r"(\d+)")), new) for old, new in names.items()]

    def ours(name):
        for rule, new in rules:
            if match := rule.match(name):
                return new.replace("{n}", "".join(match.groups())) + name[match.end() :]
        return name

    return {ours(name): tensor for name, tensor in state.items()}


def copied(model, names, **options):
    """A LongitudeForCausalLM with a model's weights, in its dtype and mode; shared sizes come from its config."""
    config = lg.LongitudeConfig(
        **{name: getattr(model.config, name) for name in SIZES}, embedding_scale=1.0, pad_token_id=None, **options
    )
    ours = lg.LongitudeForCausalLM(config)
    nn.Module.to(ours, model.dtype)
    ours.load_state_dict(renamed(model.state_dict(), names))
    return ours.train(model.training)


def of_mamba(model):
    """Mamba, Falcon-Mamba or Mamba-2 as ours: blocks of a norm and a mixer."""
    config = model.config
    mixer = {
        "name": "mamba", "state_size": config.state_size,
        "conv_kernel": config.conv_kernel, "conv_bias": config.use_conv_bias, "bias": config.use_bias,
    }  # fmt: skip
    if config.model_type == "mamba2":
        mixer |= {"name": "mamba2", "expand": int(config.expand), "norm_eps": config.layer_norm_epsilon}
        mixer |= {"head_dim": config.head_dim, "groups": config.n_groups}
    else:
        mixer |= {"expand": config.intermediate_size // config.hidden_size}
        mixer |= {"dt_rank": int(config.time_step_rank), "norm_eps": getattr(config, "mixer_rms_eps", None)}
    options = {"num_attention_heads": 1, "mlp": "none", "rms_norm_eps": config.layer_norm_epsilon}
    return copied(model, MAMBA, mixer=mixer, max_position_embeddings=None, **options)
