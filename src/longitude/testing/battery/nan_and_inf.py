"""Laws of NaN and infinities: they show in what depends on them, and in no other sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from longitude.attention.operation import attend
from longitude.testing.attend_calls import Call, calls_with_every_mask
from longitude.testing.engine import LawBroken
from longitude.testing.examples import DIM, Example, MixerExample
from longitude.testing.fixtures import LayerStack, Named, close, heads_and_tokens, learned_of, numbers
from longitude.testing.parts import ENCODING_LAWS, MIXER_LAWS

QUICK = ("causal", "documents by row", "global")
LENGTH, AT = 11, 5
"""Tokens, and the one that is not finite."""
NOT_FINITE = (math.nan, math.inf, -math.inf)


@ENCODING_LAWS.law(name="nan_and_inf", threshold=1e-6)
@torch.no_grad()
def nan_and_inf_in_attention(build: Example, kinds: tuple[str, ...] | None = QUICK) -> None:
    """A NaN shows in the output of every query that attends to it, on every backend, and in no other sequence.

    In a query, key or value; an infinity leaves other sequences alone, too. (Within a sequence a mask hides by a weight of 0, and
    0 * NaN is NaN: what a query must not see may taint it, as in torch's own attention.) A NaN in a token that context reads, or
    in a learned number, shows in every output that depends on it. kinds: of masks; None: all.
    """
    encoding, tensors = build(), heads_and_tokens(LENGTH, LENGTH)
    token = torch.arange(LENGTH)
    for kind, case in calls_with_every_mask(encoding, tensors, kinds):
        backends = case.able()
        allowed = case.mask.allowed(token, token).expand(2, 1, LENGTH, LENGTH)[:, 0]
        for name in "qkv":
            dependent = (allowed.any(-1) & (token == AT)) if name == "q" else allowed[:, :, AT].clone()
            dependent[1] = False  # the other sequence
            for value in (math.nan, math.inf):
                for backend in backends:
                    here = f"backend {backend}, mask {kind}, {value} in {name} of token {AT}"
                    _require_lost(here, _lost(case, name, value, backend), dependent & (value != value))
        if encoding.reads_tokens:
            want = _lost(case, "x", math.nan, "reference")
            for backend in ("reference", *backends):
                _require_lost(f"backend {backend}, mask {kind}, NaN in x", _lost(case, "x", math.nan, backend), want)
    _in_a_parameter(build, tensors)
    _in_whole_tokens(build, tensors)


def _lost(case: Call, name: str, value: float, backend: str) -> Tensor:
    """Which outputs [B, L] are not finite, in any head, where one number of the first sequence is not."""
    x = case.tensors[name].clone()
    x[(0, slice(None), AT, 1) if x.dim() == 4 else (0, AT, 1)] = value
    return ~case.forward({**case.tensors, name: x}, backend).isfinite().all(-1).all(1)


def _require_lost(here: str, lost: Tensor, dependent: Tensor) -> None:
    if bool(lost[1].any()):
        raise LawBroken(f"{here}: the other sequence of the batch is not finite, {lost.nonzero().tolist()}")
    if bool((finite := dependent & ~lost).any()):
        raise LawBroken(f"{here}: finite outputs at {finite.nonzero().tolist()}, which depend on it")


def _in_a_parameter(build: Example, tensors: Named) -> None:
    """Under causality each query may be computed alone, with the keys that it attends to."""
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
    """In all that a token brings, also in float32: on every backend its output is not finite, other rows are as without it.

    NaN all over any parameter: the loss is not finite.
    """
    for dtype in (torch.float32, torch.float64):
        encoding = build().to(dtype)
        clean = {name: x.to(dtype) for name, x in tensors.items()}
        case, token = Call(encoding, clean), torch.arange(LENGTH)
        if encoding.at_input:
            _in_a_token(f"{dtype}, at the input", lambda given: encoding.embed(given["x"], token), clean)  # noqa: B023
        for backend in case.able():
            where = f"{dtype}, backend {backend}"
            _in_a_token(where, lambda given: case.forward(given, backend).transpose(1, 2), clean)  # noqa: B023
            net = LayerStack(build.in_attention(), 1, encoding, backend=backend).to(dtype)
            for name in _spoiled(encoding, whole=True):
                if math.isfinite(float(net(clean["x"], 0).sum())):
                    raise LawBroken(f"NaN in {name}, {where}: the loss is finite")


def _in_a_token(
    where: str, forward: Callable[[Named], Tensor], clean: Named, values: tuple[float, ...] = NOT_FINITE
) -> None:
    """In one number of each tensor at a token: its output [B, L, ...] is not finite in any head; another row as without."""
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


@MIXER_LAWS.law(name="nan_and_inf", threshold=1e-5)
@torch.no_grad()
def nan_and_inf_in_mixers(build: MixerExample) -> None:
    """NaN or an infinity in a token: that token's output is not finite, and other rows are as without it.

    NaN in the first number of any parameter: the loss is not finite. In float32 and float64, in every form. What saturates is
    held to NaN alone.
    """
    ways = [(name, options, torch.float32) for name, options in build.forms((4,)).items()]
    ways.append((*next(iter(build.forms((16,)).items())), torch.float64))
    for name, options, dtype in ways:
        mixer = build(**options).to(dtype)
        where = f"{name}, {dtype}".removeprefix(", ")
        around = {"encoding": build.encodings(mixer).to(dtype), "positions": 0}
        x = numbers(2, LENGTH, DIM).to(dtype)
        values = (math.nan,) if mixer.saturates else NOT_FINITE
        _in_a_token(where, lambda given: mixer(given["x"], **around), {"x": x}, values)  # noqa: B023
        for parameter in _spoiled(mixer):
            if math.isfinite(float(mixer(x, **around).sum())):
                raise LawBroken(f"NaN in {parameter}, {where}: the loss is finite")
