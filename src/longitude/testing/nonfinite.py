"""The law of NaN and infinities: they reach what depends on them, and no other sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal
from longitude.attention.operation import attend
from longitude.positions.base import Encoding
from longitude.positions.composed import compose
from longitude.testing.draws import SLOW, Draw
from longitude.testing.dropout import every_mask
from longitude.testing.equal import documents_of, refusal_of
from longitude.testing.fixtures import Example, LawBroken, Named, Stack, close, heads_and_tokens, learned_of

QUICK = ("causal", "documents by row", "global")
TOKENS = 11
LENGTH, AT = 9, 4  # tokens, and the one that is not finite


def law_nonfinite(build: Example, kinds: tuple[str, ...] | None = QUICK) -> str | None:
    """Law 2. A NaN in a query, key or value reaches the output of every query that sees it, on every backend; neither it nor an
    infinity reaches another sequence of the batch. (Within a sequence a mask hides by a weight of 0, and 0 * NaN is NaN: what a
    query must not see may taint it, as in torch's own attention.) A NaN in a token that context reads, or in a learned number,
    reaches every output that depends on it, and no other sequence. kinds: of masks; None: all.
    """
    encoding = build()
    q, k, v, x = heads_and_tokens(LENGTH, LENGTH)
    token = torch.arange(LENGTH)
    for kind, mask in every_mask(2, LENGTH, compose(encoding).causal_only).items():
        if kinds is not None and kind not in kinds:
            continue
        case = Draw(encoding, {"q": q, "k": k, "v": v, "x": x}, mask, documents_of(mask, x))
        backends = [name for name in BACKENDS if name not in SLOW and case.refusal(name) is None]
        allowed = mask.allowed(token, token).expand(2, 1, LENGTH, LENGTH)
        for name in "qkv":
            dependent = (allowed[:, 0].any(-1) & (token == AT)) if name == "q" else allowed[:, 0, :, AT].clone()
            dependent[1] = False  # the other sequence
            for value in (math.nan, math.inf):
                for backend in backends:
                    lost = _lost(case, name, value, backend)
                    here = f"backend {backend}, mask {kind}, {value} in {name} of token {AT}"
                    _require(here, lost, dependent, exactly=value != value)
        if encoding.reads_tokens:
            _as_in_reference(case, backends, f"mask {kind}, NaN in x", "x")
    _learned(build, {"q": q, "k": k, "v": v, "x": x})
    _whole_tokens(build)
    return None


@torch.no_grad()
def _lost(case: Draw, name: str, value: float, backend: str) -> Tensor:
    """Which outputs [B, L] are not finite, in any head, where one number of the first sequence is not."""
    x = case.tensors[name].clone()
    x[(0, slice(None), AT, 1) if x.dim() == 4 else (0, AT, 1)] = value
    return ~case.forward({**case.tensors, name: x}, backend).isfinite().all(-1).all(1)


def _require(here: str, lost: Tensor, dependent: Tensor, exactly: bool) -> None:
    if bool(lost[1].any()):
        raise LawBroken(f"{here}: reached the other sequence of the batch, {lost.nonzero().tolist()}")
    if exactly and bool((dependent & ~lost).any()):
        raise LawBroken(f"{here}: did not reach {(dependent & ~lost).nonzero().tolist()}, which see it")


def _as_in_reference(case: Draw, backends: list[str], here: str, name: str) -> None:
    want = _lost(case, name, math.nan, "reference")
    if bool(want[1].any()):
        raise LawBroken(f"{here}: reached the other sequence of the batch")
    for backend in backends:
        if bool((want & ~(got := _lost(case, name, math.nan, backend))).any()) or bool(got[1].any()):
            raise LawBroken(
                f"backend {backend}, {here}: reached {got.nonzero().tolist()}, expected {want.nonzero().tolist()}"
            )


def _learned(build: Example, tensors: Named) -> None:
    """Under causality each query may be asked alone, with the keys that it sees."""
    q, k, v, x = tensors.values()
    for name in learned_of(build()):
        spoiled = build()
        with torch.no_grad():
            learned_of(spoiled)[name].view(-1)[-1] = math.nan
            case = Draw(spoiled, tensors, Causal(), None)
            context = case.context(x)
            alone = []
            for i in range(LENGTH):
                seen = {column: y[:, :, : i + 1] for column, y in context.items()}
                options: dict = {"encoding": spoiled, "context": seen, "backend": "reference"}
                alone.append(attend(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], **options))
            want = ~torch.cat(alone, 2).isfinite().all(-1)
            for backend in BACKENDS:
                if backend in SLOW or case.refusal(backend) is not None:
                    continue
                missed = want & case.forward(tensors, backend).isfinite().all(-1)
                if bool(missed.any()):
                    raise LawBroken(f"backend {backend}, NaN in {name}: did not reach {missed.nonzero().tolist()}")


def _whole_tokens(build: Example) -> None:
    """NaN or an infinity in all that a token brings, also in float32: on every backend its output is not finite, other rows are
    as without it. NaN all over any parameter: the loss is not finite.
    """
    here = TOKENS // 2
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            encoding = build().to(dtype)
            clean = {name: x.to(dtype) for name, x in zip("qkvx", heads_and_tokens(TOKENS, TOKENS), strict=True)}
            able = [name for name in BACKENDS if refusal_of(encoding, clean, Causal(), name) is None]
            want = {name: _attended(encoding, clean, name) for name in able}
            for value in (math.nan, math.inf, -math.inf):
                bad = {name: x.clone() for name, x in clean.items()}
                for x in bad.values():
                    x[0, ..., here, :1] = value
                if encoding.at_input and bool(_embedded(encoding, bad["x"])[0, here].isfinite().all()):
                    raise LawBroken(f"{value} in a token, {dtype}: what is made of it at the input is finite")
                for name in able:
                    out = _attended(encoding, bad, name)
                    if bool(out[0, :, here].isfinite().all(-1).any()):
                        raise LawBroken(f"{value} in a token, {dtype}, backend {name}: its output is finite")
                    close(f"{value} in a token, {dtype}, backend {name}: another row", out[1], want[name][1], 1e-6)
            for name, p in learned_of(encoding).items():
                for backend in able:
                    kept = p.clone()
                    p.fill_(math.nan)
                    if math.isfinite(float(Stack(encoding, backend, layers=1).to(dtype)(clean["x"]).sum())):
                        raise LawBroken(f"NaN in {name}, {dtype}, backend {backend}: the loss is finite")
                    p.copy_(kept)


def _attended(encoding: Encoding, given: dict[str, Tensor], backend: str) -> Tensor:
    context = encoding.context(given["x"])[0]
    return attend(*(given[name] for name in "qkv"), encoding=encoding, context=context, backend=backend)


def _embedded(encoding: Encoding, x: Tensor) -> Tensor:
    return encoding.embed(x, torch.arange(x.shape[1]))
