"""RoPE frequencies, and RoPE scaling: schemes that lower them to extend a trained context.

Notation of the papers: theta_k are the frequencies of unscaled RoPE, L is the training length (original_max_length), and s the
factor by which it grows. d is the number of dimensions that rotate (rotary_dim). r_k = L theta_k / 2 pi is the number of
rotations of pair k within L.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longitude.errors import Positive, Share, UsageError, check_declared
from longitude.positions.scaling.base import SCHEMES, Frequencies, Scaling, register_scheme
from longitude.positions.scaling.linear import BaseChange, Clipped, Linear
from longitude.positions.scaling.longrope import LongRoPE
from longitude.positions.scaling.ntk import NTK, DynamicNTK
from longitude.positions.scaling.parts import Llama3, NTKByParts, Resonance, YaRN
from longitude.registry import resolve_options

UNSCALED = Scaling()
"""Made once: constructors check their arguments, which a compiled graph cannot."""


def rope_frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: Scaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    length: int | Tensor | None = None,
    proportion: Share = 1.0,
    device: torch.device | None = None,
) -> Frequencies:
    """Frequencies theta_k = base^(-2k/rotary_dim), k = 0 .. rotary_dim/2 - 1, as `scaling` changes them.

    Args:
        head_dim: width of a head.
        base: 10000 in the paper.
        scaling: a scheme of lg.scaling or its dict.
        rotary_dim: the first dimensions of a head, which alone rotate; default: all.
        length: tokens, for a scheme that follows a length; None: its declared length, else the original one.
        proportion: p-RoPE: only the int(p rotary_dim) // 2 fastest pairs rotate; the others have frequency 0.
        device: device of the frequencies.

    Returns:
        Frequencies: `inverse` [rotary_dim/2] in radians per position, `attention_factor`, `softmax_factor`.

    Raises:
        ValueError: an odd or too large rotary_dim, a base that is not above 0, a proportion outside 0 to 1.

    Source:
        Su et al. 2021, arXiv 2104.09864, https://arxiv.org/abs/2104.09864; p-RoPE: Barbero et al. 2024, arXiv 2410.06205,
        https://arxiv.org/abs/2410.06205
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    options = {"head_dim": head_dim, "rotary_dim": rotary_dim, "base": base, "proportion": proportion}
    check_declared("rope", {"head_dim": int, "rotary_dim": int, "base": Positive, "proportion": Share}, options)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UsageError("rope", f"an even rotary_dim of at most head_dim={head_dim}", rotary_dim)
    scheme = from_dict(scaling) or UNSCALED
    inverse = scheme.frequencies(rotary_dim, base, length, device)
    rotating = int(proportion * rotary_dim) // 2
    inverse = torch.where(torch.arange(rotary_dim // 2, device=device) < rotating, inverse, 0.0)
    return Frequencies(inverse, *scheme.factors())


def from_dict(spec: Scaling | Mapping[str, Any] | None) -> Scaling | None:
    """Build a scheme from its name and options, as in config.json.

    Args:
        spec: {"name": "yarn", "factor": 4.0, ...}, a scheme or None.

    Returns:
        The scheme, or None for None.

    Raises:
        ValueError: an unknown name or option, or a missing one.
    """
    if spec is None or isinstance(spec, Scaling):
        return spec
    if not isinstance(spec, Mapping) or "name" not in spec:
        remedy = "a Hugging Face config is read by from_hugging_face"
        raise UsageError("scaling", "a scheme, {'name': ..., its options} or None", repr(spec), remedy)
    name, options = spec["name"], {option: value for option, value in spec.items() if option != "name"}
    kind = SCHEMES[name]
    return kind(**resolve_options(name, kind, options, {}, "scaling"))


__all__ = [
    "NTK",
    "BaseChange",
    "Clipped",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "NTKByParts",
    "Resonance",
    "Scaling",
    "YaRN",
    "register_scheme",
]
