"""`--convert-layout`: the weights that make queries and keys, from one rotary layout to the other, and the proof that the model
stays the same under the rotation of its new layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longitude.checkpoints.config import head_dim_of
from longitude.checkpoints.load import load, shapes_of
from longitude.checkpoints.positions import rotary_of
from longitude.checkpoints.quiet import quiet
from longitude.checkpoints.source import Source
from longitude.extend.weights import Change
from longitude.positions.layouts import convert_layout
from longitude.positions.rotation import RotaryTable, apply_rotary

SEPARATE = ("q_proj", "k_proj")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
FUSED_BY_HEAD, FUSED_BY_KIND = "query_key_value", "qkv_proj"
CLOSE = 1e-4
"""Of the logits' spread: float32 sums in another order stay below."""
TOKENS = 64


@dataclass(frozen=True)
class Parity:
    """error: the greatest difference of logits, between the weights as they were under the other rotation and the converted
    ones under their own; apart: what the wrong rotation makes of the weights as they were. Both in spreads of the logits.
    native: the layout that transformers turns this model by.
    """

    error: float
    apart: float
    native: str


def layout_changes(source: Source, to: str) -> dict[str, Change]:
    """Tensor name -> its conversion. ValueError for a model whose queries and keys we cannot tell in its weights."""
    module = rotary_of(source.skeleton)
    if module is None:
        raise ValueError(f"--convert-layout: {source.name} has no rotary parameters, and no layout")
    if source.pickled:
        raise ValueError(
            "--convert-layout: expected weights in safetensors, got a pickle; convert it without this option first"
        )
    if getattr(source.config, "quantization_config", None) is not None:
        raise ValueError(f"--convert-layout: the weights of {source.name} are quantized; convert the original weights")
    widths = {2 * len(x) for name, x in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    if len(widths) != 1:
        raise ValueError(f"--convert-layout: expected heads of one size, got rotary dimensions {sorted(widths)}")
    config = source.config
    head_dim = head_dim_of(config)
    convert = partial(convert_layout, head_dim=head_dim, to=to, rotary_dim=widths.pop())
    names = [name for shard in source.shards for name in shapes_of(shard)]
    parts = {name: name.split(".") for name in names}
    changes: dict[str, Change] = {name: convert for name in names if parts[name][-2:-1] and parts[name][-2] in SEPARATE}
    latent = any("kv_a_proj" in name for name in names)
    if changes and not latent:
        return changes | {name: convert for name in names if set(parts[name]) & {*NORMS}}
    if not latent and config.model_type.startswith("gpt_neox"):
        by_head = partial(_by_head, head_dim=head_dim, convert=convert)
        changes = {name: by_head for name in names if parts[name][-2:-1] == [FUSED_BY_HEAD]}
    elif not latent:
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        rows = head_dim * (config.num_attention_heads + key_heads)
        changes = {
            name: partial(_by_kind, rows=rows, convert=convert)
            for name in names
            if parts[name][-2:-1] == [FUSED_BY_KIND]
        }
    if not changes:
        raise ValueError(
            f"--convert-layout: expected weights named {', '.join(SEPARATE)}, {FUSED_BY_KIND} or GPT-NeoX's "
            f"{FUSED_BY_HEAD}, got none in {source.name} ({config.model_type})"
        )
    return changes


def _by_head(weight: Tensor, head_dim: int, convert: Change) -> Tensor:
    """[heads * 3 * head_dim, ...], queries, keys and values of a head after each other."""
    heads = weight.unflatten(0, (-1, 3, head_dim))
    turning = convert(heads[:, :2].flatten(0, 2)).unflatten(0, (-1, 2, head_dim))
    return torch.cat([turning, heads[:, 2:]], 1).flatten(0, 2)


def _by_kind(weight: Tensor, rows: int, convert: Change) -> Tensor:
    """[all queries, all keys, all values]; rows: of queries and keys."""
    return torch.cat([convert(weight[:rows]), weight[rows:]])


# ---- parity ----------------------------------------------------------------------------------------------------------
def parity(source: Source, changes: Mapping[str, Change], to: str) -> Parity:
    """Both models on the same random tokens, in float32. ValueError unless their logits agree."""
    model = load(source.folder, dtype="float32", tokenizer=False).model
    other = "interleaved" if to == "half" else "half"
    length = min(TOKENS, source.declared or TOKENS)
    ids = torch.randint(0, source.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))

    def logits(layout: str | None) -> Tensor:
        with torch.inference_mode(), quiet():
            if layout is None:
                return model(input_ids=ids, use_cache=False).logits
            with rotating(model, layout):
                return model(input_ids=ids, use_cache=False).logits

    plain, before, wrong = logits(None), logits(other), logits(to)
    spread = float(before.std())

    def far(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max()) / spread

    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    with torch.no_grad():
        for name, change in changes.items():
            tensor = state.get(name, state.get(prefix + name))
            if tensor is None:
                raise ValueError(f"--convert-layout: the model has no tensor {name}; it cannot be checked")
            tensor.copy_(change(tensor.clone()))
    error = far(logits(to), before)
    found = Parity(error, far(wrong, before), to if far(plain, wrong) < far(plain, before) else other)
    if min(far(plain, wrong), far(plain, before)) > CLOSE:
        raise ValueError(f"--convert-layout: {source.name} turns neither half nor interleaved; nothing was converted")
    if not error <= CLOSE:
        raise ValueError(
            f"--convert-layout: the converted weights give other logits, {error:.1e} of their spread apart; nothing was written"
        )
    return found


@contextmanager
def rotating(model: nn.Module, layout: str) -> Iterator[None]:
    """Within: the model turns by its own angles in this layout. ValueError where its rotation cannot be reached."""
    rooms = [room for room in _rooms(model) if hasattr(room, "apply_rotary_pos_emb")]
    if not rooms:
        raise ValueError(
            f"--convert-layout: the rotation of {type(model).__name__} cannot be replaced, so nothing can be checked"
        )
    calls = 0

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        width = cos.shape[-1]
        own = (
            slice(None, width // 2)
            if torch.equal(cos[..., : width // 2], cos[..., width // 2 :])
            else slice(None, None, 2)
        )
        turn = RotaryTable(cos[..., own].unsqueeze(1).float(), sin[..., own].unsqueeze(1).float())
        both = (torch.cat([apply_rotary(x[..., :width], turn, layout), x[..., width:]], -1) for x in (q, k))
        return tuple(both)  # type: ignore[return-value]

    before: list[Callable] = [room.apply_rotary_pos_emb for room in rooms]
    for room in rooms:
        room.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        for room, own in zip(rooms, before, strict=True):
            room.apply_rotary_pos_emb = own
    if not calls:
        raise ValueError(
            f"--convert-layout: {type(model).__name__} did not ask for its rotation, so nothing can be checked"
        )


def _rooms(model: nn.Module) -> list[Any]:
    """The Python modules that the model's own modules come from."""
    return [sys.modules[name] for name in sorted({type(m).__module__ for m in model.modules()})]
