"""Law of models whose parameters are in memory only while their modules are called."""

from __future__ import annotations

from copy import deepcopy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from longitude.testing.battery.models import language_model, token_ids
from longitude.testing.examples import MixerExample
from longitude.testing.fixtures import close
from longitude.testing.parts import shared_law


def offloaded(model: Any, way: str, folder: str) -> Any:
    """A copy of a model whose parameters are on meta between calls. way: one of WAYS; folder: an empty one."""
    import accelerate

    model = deepcopy(model)
    if way == "cpu_offload":
        return accelerate.cpu_offload(model)
    if way == "disk_offload":
        return accelerate.disk_offload(model, folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    places = accelerate.infer_auto_device_map(model, {"cpu": size}, model._no_split_modules)
    return accelerate.dispatch_model(model, places, offload_dir=folder)


SAME = 1e-12
WAYS = "cpu_offload", "disk_offload", "little memory"


@torch.no_grad()
def in_one_call_and_by_tokens(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Logits of ids [B, L], in one call and in three with a cache."""
    cache, parts = None, []
    for chunk in ids.tensor_split([5, 6], 1):
        out = model(chunk, cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    return {"one call": model(ids, use_cache=False).logits, "with a cache": torch.cat(parts, 1)}


def require_same_offloaded(model: Any, ids: Tensor) -> None:
    """LawBroken unless a model answers the same under every way of offloading."""
    want = in_one_call_and_by_tokens(model, ids)
    for way in WAYS:
        with TemporaryDirectory() as folder:
            close(way, in_one_call_and_by_tokens(offloaded(model, way, folder), ids), want, SAME)


@shared_law(name="offloading", threshold=SAME, needs=("transformers", "accelerate"))
def offloading(build: MixerExample) -> None:
    """In a model whose parameters are offloaded to memory or disk by accelerate, logits are those of the model in memory."""
    require_same_offloaded(language_model(build, build), token_ids(2, 9))
