"""torch.export takes a whole model: exported = eager, for every encoding and mixer."""

import pytest
import torch

import longitude as lg

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]

ENCODINGS = [name for name in lg.list_encodings() if name not in ("axial_rope", "mrope")]
SIZES = {"window": {"size": 5}, "hierarchical": {"window": 4}}
DYNAMIC = ["attention", "latent", "mamba2", "performer", "retention", "window"]
"""Mixers whose graph holds for every length; the others' chunks of a sequence are counted while it is made."""


def same(exported, model, ids, lengths):
    for length in lengths:
        x = ids(2, length)
        ours, theirs = exported.module()(x, use_cache=False).logits, model(x, use_cache=False).logits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", ENCODINGS)
@torch.no_grad()
def test_encodings_at_every_length(spec, build, ids):
    model = build(spec)
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None}
    exported = torch.export.export(model, (ids(2, 11),), {"use_cache": False}, dynamic_shapes=shapes, strict=False)
    same(exported, model, ids, (11, 7, 23))


@pytest.mark.parametrize("name", lg.list_mixers())
@torch.no_grad()
def test_mixers(name, build, ids):
    encoding = "rope" if name in ("attention", "hierarchical", "latent", "window") else "none"
    model = build(encoding, mixers=[{"name": name, **SIZES.get(name, {})}] * 2)
    dynamic = name in DYNAMIC
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None} if dynamic else None
    exported = torch.export.export(model, (ids(2, 11),), {"use_cache": False}, dynamic_shapes=shapes, strict=False)
    same(exported, model, ids, (11, 7, 23) if dynamic else (11,))
    model(ids(2, 5))  # and what it made for the graph is not in the way afterwards


@pytest.mark.parametrize("spec", ["rope", "t5", ["fox", "rope"]], ids=str)
@torch.no_grad()
def test_strictly(spec, build, ids):
    """With the graph taken by dynamo."""
    model, length = build(spec), torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "use_cache": None}
    exported = torch.export.export(model, (ids(2, 11),), {"use_cache": False}, dynamic_shapes=shapes, strict=True)
    same(exported, model, ids, (11, 7, 23))


@torch.no_grad()
def test_padding_and_packed_text(build, ids):
    model, x = build(["rope", "alibi"]), ids(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for inputs in ({"position_ids": places}, {"attention_mask": (torch.arange(12) > 2).long()[None]}):
        named = {**inputs, "use_cache": False}
        exported = torch.export.export(model, (x,), named, strict=False)
        ours, theirs = exported.module()(x, **named).logits, model(x, **named).logits
        torch.testing.assert_close(ours[:, 3:], theirs[:, 3:], rtol=0, atol=1e-10)
