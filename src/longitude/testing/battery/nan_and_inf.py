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
from longitude.attention.masks import AnyOf, Dilated, Documents, Mask, Padding, Prefix
from longitude.attention.operation import attend
from longitude.attention.pairs import is_band
from longitude.testing.attend_calls import Call, calls_with_every_mask
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

QUICK = ("causal", "documents by row", "global")
LENGTH, AT = 11, 5
"""Tokens, and the one that is not finite."""
NOT_FINITE = (math.nan, math.inf, -math.inf)


@ENCODING_LAWS.law(name="nan_and_inf", threshold=1e-6)
@torch.no_grad()
def nan_and_inf_in_attention(build: Example, kinds: tuple[str, ...] | None = QUICK) -> None:
    """A NaN shows in the output of every query that attends to it, on every backend, and in no other sequence.

    The NaN is in a query, key or value; an infinity reaches no other sequence either. Neither reaches a query from which a mask
    of documents, padding or any pairs hides it. (Causality and windows hide by a weight of 0, and 0 * NaN is NaN: a later token
    of a document may taint a query, as in torch's attention.) A NaN in a token that context reads, or in a parameter, shows in
    every output that depends on it. kinds: kinds of masks; None: all.
    """
    encoding, tensors = build(), heads_and_tokens(LENGTH, LENGTH)
    token = torch.arange(LENGTH)
    for kind, case in calls_with_every_mask(encoding, tensors, kinds):
        backends = case.able()
        allowed = case.mask.allowed(token, token).expand(2, 1, LENGTH, LENGTH)[:, 0]
        for name in "qkv":
            dependent = (allowed.any(-1) & (token == AT)) if name == "q" else allowed[:, :, AT].clone()
            dependent[1] = False  # the other sequence
            near = _near(case.mask, dependent, name == "q")
            for value in (math.nan, math.inf):
                for backend in backends:
                    here = f"backend {backend}, mask {kind}, {value} in {name} of token {AT}"
                    lost = _lost(case, name, value, backend)
                    _require_lost(here, lost, dependent & math.isnan(value))
                    if bool((far := lost & ~near).any()):
                        lost_at = f"outputs at {far.nonzero().tolist()} are not finite"
                        raise LawBroken(f"{here}: {lost_at}, but the token is hidden from them")
        if encoding.reads_tokens:
            want = _lost(case, "x", math.nan, "reference")
            for backend in ("reference", *backends):
                _require_lost(f"backend {backend}, mask {kind}, NaN in x", _lost(case, "x", math.nan, backend), want)
    _in_a_parameter(build, tensors)
    _in_whole_tokens(build, tensors)


def _near(mask: Mask, dependent: Tensor, of_query: bool) -> Tensor:
    """Outputs [B, L] that a NaN may reach: those that depend on it, and all of its document unless it is padding.

    And all of its sequence where a mask is made of causality or windows: these hide by weights of 0.
    """
    beyond = [m for m in mask.parts() if not is_band(m)]
    around = [m for m in beyond if isinstance(m, Documents | Padding)]
    with_band = any(
        isinstance(m, Prefix | Dilated) or (isinstance(m, AnyOf) and any(map(is_band, m.masks))) for m in beyond
    )
    if of_query or (len(around) < len(beyond) and not with_band):
        return dependent
    near = torch.ones_like(dependent)
    for m in around:
        numbers = getattr(m, m._columns[0]).expand(near.shape)
        near = near & (numbers == numbers[:, AT, None] if isinstance(m, Documents) else numbers[:, AT, None].bool())
    near[1] = False
    return near


def _lost(case: Call, name: str, value: float, backend: str) -> Tensor:
    """Which outputs [B, L] are not finite, in any head, where one number of the first sequence is not."""
    x = case.tensors[name].clone()
    x[(0, slice(None), AT, 1) if x.dim() == 4 else (0, AT, 1)] = value
    return ~case.forward({**case.tensors, name: x}, backend).isfinite().all(-1).all(1)


def _require_lost(here: str, lost: Tensor, dependent: Tensor) -> None:
    if bool(lost[1].any()):
        raise LawBroken(f"{here}: the other sequence of the batch is not finite, {lost.nonzero().tolist()}")
    if bool((finite := dependent & ~lost).any()):
        raise LawBroken(f"{here}: outputs at {finite.nonzero().tolist()} are finite, but depend on it")


def _in_a_parameter(build: Example, tensors: Named) -> None:
    """NaN in a parameter; under causality queries are computed separately, with their visible keys."""
    for name in learned_of(build()):
        spoiled = build()
        learned_of(spoiled)[name].view(-1)[-1] = math.nan
        case = Call(spoiled, tensors)
        context, alone = case.context(tensors["x"]), []
        for i in range(LENGTH):
            columns = {column: y[:, :, : i + 1] for column, y in context.items()}
            q, k, v = (tensors[name][:, :, i * (name == "q") : i + 1] for name in "qkv")
            alone.append(attend(q, k, v, encoding=spoiled, context=columns, backend="reference"))
        want = ~torch.cat(alone, 2).isfinite().all(-1)
        for backend in case.able():
            missed = want & case.forward(tensors, backend).isfinite().all(-1)
            if bool(missed.any()):
                raise LawBroken(f"backend {backend}, NaN in {name}: finite outputs at {missed.nonzero().tolist()}")


def _in_whole_tokens(build: Example, tensors: Named) -> None:
    """NaN in all tensors of a token, also in float32: on every backend its output is not finite, other rows are unchanged.

    NaN in all of a parameter: the loss is not finite.
    """
    for dtype in (torch.float32, torch.float64):
        encoding = build().to(dtype)
        clean = {name: x.to(dtype) for name, x in tensors.items()}
        case, token = Call(encoding, clean), torch.arange(LENGTH)
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
