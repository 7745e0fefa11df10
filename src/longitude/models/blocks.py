"""Building blocks of models: norms, the MLP, and the block of a mixer, optional cross-attention, and the MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from longitude.attention.layers.cross import CrossAttention
from longitude.attention.mixer import MixerInputs
from longitude.models.configuration import GATED, LongitudeConfig

GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"swiglu": F.silu, "geglu_tanh": GELU_TANH, "gelu": F.gelu, "gelu_tanh": GELU_TANH, "relu": F.relu}


def norm(config: LongitudeConfig) -> nn.Module:
    """RMSNorm or LayerNorm, by config.norm.

    x / sqrt(mean x^2 + eps) g, or (x - mean x) / sqrt(var x + eps) g + b with the biased variance.
    """
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MLP(nn.Module):
    """down(silu(gate x) * up x) for "swiglu" (Shazeer 2020), gelu_tanh for silu in "geglu_tanh", down(act(up x)) otherwise.

    act: "relu", "gelu" (x Phi(x)) or "gelu_tanh" (its approximation). Biases if config.mlp_bias.
    """

    def __init__(self, config: LongitudeConfig):
        super().__init__()
        dim, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        assert wide is not None
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate = nn.Linear(dim, wide, bias=bias) if config.hidden_act in GATED else None
        self.up = nn.Linear(dim, wide, bias=bias)
        self.down = nn.Linear(wide, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(self.act(up) if self.gate is None else self.act(self.gate(x)) * up)


class Block(GradientCheckpointingLayer):
    """Mixer, cross-attention (if any) and MLP (if any), each with a norm and a residual sum.

    x + f(norm(x)) with norms before, norm(x + f(x)) with norms after (Vaswani et al. 2017), x + norm(f(norm(x))) with both.
    """

    def __init__(self, config: LongitudeConfig, mixer: dict[str, Any], cross: bool = False):
        super().__init__()
        self.before = config.norm_position != "post"
        self.dropout = config.hidden_dropout
        self.mixer_norm = norm(config)
        self.mixer = config.build_mixer(mixer)
        self.cross_norm, self.cross = None, None
        if cross:
            self.cross_norm = norm(config)
            self.cross = CrossAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                bias=config.attention_bias,
                dropout=config.attention_dropout,
                scale=config.attention_scale,
                backend=config.attention_backend,
            )
        self.mlp_norm, self.mlp = None, None
        if config.mlp != "none":
            self.mlp_norm = norm(config)
            self.mlp = MLP(config)
        self.after = None
        if config.norm_position == "both":
            parts = [name for name in ("mixer_norm", "cross_norm", "mlp_norm") if getattr(self, name) is not None]
            self.after = nn.ModuleDict({name: norm(config) for name in parts})

    def forward(
        self,
        x: Tensor,
        inputs: MixerInputs,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
        cross_cache: Any = None,
        cross_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """-> [B, L, dim], and, if requested, the weights of the mixer and of cross-attention.

        source [B, S, dim]: input of the keys and values of cross-attention; source_valid [B, S]: 0 or False for its padding.
        """
        mixed = self.mixer(self.mixer_norm(x) if self.before else x, inputs)
        mixed, weights = mixed if inputs.return_weights else (mixed, None)
        x = self.added(x, mixed, "mixer_norm")
        of_source = None
        if self.cross is not None and self.cross_norm is not None:
            y = self.cross_norm(x) if self.before else x
            attended = self.cross(y, source, valid=source_valid, cache=cross_cache, return_weights=cross_weights)
            attended, of_source = attended if cross_weights else (attended, None)
            x = self.added(x, attended, "cross_norm")
        if self.mlp is not None and self.mlp_norm is not None:
            x = self.added(x, self.mlp(self.mlp_norm(x) if self.before else x), "mlp_norm")
        return x, weights, of_source

    def added(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """Residual sum x + y; norm_position "both" normalizes y, "post" the sum. norm: attribute of the norm."""
        y = y if self.after is None else self.after[norm](y)
        x = x + (F.dropout(y, self.dropout) if self.training and self.dropout else y)
        return x if self.before else getattr(self, norm)(x)
