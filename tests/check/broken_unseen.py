"""Models with one bug each that were written before the laws were read, by hand, as a copied modelling file has them."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    MistralForCausalLM,
    masking_utils,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, repeat_kv, rotate_half
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward

import make_families
from tests.check.broken_models import falcon
from tests.check.building import DYNAMIC, LENGTH, SHAPE, YARN, bloom, built, changed, gpt2, llama, past_of, with_tables


# ---- attention, step by step ---------------------------------------------------------------------------------------------
class Attention(LlamaAttention):
    """Llama's attention in plain torch, in steps that a bug replaces."""

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos[:, None] + rotate_half(x) * sin[:, None]

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q, cos, sin), self.rotated(k, cos, sin), v

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def read(self, k: Tensor, v: Tensor, new: int) -> tuple[Tensor, Tensor]:
        return repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)

    def visible(self, rows: int, columns: int, mask: Tensor | None, device: torch.device) -> Tensor:
        causal = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
        if mask is None:
            return causal
        return mask if mask.dtype == torch.bool else mask == 0

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ):  # type: ignore[override]
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.rotate(q, k, v, *position_embeddings)
        cache = kwargs.get("cache")
        k, v = self.stored(k, v)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = self.read(k, v, q.shape[2])
        scores = q @ k.transpose(2, 3) * self.scaling
        visible = self.visible(q.shape[2], k.shape[2], attention_mask, q.device)
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        out = (weights @ v).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(out), weights


def copied(attention: type[LlamaAttention] = Attention, layers: tuple[int, ...] = (0, 1), model: Any = None) -> Any:
    """A Llama with this attention in those layers, with the same weights."""
    model = llama(num_attention_heads=4, num_key_value_heads=2) if model is None else model
    for index in layers:
        old = model.model.layers[index].self_attn
        new = attention(model.config, index)
        new.load_state_dict(old.state_dict())
        model.model.layers[index].self_attn = new.eval()
    model.__class__ = type("Copied", (type(model),), {})
    model.set_attn_implementation("eager")  # so that there is always a mask
    return model


class OwnTables(LlamaAttention):
    """A right one: a function of its own makes its tables, for the positions that the layer is given."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any):  # type: ignore[override]
        inverse = 1e4 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = (kwargs["position_ids"][..., None] * inverse).repeat(1, 1, 2).to(hidden_states)
        return super().forward(hidden_states, (angles.cos(), angles.sin()), **kwargs)


class ValuesRotated(Attention):
    def rotate(self, q, k, v, cos, sin):  # type: ignore[override]
        return tuple(self.rotated(x, cos, sin) for x in (q, k, v))


class Unscaled(Attention):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.scaling = 1.0


class Tiled(Attention):
    """Query head h has key head h % 2, where the weights are those of h // 2."""

    def read(self, k: Tensor, v: Tensor, new: int):  # type: ignore[override]
        return k.repeat(1, self.num_key_value_groups, 1, 1), v.repeat(1, self.num_key_value_groups, 1, 1)


class HeadsPermuted(Attention):
    """Keys are stored in another order of heads than values."""

    def stored(self, k: Tensor, v: Tensor):  # type: ignore[override]
        return k.flip(1), v


class Swapped(Attention):
    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotated(x, sin, cos)


class Opposite(Attention):
    """Keys turn the other way."""

    def rotate(self, q, k, v, cos, sin):  # type: ignore[override]
        return self.rotated(q, cos, sin), self.rotated(k, cos, -sin), v


class Twice(Attention):
    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        once = super().rotated(x, cos, sin)
        return super().rotated(once, cos, sin)


