"""Rotary encodings: RoPE, along several axes, and xPos."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from longitude.errors import Positive, Share, UsageError
from longitude.native.tensors import needs_operator
from longitude.positions.base import Encoding, register
from longitude.positions.coordinates import by_axis, constants, require_positions, wide
from longitude.positions.rotation import Layout, RotaryTable, apply_rotary, by_heads, inverse, rotated, table_of
from longitude.positions.scaling import Frequencies, from_dict, rope_frequencies

AngleDtype = Literal["float64", "float32"]
Arrangement = Literal["contiguous", "interleaved"]


class RotaryOptions(TypedDict, total=False):
    """Keywords of Rotary that its variants pass on."""

    base: Positive
    rotary_dim: int | None
    scaling: Any


@register("rope")
class Rotary(Encoding):
    """RoPE, rotation by the position: pair k at position p is rotated by the angle p theta_k, theta_k = base^(-2k/rotary_dim).

        (x, y) -> (x cos - y sin, x sin + y cos)

    So q_i . k_j depends on i - j alone, and norms do not change. Values are rotated only with rotate_values.

    Args:
        head_dim: width of a head.
        layout: which dimensions are a pair. Required, because checkpoints of both kinds exist: "interleaved" rotates
            (2k, 2k+1), as in the paper, GPT-J and DeepSeek; "half" rotates (k, k + rotary_dim/2), as in GPT-NeoX and Llama.
        base: above 0; 10000 in the paper.
        rotary_dim: only the first rotary_dim dimensions rotate; default: all.
        scaling: a scheme of lg.scaling or its dict, which extends the context. Its attention_factor multiplies cos and sin,
            its softmax_factor is for the model's scale.
        proportion: p-RoPE: only this part of the pairs rotates, the fastest; the others have theta = 0.
        angle_dtype: "float64" computes angles in float64 if the device has it; "float32" repeats the rounding of most
            implementations, bit by bit if there is no scaling.
        learned_frequencies: each pair has theta_k e^alpha_k, after any scaling; alpha, learned by each layer, starts at 0
            (Mistral Large 4). Use it if the training length should decide the frequencies. It stays float32 in 16-bit models.
        rotate_values: values rotate by their positions too, and outputs back by the query's: o_i = R_i^-1 sum_j a_ij R_j v_j
            (DeepSeek V4). Use it if values must tell the query how far away they are.

    Raises:
        ValueError: an odd or too large rotary_dim, an unknown layout, positions that are negative or no integers.

    Source:
        Su et al. 2021, arXiv 2104.09864, https://arxiv.org/abs/2104.09864; p-RoPE: Barbero et al. 2024, arXiv 2410.06205,
        https://arxiv.org/abs/2410.06205
    """

    source = "Su et al. 2021, https://arxiv.org/abs/2104.09864"
    shared = True
    model_defaults = {"layout": "interleaved"}  # one complex product; a new model learns the same in both layouts
    full_precision = ("alpha",)  # positions multiply it: in bfloat16 angles would be wrong by radians
    axis_of_pair: Sequence[int] = ()
    """With several axes: the one that each pair reads."""
    _kept: Any = None

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        base: Positive = 10_000.0,
        rotary_dim: int | None = None,
        scaling: Any = None,
        proportion: Share = 1.0,
        angle_dtype: AngleDtype = "float64",
        learned_frequencies: bool = False,
        rotate_values: bool = False,
    ):
        super().__init__()
        self.rotate_values = rotate_values
        self.head_dim, self.layout, self.base, self.angle_dtype = head_dim, layout, base, angle_dtype
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.scaling, self.proportion = from_dict(scaling), proportion
        self.learned_frequencies, self.alpha = learned_frequencies, None
        frequencies = self.frequencies()  # validates, too
        self.softmax_factor = frequencies.softmax_factor
        if learned_frequencies:
            self.learned, self.shared, self.learns_frequencies = True, False, True
            self.alpha = nn.Parameter(torch.empty(len(frequencies.inverse)))
            self.reset_parameters()
        self.stable_keys = self.relative = self.length_at(0, 0) is None

    @classmethod
    def extended(cls, options: Mapping[str, Any], scheme: Any, original: int, length: int) -> Mapping[str, Any] | None:
        if "scaling" not in options:  # AxialRotary, for images
            return options
        trained = from_dict(options["scaling"])
        longer = scheme if trained is None else trained.then(scheme)
        return None if longer is None else {**options, "scaling": longer.as_dict()}

    def reset_parameters(self) -> None:
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def length_at(self, query: Any, newest: Any) -> Any:
        return None if self.scaling is None else self.scaling.length_at(query, newest)

    def frequencies(self, length: int | None = None, device: torch.device | None = None) -> Frequencies:
        """Theta of each pair, and the two factors."""
        frequencies = self._frequencies_of(self.rotary_dim, length, device)
        if self.alpha is None:
            return frequencies
        return frequencies._replace(inverse=frequencies.inverse * self.alpha.to(frequencies.inverse).exp())

    def _frequencies_of(self, dim: int, length: int | None, device: torch.device | None) -> Frequencies:
        """Frequencies of the rotary pairs of `dim` dimensions."""
        frequencies = rope_frequencies(self.head_dim, self.base, self.scaling, dim, length, self.proportion, device)
        if self.angle_dtype == "float32" and self.scaling is None:  # with the roundings of most ports, on a CPU
            theta = 1.0 / self.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            frequencies = frequencies._replace(inverse=frequencies.inverse.sign() * theta.to(device))  # 0 stays 0
        return frequencies

    def prepare(
        self,
        positions: Tensor,
        length: int | None = None,
        dtype: torch.dtype = torch.float32,
        center: Tensor | None = None,
        move: Callable[[Tensor], Tensor] | None = None,
    ) -> RotaryTable:
        """Cos and sin in float32 or wider, of positions [L] or [B, L], with several axes also [L, axes] or [B, L, axes].

        center: position from which gradients of learned frequencies count, the same for all queries and keys of a call.
        move: maps positions to those of a region (ReRoPE), which may lie between two tokens.
        """
        require_positions(positions, who=type(self).__name__)
        positions = positions if move is None else move(positions)
        theta, factor = self._theta(length, positions.device)
        coordinates = by_axis(positions, self.axes, type(self).__name__)
        angles = self.angles(coordinates, theta)
        if center is not None:  # zeros, whose gradient is that of theta
            offsets = coordinates - by_axis(center, self.axes, type(self).__name__)
            angles = angles.detach() + self.angles(offsets, theta - theta.detach())
        return table_of(angles, dtype, factor)

    def _theta(self, length: int | None, device: torch.device) -> tuple[Tensor, float]:
        """Theta of each pair, and the factor of cos and sin; kept on the CPU if no length changes them, for single tokens."""
        dtype = torch.float32 if self.angle_dtype == "float32" else wide(device)
        fixed = length is None and self.alpha is None and type(self).frequencies is Rotary.frequencies
        if not fixed or device.type != "cpu" or needs_operator():
            theta, factor, _ = self.frequencies(length, device)
            return theta.to(dtype), factor
        options = dtype, self.head_dim, self.base, self.rotary_dim, self.scaling, self.proportion
        # Loading a pickled module may have moved theta to another device.
        if self._kept is None or self._kept[0] != options or self._kept[1][0].device != device:
            with torch.inference_mode(False):  # backward cannot save a tensor made in it
                theta, factor, _ = self.frequencies(None, device)
                self._kept = options, (theta.to(dtype), factor)
        return self._kept[1]

    def angles(self, coordinates: Tensor, theta: Tensor) -> Tensor:
        """Angles [L, pairs] or [B, 1, L, pairs] of coordinates [.., L, 1 or axes], each pair's by its axis."""
        if coordinates.shape[-1] > 1:
            coordinates = coordinates[..., constants(self.axis_of_pair, torch.long, coordinates.device)]
        angles = coordinates * theta  # elementwise: a matrix product may round to TF32
        return angles[:, None] if angles.dim() == 3 else angles

    def queries(self, q: Tensor, prepared: RotaryTable) -> Tensor:
        if q.shape[-1] != self.head_dim:
            raise UsageError(type(self).__name__, f"[B, H, L, {self.head_dim}]", list(q.shape))
        return apply_rotary(q, prepared, self.layout)

    def keys(self, k: Tensor, prepared: RotaryTable) -> Tensor:
        return self.queries(k, prepared)

    def queries_and_keys(self, q: Tensor, k: Tensor, prepared: RotaryTable) -> tuple[Tensor, ...]:
        whole = type(self).queries is Rotary.queries and type(self).keys is Rotary.keys
        if not whole or q.shape[-1] != self.head_dim or k.shape[-1] != self.head_dim:
            return self.queries(q, prepared), self.keys(k, prepared)
        return rotated((q, k), prepared, self.layout)

    def transform_values(self, v: Tensor, prepared: RotaryTable) -> Tensor:
        return self.queries(v, prepared) if self.rotate_values else v

    def restore_outputs(self, out: Tensor, prepared: RotaryTable) -> Tensor:
        return self.queries(out, inverse(prepared)) if self.rotate_values else out

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", scaling={self.scaling!r}" if self.scaling is not None else "")


