"""The law of dropout: which weights were dropped is read off the output, and everything else follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, Mask, Padding, Window
from longitude.attention.operation import requests
from longitude.attention.patterns import Dilated, Global, Prefix
from longitude.attention.reference import relative_value_sum
from longitude.attention.scores import per_query_head
from longitude.positions.base import OffsetVectors
from longitude.positions.composed import compose
from longitude.testing.draws import Draw
from longitude.testing.equal import documents_of, masks
from longitude.testing.fixtures import (
    SHAPES,
    Example,
    LawBroken,
    close,
    differentiable,
    heads_and_tokens,
    parameters_of,
    small_blocks,
    with_gradients,
)

P = 0.3
KEYS = SHAPES["head_dim"]  # as many as values are wide: values of one-hot rows show the weights
QUICK = ("padding on the right", "documents by row", "union", "dilated", "nobody")
MANY = 170  # sequences, to see how often each weight is dropped


def every_mask(batch: int, keys: int, causal_only: bool) -> dict[str, Mask]:
    """All kinds, and those that `split` takes; in some of them queries see no key."""
    token = torch.arange(keys)
    one = {
        "nobody": Causal() & Padding(token < 0),
        "a sequence of padding": Causal() & Padding(token < torch.tensor([keys, 0, 3])[:batch, None]),
        "prefix": Causal() & Prefix(3),
        "dilated": Dilated(3, 2) & Padding(token >= 2),
        "global": (Window(2) | Global([1])) & Causal() & Padding(token > 0),
    }
    return masks(batch, keys, causal_only) | one


def law_dropout(build: Example, kinds: Sequence[str] | None = QUICK) -> str | None:
    """Law 2. On every backend that has dropout, whatever the mask: no call raises; a query that sees no key gives zeros; every
    weight is 0 or w / (1 - p), each as often as it should be; gradients are those of the weights that were left; the same seed
    gives the same; and without dropout no random number is drawn. kinds: of masks; None: all.
    """
    encoding = build()
    one = compose(encoding)
    q, k, v, x = heads_and_tokens(KEYS, KEYS, batch=3)
    for kind, mask in every_mask(3, KEYS, one.causal_only).items():
        if kinds is not None and kind not in kinds:
            continue
        for rows in (KEYS, 5) if kinds is None else (KEYS,):
            case = Draw(encoding, {"q": q[:, :, -rows:], "k": k, "v": v, "x": x}, mask, documents_of(mask, x))
            _holds(case, f"{rows} queries, mask {kind}")
    case = Draw(encoding, {n: t[:1].expand(MANY, *t.shape[1:]) for n, t in zip("qkvx", (q, k, v, x))}, Causal(), None)
    for name in _backends(case):
        _as_often(case, name)
    return None


def _backends(case: Draw) -> list[str]:
    return [name for name in BACKENDS if case.refusal(name, dropout=P) is None]


def _dropped(case: Draw, name: str, seed: int) -> Tensor:
    """The weights that a backend applies under this seed, [B, H, Lq, Lk], by values of one-hot rows. In the same gradient mode
    as what it is compared with: `split` may choose another way without.
    """
    v = case.tensors["v"]
    shown = torch.eye(KEYS, dtype=v.dtype).expand_as(v)
    torch.manual_seed(seed)
    out = case.forward({**case.tensors, "v": shown}, name, dropout=P)
    if any(isinstance(term, OffsetVectors) and term.values is not None for term in _terms(case)):
        torch.manual_seed(seed)
        out = out - case.forward({**case.tensors, "v": 0 * v}, name, dropout=P)
    return out.detach()


def _terms(case: Draw) -> tuple:
    return compose(case.encoding).terms(case.context(case.tensors["x"]))


def _holds(case: Draw, where: str) -> None:
    with torch.no_grad():
        weights = case.forward(case.tensors, "reference", return_weights=True)[1]
        plain = case.forward(case.tensors, "reference")
    rows = weights.shape[2]
    allowed = case.mask.allowed(torch.arange(KEYS - rows, KEYS), torch.arange(KEYS))
    nothing = ~allowed.any(-1, keepdim=True)
    for name in _backends(case):
        here = f"backend {name}, {where}"
        with small_blocks(3, *case.tensors["k"].shape[:3:2]), torch.random.fork_rng(devices=[]):
            try:
                _weights_hold(here, case, name, weights, nothing)
                before = torch.get_rng_state()
                with torch.no_grad():
                    close(f"{here}, dropout=0", case.forward(case.tensors, name, dropout=0.0), plain)
            except LawBroken:
                raise
            except Exception as e:
                raise LawBroken(f"{here}: {type(e).__name__}: {e}") from e
            if not torch.equal(before, torch.get_rng_state()):
                raise LawBroken(f"{here}: a random number was drawn without dropout")


def _weights_hold(here: str, case: Draw, name: str, weights: Tensor, nothing: Tensor) -> None:
    left = _dropped(case, name, 0)
    if bool((left * nothing).any()):
        raise LawBroken(f"{here}: a query that sees no key has an output that is not zero")
    kept = left > 0.5 * weights / (1 - P)
    close(f"{here}, weights that are 0 or w / (1 - p)", left, weights * kept / (1 - P))

    def of_these() -> Tensor:
        applied = case.forward(inputs, "reference", return_weights=True)[1] * kept / (1 - P)
        out = applied @ per_query_head(inputs["v"], applied.shape[1])
        for term in _terms(case):
            if isinstance(term, OffsetVectors) and term.values is not None:
                q, k, v, _ = inputs.values()
                columns = case.context(inputs["x"])
                (part,) = requests(q, k, v, case.encoding, columns, case.mask, None, None, None, 0.0, False)
                out = out + relative_value_sum(applied, term.values, part.request)
        return out

    def again() -> Tensor:
        torch.manual_seed(0)
        return case.forward(inputs, name, dropout=P)

    inputs = differentiable(**case.tensors)
    wanted = {**inputs, **parameters_of(case.encoding)}
    close(f"{here}, of the weights that were left", with_gradients(again, wanted), with_gradients(of_these, wanted))


def _as_often(case: Draw, name: str) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        left = _dropped(case, name, 0)
        weights = case.row(0).forward(case.row(0).tensors, "reference", return_weights=True)[1]
    seen = weights[0] > 1e-9
    often = (left > 0.5 * weights).double().mean(0)[seen]
    deviation = (P * (1 - P) / MANY) ** 0.5
    if (
        bool(((often - 1 + P).abs() > 6 * deviation).any())
        or abs(often.mean() - 1 + P) > 6 * deviation / often.numel() ** 0.5
    ):
        raise LawBroken(
            f"backend {name}: expected each weight to be left in {1 - P:.0%} of {MANY} draws, got {often.min():.0%} to "
            f"{often.max():.0%}, {often.mean():.2%} in the mean"
        )
