"""torch.compile and torch.export take a whole model; the laws of compilers hold each encoding and mixer alone."""

import copy
import shutil

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import longitude as lg
from tests.models.conftest import mixer_spec
from tests.support import close, parameter_gradients

LENGTHS = [7, 9, 12, 13, 15, 16, 17, 21, 24, 31, 32, 33, 40, 45, 48, 50, 55, 58, 63, 64]
DYNAMIC = ["attention", "latent", "mamba2", "performer", "retention", "window"]
"""Mixers whose exported graph holds for every length; the others' chunks of a sequence are counted while it is made."""

BY_TOKENS = ["hierarchical", "log_linear_mamba2", "nsa"]
"""Mixers whose cache has blocks by the number of tokens in it: two refuse a graph, the third has one for each number."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- torch.compile ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("spec", [name for name in lg.list_encodings() if "path" not in name])
@torch.no_grad()
def test_at_most_two_graphs(spec, build, ids):
    """Whole (fullgraph), 20 lengths, the same logits, padded too. Reflections go token by token, so `path` is not here; with
    padding, the lengths that xpos follows are data."""
    model, graphs = build(spec), CompileCounter()
    for padded in (False, True) if spec != "xpos" else (False,):
        graphs.clear()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, **given: model(x, use_cache=False, **given).logits, backend=graphs, fullgraph=True
        )
        for length in LENGTHS:
            x, mask = ids(2, length), torch.arange(length) >= torch.tensor([[0], [3 * padded]])
            given = {"attention_mask": mask.long()} if padded else {}
            close(compiled(x, **given)[mask], model(x, **given).logits[mask], 1e-10)
        assert graphs.frame_count <= 2


@pytest.mark.slow
def test_training_compiles(build, ids):
    """Forward, loss and backward in one graph each: the gradients of the eager model."""
    model = build("t5").train()
    compiled = torch.compile(lambda x: model(x, labels=x).loss, backend="aot_eager", fullgraph=True)
    for length in (7, 12):
        x = ids(2, length)
        close(parameter_gradients(compiled(x), model), parameter_gradients(model(x, labels=x).loss, model), 1e-10)


DECODING = [
    *({"encoding": name} for name in lg.list_encodings()),
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
def test_no_graph_break(build, ids):
    """Of a decoder in training and of a step of decoding, as torch's own report counts them."""
    model, x = build("alibi"), ids(2, 9)

    def require_one_graph(*arguments, **named):
        report = torch._dynamo.explain(model)(*arguments, **named)
        assert (report.graph_count, report.graph_break_count) == (1, 0), report.break_reasons

    require_one_graph(x, labels=x)
    with torch.no_grad():
        cache = model(x, use_cache=True).cache
        require_one_graph(x[:, :1], cache=cache, use_cache=True)


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # which torch itself calls
@pytest.mark.timeout(900)  # a compiler of C++ on a busy machine
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor writes C++, and there is no compiler")
def test_inductor(build, ids):
    """torch's own backend: loss, gradients and a step of decoding are those of the eager model."""
    eager, x = build("alibi"), ids(2, 12)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True)
    close(
        parameter_gradients(compiled(x, labels=x).loss, model),
        parameter_gradients(eager(x, labels=x).loss, eager), 1e-10,
    )  # fmt: skip
    with torch.no_grad():
        caches = [eager(x, use_cache=True).cache for _ in range(2)]
        for token in ids(2, 3, seed=2).split(1, 1):
            step, wanted = (
                each(token, cache=cache, use_cache=True).logits
                for each, cache in zip((compiled, eager), caches, strict=True)
            )
            close(step, wanted, 1e-10)


# ---- torch.export ----------------------------------------------------------------------------------------------------
def require_exported(model, ids, length=None, strict=False):
    """Exported = eager, at one length, or at every one where `length` is its dimension."""
    shapes = {"input_ids": {1: length}, "use_cache": None} if length is not None else None
    exported = torch.export.export(model, (ids(2, 11),), {"use_cache": False}, dynamic_shapes=shapes, strict=strict)
    for tokens in (11, 7, 23) if length is not None else (11,):
        x = ids(2, tokens)
        close(exported.module()(x, use_cache=False).logits, model(x, use_cache=False).logits, 1e-10)


ENCODINGS = [
    pytest.param(name, marks=[] if name == "alibi" else pytest.mark.slow)
    for name in lg.list_encodings()
    if name not in ("axial_rope", "mrope")
]


@pytest.mark.ecosystem
@pytest.mark.parametrize("spec", ENCODINGS)
@torch.no_grad()
def test_encodings_export_at_every_length(spec, build, ids):
    require_exported(build(spec), ids, torch.export.Dim.AUTO)


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.parametrize("name", lg.list_mixers())
@torch.no_grad()
def test_mixers_export(name, build, ids):
    model = build("auto", mixer=mixer_spec(name))
    require_exported(model, ids, torch.export.Dim.AUTO if name in DYNAMIC else None)
    model(ids(2, 5))  # and what it made for the graph is not in the way afterwards


@pytest.mark.slow
@pytest.mark.ecosystem
@pytest.mark.parametrize("spec", ["rope", "t5", ["fox", "rope"]], ids=str)
@torch.no_grad()
def test_strict_export(spec, build, ids):
    """With the graph taken by dynamo."""
    require_exported(build(spec), ids, torch.export.Dim("length", min=2, max=64), strict=True)


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