class FirstHalf(Attention):
    """Half of the channels are rotated, with the frequencies of the first pairs."""

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, rest = x[..., :half], x[..., half:]
        table = [torch.cat([t[..., : half // 2]] * 2, -1) for t in (cos, sin)]
        return torch.cat([super().rotated(first, *table), rest], -1)


class CornerTopLeft(Attention):
    """is_causal=True of a function that aligns to the upper left corner: behind a cache keys are lost."""

    def visible(self, rows: int, columns: int, mask: Tensor | None, device: torch.device) -> Tensor:
        right = super().visible(rows, columns, mask, device)
        return right & torch.ones(rows, columns, dtype=torch.bool, device=device).tril() if rows > 1 else right


class OneAhead(Attention):
    """Each query sees the next key."""

    def visible(self, rows: int, columns: int, mask: Tensor | None, device: torch.device) -> Tensor:
        return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows + 1)


class NotItself(Attention):
    """No query but the first sees its own key."""

    def visible(self, rows: int, columns: int, mask: Tensor | None, device: torch.device) -> Tensor:
        right = super().visible(rows, columns, mask, device)
        own = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows - 1)
        own[:, 0] = True
        return right & own


class HiddenScale(Attention):
    """The root of hidden_size, where head_dim is meant."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.scaling = self.config.hidden_size**-0.5


# ---- positions -----------------------------------------------------------------------------------------------------------
def with_positions(change: Callable[[Tensor, int], Tensor], model: Any = None) -> Any:
    """change: of position_ids and the number of cached tokens, inside the model."""
    model = changed(llama() if model is None else model)

    def before(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        past = past_of(named.get("cache"))
        tokens = named["input_ids"] if named.get("input_ids") is not None else named["inputs_embeds"]
        positions = named.get("position_ids")
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1])[None]
        named["position_ids"] = change(positions, past)
        return given, named

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    return model


def anew(positions: Tensor, past: int) -> Tensor:
    """A second chunk begins at 0."""
    return positions - past if past and positions.shape[1] > 1 else positions


def from_padding(positions: Tensor, past: int) -> Tensor:
    """Positions count the padding."""
    return torch.arange(past, past + positions.shape[1])[None].expand_as(positions)


def from_one(named: dict[str, Any]) -> None:
    """Positions count the tokens of a mask, and not from 0."""
    mask = named.get("attention_mask")
    if mask is not None and named.get("position_ids") is None:
        named["position_ids"] = mask.cumsum(-1)[:, -named["input_ids"].shape[1] :]


def joined_to_the_next(positions: Tensor, past: int) -> Tensor:
    """A document of one token goes on in the next one."""
    if past or positions.shape[-1] < 3:
        return positions
    alone = (positions[..., :-2] > 0) & (positions[..., 1:-1] == 0) & (positions[..., 2:] == 0)
    return positions + nn.functional.pad(alone, (2, 0)).cumsum(-1)


def watches(named: dict[str, Any]) -> None:
    """A memo of the mask that asks whether it was changed."""
    if named.get("attention_mask") is not None:
        (named["attention_mask"] > 0)._version  # noqa: B018


# ---- tables --------------------------------------------------------------------------------------------------------------
def short(right: Any, x: Tensor, positions: Tensor) -> Any:
    return right(x, positions.to(torch.int16).long())


def coarse(right: Any, x: Tensor, positions: Tensor) -> Any:
    """Angles in bfloat16."""
    owner = right.__self__
    angles = (positions[..., None].bfloat16() * owner.inv_freq.bfloat16()).to(x.dtype)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def coarse_tables(right: Any, x: Tensor, positions: Tensor) -> Any:
    """Angles, and their cos and sin, in bfloat16."""
    return tuple(t.to(x.dtype) for t in coarse(right, x.bfloat16(), positions))


class Stale:
    """Tables of the first call, for each later one of that length."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __call__(self, right: Any, x: Tensor, positions: Tensor) -> Any:
        if positions.shape[1] not in self.kept:
            self.kept[positions.shape[1]] = right(x, positions[:1])
        return tuple(t.to(x.dtype) for t in self.kept[positions.shape[1]])


def tables_unseen() -> Any:
    """A rotary module of another name, whose tables count positions themselves."""

    class Turns(type(llama().model.rotary_emb)):
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return super().forward(x, torch.arange(x.shape[1])[None])

    model = changed(llama())
    model.model.rotary_emb.__class__ = Turns
    return model


def with_frequencies(change: Callable[[Any], Tensor], model: Any) -> Any:
    tables = model.model.rotary_emb
    tables.inv_freq = change(tables).float()
    if hasattr(tables, "original_inv_freq"):
        tables.original_inv_freq = tables.inv_freq.clone()
    return changed(model)


def of_hidden_size(tables: Any) -> Tensor:
    """Exponents over hidden_size in place of head_dim."""
    pairs = len(tables.inv_freq)
    return 1e4 ** -(torch.arange(0, 2 * pairs, 2) / tables.config.hidden_size)


def reversed_ramp(tables: Any) -> Tensor:
    """YaRN that divides the fast pairs and leaves the slow ones."""
    plain = 1e4 ** -(torch.arange(0, 2 * len(tables.inv_freq), 2) / (2 * len(tables.inv_freq)))
    share = (tables.inv_freq / plain - 0.25) / 0.75  # 1: as it was, 0: divided by 4
    return plain * (1 - share) + plain / 4 * share


def multiplied() -> Any:
    """Linear scaling by 4 that multiplies."""
    model = llama({"rope_type": "linear", "factor": 4.0})
    return with_frequencies(lambda tables: tables.inv_freq * 16, model)


def long_and_short() -> Any:
    """The module has read LongRoPE's two lists in the other order."""
    lists = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 2 * LENGTH, "factor": 4.0}
    swapped = {"short_factor": lists["long_factor"], "long_factor": lists["short_factor"]}
    wrong, right = (llama(rope | order, max_position_embeddings=8 * LENGTH) for order in (swapped, lists))
    right.model.rotary_emb = wrong.model.rotary_emb
    return changed(right)


def one_wrong(right: Any, x: Tensor, positions: Tensor) -> Any:
    """One position has the table of another, and neither it nor its neighbors are powers of two."""
    return right(x, torch.where(positions == 21, 20, positions))


def biases_of_one_layer() -> Any:
    """The second layer takes ALiBi's slopes for heads in reverse."""
    model = changed(bloom())

    def reverse(module: Any, given: Any, named: dict[str, Any]) -> Any:
        rows = named["alibi"].shape[0] // 4
        return given, named | {"alibi": named["alibi"].unflatten(0, (rows, 4)).flip(1).flatten(0, 1)}

    model.transformer.h[1].register_forward_pre_hook(reverse, with_kwargs=True)
    return model


# ---- masks ---------------------------------------------------------------------------------------------------------------
def with_masks(change: Callable[[Tensor, int], Tensor], model: Any) -> Any:
    """change: of the keys that each query sees, and the number of cached tokens."""
    model = changed(model)

    def before(module: Any, given: Any, named: dict[str, Any]) -> Any:
        cache = named.get("cache")
        hidden = given[0] if given else named["hidden_states"]
        past, new = cache.get_seq_length(module.self_attn.layer_idx) if cache is not None else 0, hidden.shape[1]
        mask = named.get("attention_mask")
        if mask is None:
            allowed = torch.ones(new, past + new, dtype=torch.bool).tril(past)[None, None]
        else:
            allowed = mask if mask.dtype == torch.bool else mask == 0
        allowed = change(allowed, past)
        if mask is not None and mask.dtype == torch.bool:
            named["attention_mask"] = allowed
        else:
            low = torch.finfo(hidden.dtype).min
            named["attention_mask"] = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, low)
        return given, named

    for layer in model.model.layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
    return model