@register("axial_rope")
class AxialRotary(Rotary):
    """RoPE along each coordinate of a grid: each has an equal part of the pairs, angles = [p_1 phi | p_2 phi | ...].

    phi_k = base^(-2k/d), k = 0 .. d/2 - 1, d = head_dim/axes, so that q_i . k_j depends on the offsets along all axes. Positions
    are [L, axes] or [B, L, axes]; [L] or [B, L] mean the same number on every axis.

    RoPE-Mixed (mixed=True) rotates each pair by both coordinates, with two learned frequencies per pair and key head:

        angle_hk = p_1 u_hk + p_2 v_hk

    They start as the phi above, each head's (u, v) rotated by a random angle. The authors use base = 10. They stay float32 in
    16-bit models. Use it for images if diagonal offsets matter: without it, no pair depends on both coordinates.

    Args:
        head_dim: width of a head, a multiple of 2 axes.
        layout: as of Rotary; pairs count through all axes.
        axes: coordinates per token.
        base: above 0.
        mixed: RoPE-Mixed, of two axes.
        num_kv_heads: key heads; with `mixed`, each has its own frequencies, which its query heads share.

    Raises:
        ValueError: a head_dim that 2 axes do not divide, positions of another number of axes; mixed with another number of
            axes, or without num_kv_heads.

    Source:
        Wang et al. 2024 (the vision tower of Qwen2-VL), arXiv 2409.12191, https://arxiv.org/abs/2409.12191; RoPE-Mixed: Heo et
        al. 2024, arXiv 2403.13298, https://arxiv.org/abs/2403.13298
    """

    source = "Wang et al. 2024, https://arxiv.org/abs/2409.12191"
    full_precision = ("theta",)

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        axes: int = 2,
        base: Positive = 10_000.0,
        mixed: bool = False,
        num_kv_heads: int | None = None,
    ):
        if head_dim % (2 * axes):
            raise UsageError("AxialRotary", f"head_dim to be a multiple of {2 * axes}, 2 per axis", head_dim)
        self.axes = axes
        super().__init__(head_dim, layout, base)
        self.axis_of_pair = [axis for axis in range(axes) for _ in range(head_dim // axes // 2)]
        self.mixed, self.num_kv_heads, self.theta = mixed, num_kv_heads, None
        if mixed:
            if axes != 2 or num_kv_heads is None:
                got = f"num_kv_heads={num_kv_heads}, axes={axes}"
                raise UsageError("AxialRotary", "mixed with num_kv_heads and axes=2", got)
            self.learned, self.shared, self.learns_frequencies = True, False, True
            self.theta = nn.Parameter(torch.empty(axes, num_kv_heads, head_dim // 2))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (theta := getattr(self, "theta", None)) is None:  # not set yet if `Rotary.__init__` calls this
            return
        phi = self._frequencies_of(self.head_dim // self.axes, None, theta.device).inverse.to(theta)
        turn = 2 * math.pi * torch.rand_like(theta[0, :, :1])
        along, across = phi * turn.cos(), phi * turn.sin()
        theta.copy_(torch.stack([torch.cat([along, -across], -1), torch.cat([across, along], -1)]))

    def frequencies(self, length: int | None = None, device: torch.device | None = None) -> Frequencies:
        """Theta of each pair; with `mixed` those of both coordinates and each key head, [2, kv_heads, pairs]."""
        if getattr(self, "theta", None) is not None:
            return Frequencies(self.theta, 1.0)  # type: ignore[arg-type]
        along = self._frequencies_of(self.head_dim // self.axes, length, device)
        return along._replace(inverse=along.inverse.repeat(self.axes))

    def angles(self, coordinates: Tensor, theta: Tensor) -> Tensor:
        """Mixed: angles [.., kv_heads, L, pairs] of both coordinates, by theta [2, kv_heads, pairs]."""
        if not self.mixed:
            return super().angles(coordinates, theta)
        along, across = coordinates[..., None, :, :1], coordinates[..., None, :, -1:]
        return along * theta[0, :, None] + across * theta[1, :, None]

    def queries(self, q: Tensor, prepared: RotaryTable) -> Tensor:
        if self.theta is None:
            return super().queries(q, prepared)
        if q.dim() != 4 or q.shape[1] % self.theta.shape[1]:
            raise UsageError("AxialRotary", f"[B, H, L, {self.head_dim}], H a multiple of num_kv_heads", list(q.shape))
        return super().queries(q, RotaryTable(*by_heads(prepared, q.shape[1])))


@register("mrope")
class MultimodalRotary(Rotary):
    """M-RoPE, RoPE over three coordinates: pair k is rotated by p_axis(k) theta_k.

    theta_k = base^(-2k/rotary_dim); the coordinates are time, height and width. Text has three equal coordinates, [L] or [B, L],
    and is rotated as by rope. `multimodal_positions` computes positions [L, 3] or [B, L, 3] of text with images and videos.
    Causality follows the order of tokens, not their coordinates.

    Args:
        head_dim: width of a head.
        layout: see Rotary.
        base: see Rotary.
        sections: the number of pairs for time, height and width; default: Qwen2-VL's 16:24:24 contiguous, Qwen3-VL's 24:20:20
            interleaved, where time also has the remainder of the division.
        arrangement: "contiguous": the first pairs read time, the next height, the last width, as in Qwen2-VL; "interleaved":
            pairs read time, height, width, time, ... and the slowest ones time alone, as in Qwen3-VL.
        rotary_dim: see Rotary.
        scaling: see Rotary.

    Raises:
        ValueError: sections that are not three, do not sum to the pairs, or cannot interleave; positions of another number of
            axes.

    Source:
        Wang et al. 2024 (Qwen2-VL), arXiv 2409.12191, https://arxiv.org/abs/2409.12191
    """

    source = "Wang et al. 2024, https://arxiv.org/abs/2409.12191"
    axes = 3

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        base: Positive = 10_000.0,
        sections: Sequence[int] | None = None,
        arrangement: Arrangement = "contiguous",
        rotary_dim: int | None = None,
        scaling: Any = None,
    ):
        super().__init__(head_dim, layout, base, rotary_dim, scaling)
        pairs = self.rotary_dim // 2
        if sections is None:
            side = pairs * 3 // 8 if arrangement == "contiguous" else pairs * 5 // 16
            sections = (pairs - 2 * side, side, side)
        three = isinstance(sections, list | tuple) and len(sections) == 3
        if not three or any(type(n) is not int or n < 0 for n in sections) or sum(sections) != pairs:
            expected = f"sections of pairs for time, height and width that sum to rotary_dim/2 = {pairs}"
            raise UsageError("MultimodalRotary", expected, repr(sections))
        self.sections, self.arrangement = tuple(sections), arrangement
        if arrangement == "contiguous":
            self.axis_of_pair = [axis for axis in range(3) for _ in range(sections[axis])]
        else:
            self.axis_of_pair = [k % 3 if k < 3 * sections[k % 3] else 0 for k in range(pairs)]
        counts = tuple(self.axis_of_pair.count(axis) for axis in range(3))
        if counts != self.sections:
            remedy = f"{pairs} interleaved pairs read {counts}: pass these, or arrangement='contiguous'"
            raise UsageError("MultimodalRotary", "sections that interleave", repr(sections), remedy)


class ScaledRotaryTable(NamedTuple):
    """The tables of queries and of keys, each times its magnitude."""

    queries: RotaryTable
    keys: RotaryTable


@register("xpos")
class XPos(Encoding):
    """xPos, RoPE that decays with distance: scores decay by zeta_k^((n - m)/scale_base) for query position n and key position m.

    zeta_k = (2k/head_dim + gamma)/(1 + gamma), so slow pairs decay more slowly. The factor is a query's zeta^((n -
    c)/scale_base) times a key's zeta^((c - m)/scale_base).

    Any center c gives the same products, but factors grow without bound away from it. Each block of query positions therefore
    has its center in its middle, where a query's magnitude is at most 16. Keys are cached untransformed and rotated again for
    each block. Keys after a block, to which no query in it may attend, have the magnitude of its end. Without a length, as in
    rotate_queries, the center is position 0.

    Causal only: for keys after the query, scores would grow with the distance.

    Args:
        head_dim: width of a head.
        layout: as of Rotary.
        base: as of Rotary.
        scale_base: positions over which pair k decays by zeta_k, above 0.
        gamma: above 0.

    Raises:
        ValueError: as Rotary; without a length, positions so far from 0 that the magnitudes overflow the dtype.

    Source:
        Sun et al. 2022, arXiv 2212.10554, https://arxiv.org/abs/2212.10554
    """

    source = "Sun et al. 2022, https://arxiv.org/abs/2212.10554"
    causal_only = True
    shared = True
    stable_keys = False
    model_defaults = Rotary.model_defaults

    def __init__(
        self,
        head_dim: int,
        layout: Layout,
        base: Positive = 10_000.0,
        scale_base: Positive = 512,
        gamma: Positive = 0.4,
    ):
        super().__init__()
        self.rope = Rotary(head_dim, layout, base)
        self.head_dim, self.layout, self.base, self.scale_base, self.gamma = head_dim, layout, base, scale_base, gamma
        self.half_block = max(1, self.distance_to(16))

    def distance_to(self, fall: float) -> int:
        """Positions over which the fastest pair, zeta_0, falls to no less than 1/fall; bounded, as zeta_0 may be nearly 1."""
        return int(min(2**40, math.log(fall) * self.scale_base / math.log1p(1 / self.gamma)))

    def length_at(self, query: Any, newest: Any) -> Any:
        """The end of the query's block."""
        return (query // (2 * self.half_block) + 1) * (2 * self.half_block)

    def prepare(
        self, positions: Tensor, length: int | None = None, dtype: torch.dtype = torch.float32
    ) -> ScaledRotaryTable:
        """Tables of queries and keys, float32 or wider, at positions [L] or [B, L]; length: the end of a block."""
        exact = wide(positions.device)
        table = self.rope.prepare(positions, None, exact)
        distance = positions.reshape(*table.cos.shape[:-1], 1)
        to_query, to_key = distance, distance
        if length is None:
            limit = self.distance_to(math.sqrt(torch.finfo(dtype).max))
            require_positions(positions, limit, who=f"XPos without a length, in {dtype}")
        else:
            distance = distance - (length - self.half_block)
            to_query, to_key = distance.clamp(min=-self.half_block), distance.clamp(max=self.half_block)
        pair = torch.arange(0, self.head_dim, 2, dtype=exact, device=positions.device)
        log_zeta = (pair / self.head_dim + self.gamma).log() - math.log1p(self.gamma)
        dtype = torch.promote_types(dtype, torch.float32)

        def decayed_over(distance: Tensor) -> RotaryTable:
            magnitude = (distance.to(exact) / self.scale_base * log_zeta).exp()
            return RotaryTable((table.cos * magnitude).to(dtype), (table.sin * magnitude).to(dtype))

        return ScaledRotaryTable(decayed_over(to_query), decayed_over(-to_key))

    def queries(self, q: Tensor, prepared: ScaledRotaryTable) -> Tensor:
        return self.rope.queries(q, prepared.queries)

    def keys(self, k: Tensor, prepared: ScaledRotaryTable) -> Tensor:
        return self.rope.queries(k, prepared.keys)
