"""Two calls that differ in one field never share an answer: signatures of requests, and what layers of a forward share."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.attention.mixer import MixerInputs
from longitude.attention.operation import raw_request
from longitude.attention.request import COUNTS, OUT, Request, Step
from longitude.hf.attention import stock_attention
from longitude.hf.masks import StockMask
from longitude.positions.composed import compose
from tests.support import close, heads, random

MASK = lg.Causal()
ALIBI = lg.ALiBi(4).terms({})


def request(**changes: Any) -> Request:
    q, k, v = heads(7)
    given = {"q": q, "k": k, "v": v, "terms": ALIBI, "mask": MASK, "q_positions": 0, "k_positions": 0, "scale": 1.0}
    return Request(**given | changes)


def others() -> dict[str, list[Any]]:
    """Other values of each field, each alone to be told apart."""
    q, k, v = heads(7)
    tensors = {name: [x[:1], x.float(), x.clone().requires_grad_()] for name, x in (("q", q), ("k", k), ("v", v))}
    masks = [lg.Window(3), lg.NoMask(), lg.Causal() & lg.Padding(torch.ones(2, 7, dtype=torch.bool))]
    return tensors | {
        "terms": [(), lg.Shaw(8).terms({}), ALIBI * 2, *((*ALIBI, lg.terms.Softcap(cap)) for cap in (2.0, 3.0))],
        "mask": masks,
        "q_positions": [1, torch.arange(7), torch.arange(7)],
        "k_positions": [2, torch.arange(7), torch.arange(7)],
        "scale": [0.5, 2.0],
        "dropout": [0.1, 0.2],
        "weights": [True],
        "lse": [True],
        "learned": [(q,)],
        "q_order": [3],
        "k_order": [4],
        "factors": [q[..., :1]],
        "sinks": [q[0, :, 0, 0]],
    }  # fmt: skip


def test_each_field_of_a_request_counts_in_its_signature() -> None:
    """Fields that do not say so themselves, by their metadata. The grad mode counts, too."""
    counting = {x.name for x in fields(Request) if x.metadata.get(COUNTS) != OUT[COUNTS]}
    assert counting == others().keys() and request().signature() == request().signature()
    for name, values in others().items():
        signatures = [request().signature(), *(request(**{name: value}).signature() for value in values)]
        assert len({*signatures}) == len(signatures), name
    with torch.no_grad():
        without = request().signature()
    assert without != request().signature()


def test_each_argument_of_a_request_counts_in_a_step() -> None:
    """A step makes one request of equal arguments; of tensors, masks and encodings, these are the same objects."""
    q, k, v = heads(7)
    encoding = compose(lg.ALiBi(4))
    reads: dict[str, Any] = {
        "encoding": encoding, "context": None, "mask": MASK, "q_positions": 0, "k_positions": 0, "scale": 1.0, "dropout": 0.0,
        "return_weights": False, "pairs": None, "sinks": None, "transformed_by": 1, "softcap": None,
    }  # fmt: skip
    assert [*reads] == [*inspect.signature(raw_request).parameters][3:]
    changes: dict[str, Any] = {
        "encoding": compose(lg.ALiBi(4, slopes=[1.0, 2.0, 3.0, 4.0])), "mask": lg.Window(2), "q_positions": 1,
        "k_positions": torch.arange(7), "scale": 2.0, "dropout": 0.5, "return_weights": True, "sinks": random(4), "softcap": 1.5,
    }  # fmt: skip
    with torch.no_grad():
        for name, value in changes.items():
            step = Step()
            for given in (reads, reads | {name: value}, reads):
                ours = step.request(raw_request, q, k, v, *given.values())
                alone = raw_request(q, k, v, *given.values())
                for x in fields(Request):
                    if x.name not in ("pairs", "step", "terms"):
                        got, want = getattr(ours, x.name), getattr(alone, x.name)
                        assert got is want or not isinstance(got, Tensor) and got == want, (name, x.name)
                assert [term.signature() for term in ours.terms] == [term.signature() for term in alone.terms]
            assert len(step.results) == 2, name
        step, make = Step(), lambda *tensors: request()  # one function: another has a key of its own
        others = [(q, k, v), (torch.nn.Parameter(q), k, v)]
        for n, x in enumerate((q, k, v)):
            others += [(*(q, k, v)[:n], other, *(q, k, v)[n + 1 :]) for other in (x[:1], x.float(), x.to("meta"))]
        for tensors in others * 2:
            step.request(make, *tensors)
        assert len(step.results) == len(others)


def test_what_a_request_makes_once_is_made_for_all_layers() -> None:
    step, make, made = Step(), lambda *tensors: request(), lambda _: object()
    assert len({id(step.request(make, *heads(7)).once(made)) for _ in range(3)}) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "scale": {"scale": 0.3}, "softcap": {"softcap": 0.2}, "backend": {"backend": "reference"},
    "heads": {"num_kv_heads": 1}, "window": {"size": 2}, "longer window": {"size": 3}, "chunks": {"chunks": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    "documents", [None, torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), torch.tensor([[-1, 0, 0, 0, 1, 1]] * 2)]
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tokens", [6, 1])
def test_layers_of_one_forward_answer_as_each_alone(documents: Tensor | None, grad: bool, tokens: int) -> None:
    """Whatever the layers before them had: twice around, so that each comes after all others."""
    encoding, x = compose(lg.ALiBi(4)), random(2, 6, 16)
    layers = []
    for options in OPTIONS.values():
        torch.manual_seed(0)
        own = dict(options)
        if "chunks" in own:
            layers.append(lg.attention.ChunkAttention(16, 4, 2, size=own.pop("chunks")).double())
        else:
            kind: Any = lg.attention.WindowAttention if "size" in own else lg.MultiHeadAttention
            layers.append(kind(16, 4, **({"num_kv_heads": 2} | own)).double())
    documents = None if documents is None else documents[:, -tokens:]
    with torch.set_grad_enabled(grad):
        step, x = Step(), x[:, -tokens:]
        for layer in layers * 2:
            together = layer(x, MixerInputs(MASK, 0, documents, encoding=encoding, step=step))
            close(together, layer(x, positions=0, documents=documents, encoding=encoding))


@torch.no_grad()
def test_layers_of_an_unmodified_model_answer_as_each_alone() -> None:
    """With another window, softcap, scale, and other numbers of heads, on one mask of the model."""
    ways: list[dict[str, Any]] = [
        {}, {"sliding_window": 2}, {"sliding_window": 4}, {"softcap": 0.5}, {"softcap": 0.1}, {"scaling": 0.2}, {"kv": 1},
        {"dtype": torch.float32},
    ]  # fmt: skip
    shared, module = StockMask(MASK, 9), torch.nn.Module()
    outs = []
    for way in ways * 2:
        way = dict(way)
        q, k, v = heads(9, num_kv_heads=way.pop("kv", 2), dtype=way.pop("dtype", torch.float64))
        q = q[:, :, -1:]
        together = stock_attention(module, q, k, v, shared, **way)[0]
        outs.append(together)
        close(together, stock_attention(module, q, k, v, StockMask(MASK, 9), **way)[0], atol=1e-6)
    assert len(shared.step.results) == len(ways)
    assert all(float((outs[0] - other).abs().max()) > 1e-6 for other in outs[1:6])