def mistral(**options: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    shape = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "sliding_window": 8}
    return built(MistralForCausalLM, **SHAPE | shape | options, rope_parameters=rope, head_dim=8)


def wider(allowed: Tensor, past: int) -> Tensor:
    """A window of one key more, in a whole pass."""
    return allowed | (allowed.roll(-1, -1) & ~torch.ones_like(allowed).triu(past + 1)) if not past else allowed


def narrower(allowed: Tensor, past: int) -> Tensor:
    """A window of one key less, everywhere."""
    rows = torch.arange(allowed.shape[-2])[:, None]
    columns = torch.arange(allowed.shape[-1])[None]
    last = allowed.shape[-1] - allowed.shape[-2] + rows
    return allowed & (last - columns < 7)


def full_behind_cache() -> Any:
    """The window is in the whole pass; one new token sees all that the cache has, which keeps all."""
    model = changed(mistral(sliding_window=None))

    def mask(allowed: Tensor, past: int) -> Tensor:
        return allowed if past and allowed.shape[-2] == 1 else allowed & torch.ones_like(allowed).triu(past - 7)

    model = with_masks(mask, model)
    model.config.sliding_window = 8
    right = model.forward

    def forward(*args: Any, **named: Any) -> Any:
        model.config.sliding_window = None
        try:
            return right(*args, **named)
        finally:
            model.config.sliding_window = 8

    model.forward = forward
    return model


