"""torch.compile and torch.export take a whole model; the laws of compilers hold each encoding and mixer alone."""

import copy
import shutil

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import longitude as lg
from tests.models.conftest import OF_DECODERS, mixer_spec
from tests.support import close, parameter_gradients

DYNAMIC = "attention chunks gated_deltanet latent mamba2 mamba3 performer retention window".split()
"""Mixers whose exported graph holds for every length; the others' steps or chunks are counted while it is made."""

BY_TOKENS = ["hierarchical"]
"""Mixers whose cache has blocks by the number of tokens in it: they refuse a graph."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- torch.compile ---------------------------------------------------------------------------------------------------


DECODING = [
    *({"encoding": name} for name in OF_DECODERS),
    *({"encoding": "auto", "mixer": mixer_spec(name)} for name in lg.list_mixers() if name not in BY_TOKENS),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", DECODING, ids=str)
@torch.no_grad()
def test_decoding_compiles(options, build, ids):
    """A token after a cache, whole: two graphs, one of them for every length, and the logits of the eager model."""
    model, x, graphs = build(**options), ids(2, 16), CompileCounter()
    step = torch.compile(
        lambda token, cache: model(token, cache=cache, use_cache=True).logits, backend=graphs, fullgraph=True
    )
    caches = [model(x[:, :7], use_cache=True).cache for _ in range(2)]
    for token in x[:, 7:].split(1, 1):
        close(step(token, caches[0]), model(token, cache=caches[1], use_cache=True).logits, 1e-10)
    assert graphs.frame_count <= 2


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.timeout(900)  # a compiler of C++ on a busy machine
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor writes C++, and there is no compiler")
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning")  # of torch's own diagonal
@pytest.mark.parametrize("spec", OF_DECODERS)
def test_inductor(spec, build, ids):
    """torch's own backend: loss, gradients and a step of decoding are those of the eager model."""
    eager, x = build(spec), ids(2, 12)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True)
    close(
        parameter_gradients(compiled(x, labels=x).loss, model),
        parameter_gradients(eager(x, labels=x).loss, eager), 1e-10,
    )  # fmt: skip
    with torch.no_grad():
        caches = [eager(x, use_cache=True).cache for _ in range(2)]
        for token in ids(2, 3, seed=2).split(1, 1):
            pairs = zip((compiled, eager), caches, strict=True)
            step, wanted = (either(token, cache=cache, use_cache=True).logits for either, cache in pairs)
            close(step, wanted, 1e-10)


# ---- torch.export ----------------------------------------------------------------------------------------------------
ANY, PAST = torch.export.Dim.AUTO, 1500
"""A free length; and one at which every choice by size has changed: a backend's at 1024 or 1448 tokens of these models."""


def require_exported(model, ids, lengths=(11,), free=None, strict=False):
    """Exported = eager at these lengths, in torch's own operators: the graph runs where longitude is not."""
    shapes = {"input_ids": {1: free}, "use_cache": None} if free is not None else None
    exported = torch.export.export(model, (ids(2, 11),), {"use_cache": False}, dynamic_shapes=shapes, strict=strict)
    assert not [node for node in exported.graph.nodes if "longitude" in str(node.target)]
    for tokens in lengths:
        x = ids(2, tokens)
        close(exported.module()(x, use_cache=False).logits, model(x, use_cache=False).logits, 1e-10)


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.parametrize("name", lg.list_mixers())
@torch.no_grad()
def test_mixers_export(name, build, ids):
    """At every length, or at the one that the graph was made with."""
    model = build("auto", mixer=mixer_spec(name))
    require_exported(model, ids, *[(2, 11, 300, PAST), ANY] * (name in DYNAMIC))
    model(ids(2, 5))  # and what it made for the graph is not in the way afterwards


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.parametrize("spec", ["rope", "t5", ["fox", "rope"]], ids=str)
def test_strict_export(spec, build, ids):
    """With the graph taken by dynamo, which refuses a condition on the length; and recorded for gradients, by default."""
    require_exported(build(spec), ids, (2, 11, 200), torch.export.Dim("length", min=2, max=2**20), strict=True)


@pytest.mark.slow
@pytest.mark.ecosystem
@torch.no_grad()
def test_padding_and_packed_text_export(build, ids):
    model, x = build(["rope", "alibi"]), ids(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for inputs in ({"position_ids": places}, {"attention_mask": (torch.arange(12) > 2).long()[None]}):
        named = {**inputs, "use_cache": False}
        exported = torch.export.export(model, (x,), named, strict=False).module()
        close(exported(x, **named).logits[:, 3:], model(x, **named).logits[:, 3:], 1e-10)
