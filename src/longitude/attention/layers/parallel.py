"""Two mixers side by side in a layer: attention and a recurrent state read the same tokens, and their outputs are added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from longitude.attention.heads import head_sizes
from longitude.attention.layers.base import AttentionLayer, normed, require_past
from longitude.attention.mixer import MIXERS, Mixer, MixerInputs, mixer_resolved, register_mixer, require_cache
from longitude.attention.state_mixer import StateMixer
from longitude.errors import UsageError
from longitude.positions.base import Encoding

STATE = "state"
"""Name among the tails of the attention's cache under which the other mixer's state is kept."""


@register_mixer("parallel")
class ParallelMixer(Mixer):
    """Parallel heads: attention and a recurrent mixer on the same tokens, whose outputs are added or averaged.

        y = (norm(attention(x)) + norm(state(x))) / 2,    without normalize:  y = attention(x) + state(x)

    Use it if every layer should both look up distant tokens and keep a summary.

    Averaged after learned RMSNorms as in Hymba, or added as in Falcon-H1. Hymba normalizes before an output projection that
    both share; here each mixer has its own. Its cache is the attention's, with the state of the other beside the keys.

    Args:
        dim: Width of x.
        num_heads, num_kv_heads, head_dim: As in MultiHeadAttention, for both mixers as far as they have them.
        attention: A mixer with keys and values: a name, or {"name": name, **options}. It takes the encodings.
        state: A recurrent mixer that takes no rotation: a name, or {"name": name, **options}.
        normalize: Whether outputs are normalized and averaged, instead of added.

    Raises:
        ValueError: For mixers of other kinds, and for options and calls that the two mixers do not support.

    Source:
        Dong et al. 2024 (Hymba), arXiv:2411.13676, https://arxiv.org/abs/2411.13676; Zuo et al. 2025 (Falcon-H1),
        arXiv:2507.22448, https://arxiv.org/abs/2507.22448
    """

    source = "Dong et al. 2024, https://arxiv.org/abs/2411.13676; Zuo et al. 2025, https://arxiv.org/abs/2507.22448"
    scores = rotates = widens = rotates_values = has_weights = True
    carries = True
    parts = ("attention", "state")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        attention: str | Mapping[str, Any] = "attention",
        state: str | Mapping[str, Any] = "mamba2",
        normalize: bool = True,
        head_dim: int | None = None,
    ):
        super().__init__()
        num_kv_heads, head_dim = head_sizes("ParallelMixer", dim, num_heads, num_kv_heads, head_dim)
        sizes = {"dim": dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self.attention: Any = _built("attention", attention, sizes)
        self.state = _built("state", state, sizes)
        self.attention_norm, self.state_norm = (nn.RMSNorm(dim, eps=1e-6) if normalize else None for _ in range(2))
        for name in ("scores", "rotates", "widens", "rotates_values", "has_weights", "growth", "choosing"):
            setattr(self, name, getattr(self.attention, name))
        self.full_precision = self.state.full_precision
        self.undecayed = tuple(f"{part}.{name}" for part in self.parts for name in getattr(self, part).undecayed)

    @classmethod
    def encoding_shapes(cls, options: Mapping[str, Any]) -> dict[str, int]:
        name, part_options = _named("attention", options.get("attention", "attention"))
        return MIXERS[name].encoding_shapes({**options, **part_options})

    @property
    def far_from(self) -> int | None:
        return self.attention.far_from

    def products(self, keys: float) -> float:
        return self.attention.products(keys) + self.state.products(keys)

    def refuses(self, encoding: Encoding) -> str | None:
        return self.attention.refuses(encoding)

    def cache_layer(self) -> Any:
        return self.attention.cache_layer()

    def mix_tokens(self, x: Float[Tensor, "B L dim"], inputs: MixerInputs) -> Any:
        """Mix tokens by both. The attention's cache stores the other's state, as it stores tails of short convolutions."""
        cache, layer = inputs.cache, None
        require_past("ParallelMixer", inputs.mask)
        if cache is not None:
            require_cache(self, cache, self.attention.cache_kinds)
            layer, past = self.state.cache_layer(), cache.get_seq_length()
            layer.seen, layer.newest, layer.state = past, cache.next_positions() - 1, cache.tails.get(STATE)
            if past and layer.state is None:
                raise UsageError("cache", "one that a parallel layer filled", "another")
        mixed = self.attention(x, inputs)
        mixed, weights = mixed if inputs.return_weights else (mixed, None)
        # Encodings act on attention alone; a recurrent mixer has none.
        state_inputs = MixerInputs(inputs.mask, inputs.positions, inputs.documents, layer, step=inputs.step)
        of_state = self.state(x, state_inputs)
        if cache is not None and layer is not None:
            cache.tails = {**cache.tails, STATE: layer.state}
        if self.attention_norm is not None and self.state_norm is not None:
            mixed, of_state = normed(self.attention_norm, mixed) / 2, normed(self.state_norm, of_state) / 2
        out = mixed + of_state
        return (out, weights) if inputs.return_weights else out


def _named(part: str, spec: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of a part. ValueError unless its mixer is of the part's kind."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name, able = options.pop("name", None), [mixer_name for mixer_name, kind in MIXERS.items() if _fits(part, kind)]
    if name not in able:
        raise UsageError(f"parallel: {part}", f"one of {', '.join(able)}", repr(spec))
    return name, options


def _fits(part: str, kind: type[Mixer]) -> bool:
    if part == "state":
        return issubclass(kind, StateMixer) and not kind.rotates and not kind.scores
    return (issubclass(kind, AttentionLayer) or kind.rotates) and not issubclass(kind, StateMixer) and not kind.parts


def _built(part: str, spec: Any, sizes: Mapping[str, int]) -> Mixer:
    name, options = _named(part, spec)
    return MIXERS[name](**mixer_resolved(name, options, **sizes))