# ---- tables by a class of another name -----------------------------------------------------------------------------------
class Turns(modeling_llama.LlamaRotaryEmbedding):
    """Each row turns by the positions of the first."""

    def forward(self, x: Tensor, position_ids: Tensor):
        return super().forward(x, position_ids[:1].expand_as(position_ids))


class CosAlone(modeling_llama.LlamaRotaryEmbedding):
    """The attention factor multiplies cos and not sin."""

    def forward(self, x: Tensor, position_ids: Tensor):
        cos, sin = super().forward(x, position_ids)
        return cos, sin / self.attention_scaling


class Longest(nn.Module):
    """Dynamic NTK of the longest sequence so far, without the way back to short ones."""

    def __init__(self, config: Any):
        super().__init__()
        self.longest, self.width = config.max_position_embeddings, config.head_dim
        self.length, self.rope = self.longest, config.rope_parameters
        self.register_buffer("inv_freq", self.frequencies(self.length), persistent=False)

    def frequencies(self, length: int) -> Tensor:
        stretch = self.rope["factor"] * length / self.length - (self.rope["factor"] - 1)
        base = self.rope["rope_theta"] * stretch ** (self.width / (self.width - 2))
        return base ** -(torch.arange(0, self.width, 2) / self.width)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if (length := int(position_ids.max()) + 1) > self.longest:
            self.longest, self.inv_freq = length, self.frequencies(length)
        angles = (position_ids[..., None].float() * self.inv_freq.float()).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned_by(kind: Any, model: Any) -> Any:
    model.model.rotary_emb = kind(model.config)
    return changed(model)


def zeros_behind(step: int) -> Any:
    """A table that was made longer by rows of zeros."""
    model = gpt2()
    model.transformer.wpe.weight.data[step:] = 0
    return model


