"""Every tensor of every term fits queries, keys and values, or the call is refused before a kernel reads it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import longitude as lg
from longitude.errors import UsageError
from longitude.positions.formulas import NormalizedOffset
from longitude.positions.terms import Counted, Term
from tests.support import heads, random

HEADS, KV_HEADS, LENGTH, WIDTH = 4, 2, 9, 8


def table(*shape: int) -> Callable[[Tensor], Tensor]:
    """A function of offsets: the same numbers [heads, ..., width] or [..., width] at each."""
    return lambda offset: (
        random(*shape)
        .reshape(*shape[:-1], *[1] * offset.dim(), shape[-1])
        .expand(*shape[:-1], *offset.shape, shape[-1])
    )


def fire(width: int = 5) -> NormalizedOffset:
    layers = random(width, 1), random(width), random(HEADS, width), random(HEADS)
    return NormalizedOffset(lambda offset: offset.double(), lambda i: i.double() + 1, *layers)


FITTING: dict[str, Term] = {
    "OffsetBias": lg.terms.OffsetBias(
        lambda offset: random(HEADS, 1).expand(HEADS, offset.numel()).view(HEADS, *offset.shape)
    ),
    "PairBias": lg.terms.PairBias(lambda i, j: random(HEADS, 1, 1).expand(HEADS, *(i - j).shape)),
    "PairBias of FIRE": lg.terms.PairBias(fire()),
    "Drift": lg.terms.Drift(random(2, HEADS, LENGTH)),
    "OffsetVectors": lg.terms.OffsetVectors(table(WIDTH), table(WIDTH), random(HEADS, 1, WIDTH)),
    "OffsetVectors by head": lg.terms.OffsetVectors(table(HEADS, WIDTH), table(HEADS, WIDTH)),
    "OffsetVectors of a mix": lg.terms.OffsetVectors(table(3), mix=random(2, KV_HEADS, LENGTH, 3)),
    "RowBias": lg.terms.RowBias(lambda q, scores, allowed: scores * 0.5),
    "RowBias of CoPE": lg.terms.RowBias(Counted(random(WIDTH, 6), 1.0)),
    "Transport": lg.terms.Transport(random(2, KV_HEADS, LENGTH, WIDTH) / 9, random(2, KV_HEADS, LENGTH)),
    "Temperature": lg.terms.Temperature(lambda n: random(HEADS, 1) * n, "visible"),
    "SinkLogits": lg.terms.SinkLogits(random(HEADS)),
}


def changed(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor with each dimension a number longer, and each longer one shorter; in integers; on another device."""
    for dim, size in enumerate(x.shape):
        yield f"dimension {dim} longer", torch.cat([x, x.narrow(dim, 0, 1)], dim)
        if size > 2:
            yield f"dimension {dim} shorter", x.narrow(dim, 0, size - 1)
    yield "integers", x.long()
    yield "meta", x.to("meta")


def misfits(name: str) -> Iterator[tuple[str, Term]]:
    """A fitting term with one of its tensors changed; of its functions, with their values changed."""
    term = FITTING[name]
    for field, value in vars(term).items():
        if isinstance(value, Tensor):
            # Fewer reflected tokens are the last ones, as after a cache.
            yield from ((f"{name}.{field}: {how}", replace(term, **{field: x})) for how, x in changed(value))
        elif isinstance(value, NormalizedOffset):
            for layer in ("w1", "b1", "w2", "b2"):
                for how, x in changed(getattr(value, layer)):
                    if how != "integers":
                        yield f"{name}.{layer}: {how}", replace(term, **{field: replace(value, **{layer: x})})
        elif isinstance(value, Counted):
            for how, x in changed(value.table):
                if not how.startswith("dimension 1"):  # any number of columns
                    yield f"{name}.table: {how}", replace(term, **{field: replace(value, table=x)})
        elif callable(value):

            def longer(*inputs: Tensor, of: Callable[..., Tensor] = value) -> Tensor:
                values = of(*inputs)
                return torch.cat([values, values[..., :1]], -1)

            def by_more_heads(*inputs: Tensor, of: Callable[..., Tensor] = value) -> Tensor:
                return torch.cat([of(*inputs)] * 3)

            yield f"{name}.{field}: longer", replace(term, **{field: longer})
            yield f"{name}.{field}: more heads", replace(term, **{field: by_more_heads})


def answer(term: Term, backend: str) -> Tensor:
    class Of(lg.Encoding):
        def terms(self, context: object) -> tuple[Term, ...]:
            return (term,)

    q, k, v = heads(LENGTH, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH)
    return lg.attend(q, k, v, encoding=Of(), backend=backend)


@pytest.mark.parametrize("kind", FITTING)
@torch.no_grad()
def test_what_does_not_fit_is_refused_by_every_backend(kind: str) -> None:
    assert bool(answer(FITTING[kind], "auto").isfinite().all())
    for name, term in misfits(kind):
        for backend in ("auto", "sdpa", "table", "chunked", "reference"):
            with pytest.raises(ValueError) as refusal:
                answer(term, backend)
            error = refusal.value
            what = error.what.split(".")[0] if isinstance(error, UsageError) else ""
            declined = backend != "auto" and f"backend {backend!r} cannot" in str(error)
            assert declined or what in (type(term).__name__, "Counted", "NormalizedOffset"), (name, error)
