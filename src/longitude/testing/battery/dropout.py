"""Laws of dropout: which weights were dropped is read off the output, and everything else follows from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.positions.terms import OffsetVectors
from longitude.testing.attend_calls import Call, calls_with_every_mask
from longitude.testing.engine import DoesNotApply, LawBroken
from longitude.testing.examples import DIM, ENCODING_LAWS, MIXER_LAWS, SHAPES, Example, MixerExample, seeded
from longitude.testing.fixtures import (
    LayerStack,
    close,
    differentiable,
    error,
    heads_and_tokens,
    numbers,
    parameters_of,
    small_blocks,
    with_gradients,
)

P = 0.3
KEYS = SHAPES["head_dim"]  # as many as values are wide: values of one-hot rows show the weights
QUICK = ("padding on the right", "documents by row", "union", "prefix", "no keys")
MANY = 170  # sequences, to count how often each weight is dropped


# ---- attention: the weights themselves -----------------------------------------------------------------------------------
@ENCODING_LAWS.law(name="dropout", threshold=1e-9)
def dropout_of_weights(build: Example, kinds: tuple[str, ...] | None = QUICK) -> None:
    """Every weight is 0 or w / (1 - p), each as often as it should be, whatever the mask, on every backend.

    No call raises. A query without keys gives zeros. Gradients are those of the remaining weights. Equal seeds give equal
    results. Without dropout no random number is drawn. kinds: kinds of masks; None: all.
    """
    encoding, tensors = build(), heads_and_tokens(KEYS, KEYS, batch=3)
    if encoding.rotate_values:
        raise DoesNotApply("its values rotate, so the output does not show the weights")
    for rows in (KEYS, 5) if kinds is None else (KEYS,):
        fewer = {**tensors, "q": tensors["q"][:, :, -rows:]}
        for kind, case in calls_with_every_mask(encoding, fewer, kinds):
            _holds(case, f"{rows} queries, mask {kind}")
    case = Call(encoding, {name: x[:1].expand(MANY, *x.shape[1:]) for name, x in tensors.items()})
    for name in case.able(P):
        _as_often(case, name)


def _dropped(case: Call, name: str) -> Tensor:
    """The weights that a backend applies under one seed, [B, H, Lq, Lk], by values of one-hot rows.

    It runs in the gradient mode of what it is compared with: `split` may choose another way without gradients.
    """
    v = case.tensors["v"]
    torch.manual_seed(0)
    out = case.forward({**case.tensors, "v": torch.eye(KEYS, dtype=v.dtype).expand_as(v)}, name, dropout=P)
    if _of_values(case):
        torch.manual_seed(0)
        out = out - case.forward({**case.tensors, "v": 0 * v}, name, dropout=P)
    return out.detach()


def _of_values(case: Call) -> list[OffsetVectors]:
    return [term for term in case.terms() if isinstance(term, OffsetVectors) and term.values is not None]


def _holds(case: Call, where: str) -> None:
    with torch.no_grad():
        weights = case.forward(case.tensors, "reference", return_weights=True)[1]
        plain = case.forward(case.tensors, "reference")
    for name in case.able(P):
        here = f"backend {name}, {where}"
        with small_blocks(3, *case.tensors["k"].shape[:3:2]), torch.random.fork_rng(devices=[]):
            try:
                _weights_hold(here, case, name, weights)
                before = torch.get_rng_state()
                with torch.no_grad():
                    close(f"{here}, dropout=0", case.forward(case.tensors, name, dropout=0.0), plain)
            except LawBroken:
                raise
            except Exception as e:
                raise LawBroken(f"{here}: {type(e).__name__}: {e}") from e
            if not torch.equal(before, torch.get_rng_state()):
                raise LawBroken(f"{here}: a random number was drawn without dropout")


def _weights_hold(here: str, case: Call, name: str, weights: Tensor) -> None:
    queries, keys = torch.arange(KEYS - weights.shape[2], KEYS), torch.arange(KEYS)
    left = _dropped(case, name)
    if bool((left * ~case.mask.allowed(queries, keys).any(-1, keepdim=True)).any()):
        raise LawBroken(f"{here}: a query without keys has an output that is not zero")
    kept = left > 0.5 * weights / (1 - P)
    close(f"{here}, weights that are 0 or w / (1 - p)", left, weights * kept / (1 - P))

    def of_these() -> Tensor:
        applied = case.forward(inputs, "reference", return_weights=True)[1] * kept / (1 - P)
        out = applied @ inputs["v"].repeat_interleave(applied.shape[1] // inputs["v"].shape[1], 1)
        for term in _of_values(case):
            assert term.values is not None
            out = out + (applied[..., None, :] @ term.values(queries[:, None] - keys)).squeeze(-2)
        return out

    def again() -> Tensor:
        torch.manual_seed(0)
        return case.forward(inputs, name, dropout=P)

    inputs = differentiable(**case.tensors)
    wanted = {**inputs, **parameters_of(case.encoding)}
    close(f"{here}, of the weights that were left", with_gradients(again, wanted), with_gradients(of_these, wanted))


@torch.no_grad()
def _as_often(case: Call, name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        left = _dropped(case, name)
    weights = case.row(0).forward(case.row(0).tensors, "reference", return_weights=True)[1]
    seen = weights[0] > 1e-9
    often = (left > 0.5 * weights).double().mean(0)[seen]
    off, deviation = often - 1 + P, (P * (1 - P) / MANY) ** 0.5
    if bool((off.abs() > 6 * deviation).any()) or abs(off.mean()) > 6 * deviation / often.numel() ** 0.5:
        expected = f"expected each weight to be left in {1 - P:.0%} of {MANY} draws"
        got = f"got {often.min():.0%} to {often.max():.0%}, {often.mean():.2%} in the mean"
        raise LawBroken(f"backend {name}: {expected}, {got}")


# ---- mixers: the output ----------------------------------------------------------------------------------------------------
@MIXER_LAWS.law(name="dropout")
def dropout_of_mixers(build: MixerExample) -> None:
    """In training the mean over 1000 draws is the output without dropout, and something is dropped.

    With documents, padding on either side and rows of padding alone, outputs and gradients are finite, on every backend.
    """
    if not build.has("dropout"):
        raise DoesNotApply("it has no dropout")
    draws, p = 1000, 0.4
    x = numbers(1, 7, DIM).expand(draws, -1, -1)
    net = LayerStack(build, layers=1, dropout=p)
    with seeded(), torch.no_grad():
        want, out = net(x[:1], 0), net.train()(x, 0)
        if error(out, want.expand_as(out)) < 0.01:
            raise LawBroken(f"dropout of {p} dropped nothing")
        deviation = (out - want).std(0) / draws**0.5
        if bool(((out.mean(0) - want[0]).abs() > 6 * deviation + 1e-9).any()):
            raise LawBroken(f"the mean over {draws} draws with dropout {p} is not the output without")
    documents = torch.zeros(4, 12, dtype=torch.long)
    documents[0, 7:], documents[1, :5], documents[2, 4:9], documents[2, 9:], documents[3] = -1, -1, 1, 2, -1
    for backend in BACKENDS if build.has("backend") else (None,):
        options: dict[str, Any] = {} if backend is None else {"backend": backend}
        net = LayerStack(build, dropout=p, **options).train()
        for seed in range(5):
            try:
                with seeded(seed):
                    answer = net.answer(numbers(4, 12, DIM), 0, documents)
            except ValueError:  # a backend that does not support it
                continue
            if lost := [part for part, x in answer.items() if not bool(x.isfinite().all())]:
                raise LawBroken(f"backend {backend}: with padding, not finite: {', '.join(lost)}")
