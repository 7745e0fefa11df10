"""Laws of NaN and infinities: they show in what depends on them, and in no other sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.documents import places_of
from longitude.testing.attend_calls import Call
from longitude.testing.battery.decoding import CACHES
from longitude.testing.engine import LawBroken
from longitude.testing.examples import DIM, ENCODING_LAWS, MIXER_LAWS, Example, MixerExample, shared_law
from longitude.testing.fixtures import (
    LayerStack,
    Named,
    close,
    heads_and_tokens,
    learned_of,
    numbers,
    with_gradients,
    without_loops,
)

LENGTH, AT = 11, 5
"""Tokens, and the one that is not finite."""
NOT_FINITE = (math.nan, math.inf, -math.inf)


@ENCODING_LAWS.law(name="nan_and_inf", threshold=1e-6)
@torch.no_grad()
def nan_and_inf_in_attention(build: Example) -> None:
    """NaN or an infinity in a token: on every backend its output is not finite, and other rows are as without it.

    NaN in all of a parameter: the loss is not finite. In float32 and float64.
    """
    tensors, token = heads_and_tokens(LENGTH, LENGTH), torch.arange(LENGTH)
    for dtype in (torch.float32, torch.float64):
        encoding = build().to(dtype)
        clean = {name: x.to(dtype) for name, x in tensors.items()}
        case = Call(encoding, clean)
        if encoding.at_input:
            _in_a_token(f"{dtype}, at the input", lambda tokens: encoding.embed(tokens["x"], token), clean)  # noqa: B023
        for backend in case.able():
            where = f"{dtype}, backend {backend}"
            _in_a_token(where, lambda tokens: case.forward(tokens, backend).transpose(1, 2), clean)  # noqa: B023
            net = LayerStack(build.in_attention(), 1, encoding, backend=backend).to(dtype)
            for name in _spoiled(encoding, whole=True):
                if math.isfinite(float(net(clean["x"], 0).sum())):
                    raise LawBroken(f"NaN in {name}, {where}: the loss is finite")


def _in_a_token(
    where: str, forward: Callable[[Named], Tensor], clean: Named, values: tuple[float, ...] = NOT_FINITE
) -> None:
    """NaN in a number of each tensor at a token: its output [B, L, ...] is not finite in any head; other rows are unchanged."""
    want = forward(clean)
    for value in values:
        bad = {name: x.clone() for name, x in clean.items()}
        for x in bad.values():
            x[0, ..., AT, :1] = value
        out = forward(bad)
        if bool(out[0, AT].isfinite().all(-1).any()):
            raise LawBroken(f"{value} in a token, {where}: its output is finite")
        close(f"{value} in a token, {where}: another row", out[1], want[1])


def _spoiled(module: torch.nn.Module, whole: bool = False) -> Iterator[str]:
    """The name of each parameter, with a NaN in its first number, or in all, until the next one."""
    for name, p in module.named_parameters():
        kept = p.clone()
        p.view(-1)[: None if whole else 1] = math.nan
        yield name
        p.copy_(kept)


DOCUMENTS = {
    "between": torch.tensor([[0] * 5 + [1] * 4 + [-1] + [2] * 7 + [-1] * 2, [-1] * 3 + [0] * 4 + [1] * 6 + [2] * 6]),
    "behind": torch.tensor([[0] * 6 + [1] * 4 + [2] * 7 + [-1] * 2, [0] * 7 + [1] * 6 + [2] * 6]),
}
"""Documents with padding in front and between, and those that backends cut out one by one."""


@shared_law(threshold=1e-9, needs=CACHES)
def nan_in_documents(build: MixerExample, paddings: tuple[str, ...] | None = None) -> None:
    """NaN and infinities in one document, or at padding, reach no output and no gradient of any other document's tokens.

    This is true for any loss, also if only a gradient is not finite; padding reaches no gradient of a parameter. Tried in every
    form, on every backend (for an encoding), with and without the C kernels, in full passes and token by token with a cache. A
    recurrence loses the same outputs in all cases: those of the token, and of later tokens in its document.
    paddings: "between", "behind"; None: both for an encoding, "between" for a mixer.
    """
    of_encoding = isinstance(build.encoding, Example)
    backends = [*BACKENDS] if of_encoding else []
    paddings = paddings or (tuple(DOCUMENTS) if of_encoding else ("between",))
    kernels = (nullcontext, without_loops) if build.has("mode") else (nullcontext,)
    values = {True: NOT_FINITE, False: NOT_FINITE[:1]}  # all in the first form, NaN alone in the others
    first = True
    for (form, options), loops, padding in product(build.forms((5,), backends).items(), kernels, paddings):
        with loops():
            net, documents = LayerStack(build, **options), DOCUMENTS[padding]
            try:
                clean = _everything(net, numbers(*documents.shape, DIM), documents)
            except ValueError:
                if not of_encoding:
                    raise
                continue  # the backend does not support the call
            _stays_in_its_document(f"{form}, {loops.__name__}", net, documents, clean, values[first])
            first = False


def _stays_in_its_document(
    here: str, net: LayerStack, documents: Tensor, clean: Named, values: tuple[float, ...]
) -> None:
    x = numbers(*documents.shape, DIM)
    second, padding = documents == 1, documents < 0
    bad = second & (second.cumsum(1) == 2)  # a token in the middle of each
    behind = second & (second.cumsum(1) >= 2)
    for value in values:
        what = f"{value} in a document, {here}"
        answers = _everything(net, x.masked_fill(bad[..., None], value), documents)
        _same_elsewhere(what, answers, clean, ~(second | padding))
        finite = [answers[name].isfinite().all(-1) for name in ("output", SINGLE)]
        if not net.mixer.saturates and any(bool(x[bad].any()) for x in finite):
            raise LawBroken(f"{what}: its own output is finite")
        if hasattr(net.mixer, "mode") and any(bool((x == behind).any()) for x in finite):
            raise LawBroken(f"{what}: expected NaN in its own and all later outputs of its document alone")
        what = f"{value} at padding, {here}"
        answers = _everything(net, x.masked_fill(padding[..., None], value), documents)
        _same_elsewhere(what, answers, clean, ~padding)
        for name in clean.keys() - {"output", "gradient of x", SINGLE}:
            close(f"{what}, {name}", answers[name], clean[name])
    for where, lost, others in (("a document", bad, ~(second | padding)), ("padding", padding, ~padding)):
        answers = _everything(net, x, documents, lost)
        _same_elsewhere(f"a gradient of NaN in {where}, {here}", answers, clean, others)


def _same_elsewhere(what: str, answers: Named, clean: Named, others: Tensor) -> None:
    for name in (name for name in ("output", "gradient of x", SINGLE) if name in answers):
        close(f"{what}, {name}", answers[name][others], clean[name][others])


SINGLE = "token by token"


def _everything(net: LayerStack, x: Tensor, documents: Tensor, lost: Tensor | None = None) -> Named:
    """Outputs in a full pass and with a cache; gradients of a nonlinear loss, for parameters of a loss without padding.

    lost: tokens for which the loss is NaN.
    """
    positions = places_of(documents).clamp(min=0)
    direction, real = numbers(*x.shape, seed=9), (documents >= 0)[..., None]
    if lost is not None:
        direction = direction.masked_fill(lost[..., None], math.nan)
    x = x.detach().requires_grad_()
    out = net(x, positions, documents)
    [of_x] = torch.autograd.grad((out.sin() * direction).sum(), x, retain_graph=True)
    of_parameters = with_gradients(lambda: out, learned_of(net), direction=direction * real)
    answers = {**of_parameters, "output": out.detach(), "gradient of x": of_x}
    if lost is not None:  # decoding has no loss
        return answers
    with torch.no_grad():
        single = net.in_chunks(x, range(x.shape[1] + 1), lambda a, b: positions[:, a:b], documents)
    return answers | {SINGLE: single}


@MIXER_LAWS.law(name="nan_and_inf", threshold=1e-5)
@torch.no_grad()
def nan_and_inf_in_mixers(build: MixerExample) -> None:
    """NaN or an infinity in a token: that token's output is not finite, and other rows are as without it.

    NaN in the first number of any parameter: the loss is not finite. In float32 and float64, in every form. Mixers that
    saturate are tested with NaN alone.
    """
    ways = [(name, options, torch.float32) for name, options in build.forms((4,)).items()]
    ways.append((*next(iter(build.forms((16,)).items())), torch.float64))
    for name, options, dtype in ways:
        mixer = build(**options).to(dtype)
        where = f"{name}, {dtype}".removeprefix(", ")
        around = {"encoding": build.encodings(mixer).to(dtype), "positions": 0}
        x = numbers(2, LENGTH, DIM).to(dtype)
        values = (math.nan,) if mixer.saturates else NOT_FINITE
        _in_a_token(where, lambda tensors: mixer(tensors["x"], **around), {"x": x}, values)  # noqa: B023
        for parameter in _spoiled(mixer):
            if math.isfinite(float(mixer(x, **around).sum())):
                raise LawBroken(f"NaN in {parameter}, {where}: the loss is finite")
