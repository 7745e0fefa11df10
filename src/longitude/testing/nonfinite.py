"""The law of NaN and infinities: they reach what depends on them, and nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal
from longitude.attention.operation import attend
from longitude.positions.composed import compose
from longitude.testing.draws import SLOW, Draw
from longitude.testing.dropout import every_mask
from longitude.testing.equal import documents_of
from longitude.testing.toys import Example, LawBroken, Named, heads_and_tokens, learned_of

QUICK = ("causal", "documents by row", "global")
LENGTH, AT = 9, 4  # tokens, and the one that is not finite


def law_masked_nonfinite(build: Example, kinds: tuple[str, ...] | None = QUICK) -> str | None:
    """Law 2. A NaN in a query, key or value reaches the output of every query that sees it, on every backend, and of no other,
    however it is masked; an infinity reaches no other either. A NaN in a token that context reads, or in a learned number,
    reaches every output that depends on it, and no other sequence. kinds: of masks; None: all."""
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
            reached = (allowed[:, 0].any(-1) & (token == AT)) if name == "q" else allowed[:, 0, :, AT].clone()
            reached[1] = False  # the other sequence
            for value in (math.nan, math.inf):
                for backend in backends:
                    lost = _lost(case, name, value, backend)
                    here = f"backend {backend}, mask {kind}, {value} in {name} of token {AT}"
                    _require(here, lost, reached, exactly=value != value)
        if encoding.reads_tokens:
            _as_in_reference(case, backends, f"mask {kind}, NaN in x", "x")
    _learned(build, {"q": q, "k": k, "v": v, "x": x})
    return None


@torch.no_grad()
def _lost(case: Draw, name: str, value: float, backend: str) -> Tensor:
    """Which outputs [B, L] are not finite, in any head, where one number of the first sequence is not."""
    x = case.tensors[name].clone()
    x[(0, slice(None), AT, 1) if x.dim() == 4 else (0, AT, 1)] = value
    return ~case.forward({**case.tensors, name: x}, backend).isfinite().all(-1).all(1)


def _require(here: str, lost: Tensor, reached: Tensor, exactly: bool) -> None:
    if bool((lost & ~reached).any()):
        raise LawBroken(f"{here}: reached outputs that do not see it, {(lost & ~reached).nonzero().tolist()}")
    if exactly and bool((reached & ~lost).any()):
        raise LawBroken(f"{here}: did not reach {(reached & ~lost).nonzero().tolist()}, which see it")


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
                said: dict = {"encoding": spoiled, "context": seen, "backend": "reference"}
                alone.append(attend(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], **said))
            want = ~torch.cat(alone, 2).isfinite().all(-1)
            for backend in BACKENDS:
                if backend in SLOW or case.refusal(backend) is not None:
                    continue
                missed = want & case.forward(tensors, backend).isfinite().all(-1)
                if bool(missed.any()):
                    raise LawBroken(f"backend {backend}, NaN in {name}: did not reach {missed.nonzero().tolist()}")