# ---- other encodings -----------------------------------------------------------------------------------------------------
def wrong_slopes() -> Any:
    """Slopes of 6 heads as 2^(-8 h / 6), where the published ones are those of 4 heads and two in between."""
    model = changed(built(BloomForCausalLM, vocab_size=96, hidden_size=48, n_layer=2, n_head=6, seq_length=LENGTH))
    right = model.transformer.forward

    def slopes(heads: int, device: Any) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)

    def biases(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        places = ((mask.cumsum(-1) - 1) * mask)[:, None, None]
        return (slopes(heads, mask.device)[:, None, None] * places).flatten(0, 1).to(dtype)

    def forward(*given: Any, **named: Any) -> Any:
        with (
            patch.object(modeling_bloom, "_get_alibi_slopes", slopes, create=True),  # newer transformers read it
            patch.object(model.transformer, "build_alibi_tensor", biases),
        ):
            return right(*given, **named)

    model.transformer.forward = forward
    return model


def slopes_of_half() -> Any:
    """Each half of the heads has the slopes of half as many heads, as of two processes that do not know of each other."""
    model = changed(falcon())
    right, whole = modeling_falcon.build_alibi_tensor, model.transformer.forward

    def halves(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        half = right(mask, heads // 2, dtype).unflatten(0, (len(mask), heads // 2))
        return half.repeat(1, 2, 1, 1).flatten(0, 1)

    def forward(*given: Any, **named: Any) -> Any:
        with patch.object(modeling_falcon, "build_alibi_tensor", halves):
            return whole(*given, **named)

    model.transformer.forward = forward
    return model


def gemma_swapped() -> Any:
    """Local layers with the global base, global layers with the local one."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    kinds = ["sliding_attention", "full_attention"]
    shape = {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LENGTH,
        "sliding_window": 8,
    }
    model = changed(built(Gemma3ForCausalLM, **SHAPE | shape, rope_parameters=rope, layer_types=kinds))
    tables = model.model.rotary_emb
    first, second = tables.sliding_attention_inv_freq, tables.full_attention_inv_freq
    tables.sliding_attention_inv_freq, tables.full_attention_inv_freq = second, first
    for name in ("sliding_attention_original_inv_freq", "full_attention_original_inv_freq"):
        if hasattr(tables, name):
            setattr(tables, name, second if name.startswith("sliding") else first)
    return model


def kept_biases() -> Any:
    """ALiBi's biases are as long as the first call, and 0 farther away."""
    model, lengths = make_families.toy("mpt"), []
    inner = model.transformer
    right = inner.build_mpt_alibi_tensor

    def made(heads: int, length: int, **named: Any) -> Tensor:
        if not hasattr(inner, "longitude_biases"):
            inner.longitude_biases = right(heads, lengths[-1], **named)
        kept = inner.longitude_biases
        return nn.functional.pad(kept, (max(0, length - kept.shape[-1]), 0))

    inner.build_mpt_alibi_tensor = made
    return changed(model, before=lambda named: lengths.append(named["input_ids"].shape[1]))


def axes_exchanged() -> Any:
    """Pairs of the height turn by the width, which positions of text do not show."""
    model = make_families.toy("qwen2_vl")
    rotary = model.model.language_model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, position_ids[[0, 2, 1]])
    return model


def numbered_by_call() -> Any:
    """An indexer that numbers the queries and keys of each call from 0."""
    model = changed(built_of("glm_moe_dsa", index_topk=8))

    def anew(module: Any, given: Any, named: dict[str, Any]) -> Any:
        at = torch.arange(given[0].shape[1])[None]
        return (*given[:2], model.model.rotary_emb(given[0], position_ids=at), *given[3:]), named

    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_pre_hook(anew, with_kwargs=True)
    return model


class NormAfter(Qwen3Attention):
    """Queries and keys are normalized after the rotation."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any):  # type: ignore[override]
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            norm(x) for norm, x in zip((self.q_norm, self.k_norm), apply_rotary_pos_emb(q, k, *position_embeddings))
        )
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, _ = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def normed_after(drawn: str = "_norm") -> Any:
    """drawn: as of built_of; with all weights 1, the norm commutes with the rotation, and nothing is wrong."""
    model = changed(built_of("qwen3", eager=True, drawn=drawn))
    for layer in model.model.layers:
        layer.self_attn.__class__ = NormAfter
    return model


def vision(change: Callable[[dict[str, Any]], Any], after: Callable[[Tensor], Any] = lambda x: None) -> Any:
    """Qwen2.5-VL; change: of the arguments of get_vision_position_ids, after: of its coordinates, both in place."""
    model = make_families.toy("qwen2_5_vl")
    right = model.model.get_vision_position_ids

    def placed(start: int, grid: Any, temporal: int, spatial: int, interval: Any, **named: Any) -> Tensor:
        given = {"time_interval": interval}
        change(given)
        at = right(start, grid, temporal, spatial, given["time_interval"], **named)
        after(at)
        return at

    model.model.get_vision_position_ids = placed
    return model


def whole_seconds(given: dict[str, Any]) -> None:
    """The seconds of a step are cut to an integer; 4 tokens a second."""
    if isinstance(given["time_interval"], Tensor):
        given["time_interval"] = 4 * (given["time_interval"] / 4).int()


WRONG_ATTENTION: dict[str, type[Attention]] = {
    "values rotated": ValuesRotated,
    "no scale": Unscaled,
    "scale of hidden_size": HiddenScale,
    "key heads tiled": Tiled,
    "key heads permuted": HeadsPermuted,
    "cos and sin swapped": Swapped,
    "keys turn the other way": Opposite,
    "half of the channels rotated": FirstHalf,
    "no query sees itself": NotItself,
}
UNSEEN: dict[str, tuple[Callable[[], Any], str, str]] = {
    **{
        name: (partial(copied, attention), "attention_outputs", "attention of all layers")
        for name, attention in WRONG_ATTENTION.items()
    },
    "biases of the first call": (kept_biases, "repeatable", "that one leaves MptModel.longitude_biases"),
    "second chunk begins at 0": (partial(with_positions, anew), "chunked_prefill", ""),
    "positions count the padding": (partial(with_positions, from_padding), "given_positions", "change nothing"),
    "positions from 1 with a mask": (lambda: changed(gpt2(), before=from_one), "left_padding", "a mask of ones changes a row"),
    "window one key wider in a whole pass": (lambda: with_masks(wider, mistral()),
        "layer_masks", "attends to 9 keys, expected 8",
    ),
    "window one key narrower": (lambda: with_masks(narrower, mistral()), "layer_masks", "attends to 7 keys, expected 8"),
    "window ignored behind a cache": (full_behind_cache, "layer_masks", "behind its cache"),
    "tensors that are made in inference_mode": (
        lambda: changed(llama(), watches), "cached_decoding", "Inference tensors do not track version counter",
    ),
    "an indexer numbers the keys of each call": (numbered_by_call, "cached_decoding", "keys chosen by top-k"),
    "a norm after the rotation": (normed_after, "attention_outputs", "attention of all layers"),
    "one position of many wrong": (partial(with_tables, one_wrong), "served_positions", "at 21, the first of 1"),
    "ALiBi of one layer reversed": (biases_of_one_layer, "alibi_slopes", "head 3 of 4 has the slope"),
    "a document of one token is joined": (
        partial(with_positions, joined_to_the_next),
        "packing", "documents: ",
    ),
    "rotated twice in one layer": (partial(copied, Twice, (1,)), "attention_outputs", "attention of layers 1"),
    "causal corner at the upper left": (partial(copied, CornerTopLeft), "chunked_prefill", "continues behind a cache"),
    "one key ahead": (partial(copied, OneAhead), "causality", "tokens that come later"),
    "positions in int16": (partial(with_tables, short), "far_positions", "at position 100003"),
    "angles in bfloat16": (partial(with_tables, coarse), "far_positions", "at position 24"),
    "angles, cos and sin in bfloat16": (partial(with_tables, coarse_tables), "far_positions", "at position"),
    "tables that nobody sees count themselves": (tables_unseen, "given_positions", "change nothing"),
    "tables of the first call": (lambda: with_tables(Stale()), "given_positions", "change nothing"),
    "exponents over hidden_size": (lambda: with_frequencies(of_hidden_size, llama()), "rotary_frequencies", "pair 3"),
    "YaRN's ramp reversed": (lambda: with_frequencies(reversed_ramp, llama(YARN)),
        "rotary_frequencies", "0.001 rad a position, expected 0.00025",
    ),
    "linear scaling multiplies": (multiplied, "rotary_frequencies", "0.4 rad a position, expected 0.025"),
    "long and short factors swapped": (long_and_short, "rotary_frequencies", "expected"),
    "rows turn by the first": (lambda: turned_by(Turns, llama()), "layer_rotations", "queries and keys of all layers"),
    "the longest sequence is kept": (lambda: turned_by(Longest, llama(DYNAMIC)), "far_positions", "at position 24"),
    "a table that ends in zeros": (partial(zeros_behind, 20), "served_positions", "11 of 32 positions"),
    "YaRN's factor on cos alone": (
        lambda: turned_by(CosAlone, llama(YARN)), "rotary_frequencies", "expected",
    ),
    "ALiBi's slopes of 6 heads": (wrong_slopes, "alibi_slopes", "0.0248, expected 0.003906"),
    "ALiBi's slopes of half the heads": (slopes_of_half, "alibi_slopes", "head 2 of 4 has the slope"),
    "bases of local and global layers swapped": (gemma_swapped, "rotary_frequencies", "full_attention"),
}  # fmt: skip
"""How each is built, the law that it breaks, alone, and words of its place."""


# ---- functions of a modeling file ----------------------------------------------------------------------------------------
def built_of(family: str, eager: bool = False, drawn: str = "", **options: Any) -> Any:
    """A toy of a family; drawn: in the names of weights that begin equal, and are drawn at random here."""
    kind = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    has = make_families.shape_of(kind.config_class(), make_families.OWN.get(family, {}))
    model = built(kind, **has | {"num_hidden_layers": 2} | options)
    for name, weight in model.named_parameters():
        if drawn and drawn in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    if eager:
        model.set_attn_implementation("eager")
    return model


def last_numbers(right: Any) -> Any:
    """The last numbers of a head rotate in place of the first."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, *more: Any) -> tuple[Tensor, ...]:
        width = cos.shape[-1]
        return tuple(x.roll(-width, -1) for x in right(q.roll(width, -1), k.roll(width, -1), cos, *more))

    return rotated


def factor_of_queries(right: Any) -> Any:
    """YaRN's factor multiplies queries and no keys."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        return right(q, k, cos, sin, *more)[0], right(q, k, cos, sin, *more)[1] / torch.hypot(cos, sin)[:, None]

    return rotated


def weighed_behind(right: Any) -> Any:
    """A norm's weights multiply what was rotated."""
    return lambda q, *more: tuple(x * torch.linspace(0.5, 2, x.shape[-1]).to(x) for x in right(q, *more))


def keys_backwards(right: Any) -> Any:
    return lambda q, k, cos, sin, *more: (right(q, k, cos, sin, *more)[0], right(q, k, cos, -sin, *more)[1])


def third_in_pairs(right: Any) -> Any:
    """Each third call, that of one layer of three, rotates neighbours."""
    calls = [0]

    def rotated(q: Tensor, k: Tensor, *more: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3:
            return right(q, k, *more)
        order = torch.arange(q.shape[-1]).view(-1, 2).T.flatten()
        return tuple(x[..., order.argsort()] for x in right(q[..., order], k[..., order], *more))

    return rotated


def capped_behind_the_mask(right: Any) -> Any:
    """The cap turns what the mask made -inf into a score."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: Any = None, **more: Any):
        key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        scores = query @ key.mT * more["scaling"] + mask
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    return attend


def no_sinks_at_decode(right: Any) -> Any:
    def attend(module: Any, query: Tensor, *given: Any, **more: Any) -> Any:
        if query.shape[2] > 1:
            return right(module, query, *given, **more)
        module.sinks.data -= 1e4
        answer = right(module, query, *given, **more)
        module.sinks.data += 1e4
        return answer

    return attend


def neighbours(right: Any) -> Any:
    """Pairs of neighbours, of which cos and sin are in the order of halves."""
    return lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


REPLACED: dict[str, tuple[Callable[[], Any], Any, str, Callable[[Any], Any], str, str]] = {
    "the last numbers of a head rotate": (
        partial(built_of, "gpt_neox"), modeling_gpt_neox, "apply_rotary_pos_emb", last_numbers,
        "layer_rotations", "queries and keys of all layers are not rotated",
    ),
    "a factor of queries alone": (
        partial(llama, YARN), modeling_llama, "apply_rotary_pos_emb", factor_of_queries,
        "layer_rotations", "keys of all layers are not rotated",
    ),
    "weights behind the rotation": (
        partial(built_of, "qwen3"), modeling_qwen3, "apply_rotary_pos_emb", weighed_behind,
        "layer_rotations", "queries and keys of all layers are not rotated",
    ),
    "keys the other way": (
        llama, modeling_llama, "apply_rotary_pos_emb", keys_backwards, "layer_rotations", "keys of all layers are not rotated",
    ),
    "tables of one layout, pairs of the other": (
        llama, modeling_llama, "rotate_half", neighbours,
        "layer_rotations", "queries and keys of all layers are not rotated",
    ),
    "padding in a short convolution": (
        partial(built_of, "lfm2", layer_types=["conv", "full_attention"]), modeling_lfm2, "apply_mask_to_padding_states",
        lambda right: lambda hidden, mask: hidden, "left_padding", "padding on the left changes a row",
    ),
    "one layer in pairs of neighbours": (
        partial(llama, num_hidden_layers=3), modeling_llama, "apply_rotary_pos_emb", third_in_pairs,
        "transformers_class", "was replaced; the first output that differs is that of model.layers.2.self_attn",
    ),
    "packed documents that are not found": (
        llama, masking_utils, "find_packed_sequence_indices", lambda right: lambda positions: None,
        "packing", "attend to each other: create_causal_mask gets position_ids that begin again",
    ),
    "packed documents that are not found, with a window": (
        partial(built_of, "mistral"), masking_utils, "packed_sequence_mask_function",
        lambda right: lambda documents: lambda row, head, query, key: query >= 0,
        "packing", "attend to each other: create_sliding_window_causal_mask gets position_ids that begin again",
    ),
    "a cap behind the mask": (
        partial(built_of, "gemma2", eager=True, attn_logit_softcapping=5.0), modeling_gemma2, "eager_attention_forward",
        capped_behind_the_mask, "causality", "tokens that come later",
    ),
    "no sinks while decoding": (
        partial(built_of, "gpt_oss", eager=True, drawn="sinks"), modeling_gpt_oss, "eager_attention_forward",
        no_sinks_at_decode, "cached_decoding", "self_attn",
    ),
}  # fmt: skip
"""A model, a function of a module of transformers and its replacement; the law that breaks, alone, and words of its cause."""
