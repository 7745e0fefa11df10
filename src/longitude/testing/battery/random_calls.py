"""The law of calls drawn at random: shapes, grouped heads, trees of masks, positions out of order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longitude.attention.masks import (
    Band,
    Causal,
    Chunks,
    Documents,
    Global,
    Mask,
    NoMask,
    Padding,
    Pairs,
    Prefix,
    Window,
)
from longitude.positions.composed import compose
from longitude.testing.attend_calls import Call
from longitude.testing.engine import LawBroken
from longitude.testing.examples import ENCODING_LAWS, SHAPES, Example
from longitude.testing.fixtures import Named, close, numbers, small_blocks


# ---- what is drawn -------------------------------------------------------------------------------------------------------
def draw(build: Example, seed: int, longest: int = 24) -> Call:
    """The random call of this seed: at most 3 sequences of at most `longest` keys."""
    r = random.Random(seed)
    encoding = build(seed)
    composed = compose(encoding)
    batch, keys = r.randint(1, 3), r.choice([1, 2, r.randint(3, 12), r.randint(8, longest)])
    rows = r.choice([keys, keys, 1, r.randint(1, keys)])
    among = (
        composed.causal_only or composed.query_columns
    )  # query columns are computed from tokens, which are keys as well
    late = not among and r.random() < 0.1  # some masks allow queries that are no keys
    rows = keys + r.randint(1, 5) if late else rows
    kv_heads = SHAPES["num_kv_heads"]
    if "num_kv_heads" not in build.resolved():
        kv_heads = r.choice([1, 2, SHAPES["num_heads"]])
    tensors = {
        "q": numbers(batch, SHAPES["num_heads"], rows, SHAPES["head_dim"], seed=seed),
        "k": numbers(batch, kv_heads, keys, SHAPES["head_dim"], seed=seed + 1),
        "v": numbers(batch, kv_heads, keys, SHAPES["head_dim"], seed=seed + 2),
        "x": numbers(batch, keys, SHAPES["dim"], seed=seed + 3),
    }
    mask, documents = masks(r, batch, rows, keys, composed.causal_only)
    options = positions(r, batch, rows, keys, composed)
    for name in "qkv":  # as layers make them, or one sequence for all
        x, kind = tensors[name], r.random()
        tensors[name] = (
            x.transpose(1, 2).contiguous().transpose(1, 2) if kind < 0.4 else x[:1].expand(x.shape) if kind > 0.9 else x
        )
    if r.random() < 0.1:
        tensors["v"] = tensors["v"] * (torch.arange(SHAPES["head_dim"]) > 0)  # an output of zeros that is right
    if r.random() < 0.3:
        options["scale"] = r.choice([1.0, 0.1, 0.5 if composed.query_columns else 0.0, -0.5])  # such a mix refuses 0
    if r.random() < 0.3:
        options["return_lse"] = True
    return Call(encoding, tensors, mask, documents, options)


def masks(r: random.Random, batch: int, rows: int, keys: int, causal: bool) -> tuple[Mask, Tensor | None]:
    """A tree of masks, and the documents [B, Lk] in which a stream starts again, if the mask has any."""
    token = torch.arange(keys)
    bits = torch.Generator().manual_seed(r.randrange(2**31))

    def chance(p: float) -> Tensor:
        return torch.rand(r.choice([(keys,), (batch, keys), (1, keys)]), generator=bits) < p

    def ids() -> Tensor:
        return chance(0.25).long().cumsum(-1)

    def ends() -> Tensor:
        return torch.randint(keys + 1, (r.choice([1, batch]), 1), generator=bits)

    spans: list[Callable[[], Mask]] = [  # joined by & alone, fused backends compute them span by span
        Causal,
        NoMask,
        lambda: Window(r.randint(1, keys + 2)),
        lambda: Padding(token >= ends()),
        lambda: Padding(token < ends()),
        *[lambda: Documents(ids())] * (rows <= keys),
    ]
    atoms = [
        *spans,
        lambda: Padding(chance(r.choice([0.0, 0.7]))),
        lambda: Band(r.randint(0, 4), r.randint(0, 4)),
    ]
    among: list[Callable[[], Mask]] = [
        lambda: Documents(ids() % 2),
        lambda: Prefix(ends()[:, 0] if r.random() < 0.5 else r.randint(0, keys + 2)),
        lambda: Global(chance(0.2) if r.random() < 0.5 else [r.randrange(keys)]),
        lambda: Chunks(r.randint(1, keys), token % r.randint(1, keys)),
        lambda: Pairs(torch.rand(keys, keys, generator=bits) < 0.5, 0, 0),
    ]
    atoms += among if rows <= keys else []

    def tree(depth: int) -> Mask:
        if depth == 0 or r.random() < 0.3:
            return r.choice(atoms)()
        a, b = tree(depth - 1), tree(depth - 1)
        return a & b if r.random() < 0.6 else a | b

    mask = tree(2) if r.random() < 0.6 else r.choice(spans)() & r.choice(spans)()
    if rows <= keys and r.random() < 0.2:
        mask = mask | Global([r.randrange(keys)])
    if causal or r.random() < 0.5:
        mask = Causal() & mask
    documents = [part.ids for part in mask.parts() if isinstance(part, Documents)]
    steady = documents and bool((documents[0].diff(dim=-1) >= 0).all())  # else they come back, which streams do not
    return mask, documents[0].expand(batch, keys) if steady else None


def positions(r: random.Random, batch: int, rows: int, keys: int, encoding: Any) -> dict[str, Any]:
    """None given, ints, or tensors [L] and [B, L] (with axes too) that jump, repeat, restart, or are out of order."""
    far = (encoding.max_length or 200) - 1
    bits = torch.Generator().manual_seed(r.randrange(2**31))

    def drawn(length: int) -> Tensor:
        token, first = torch.arange(length), r.randint(0, 9)
        kinds = [
            first + token,
            first + token * r.randint(0, 3),
            torch.randint(0, min(far, r.choice([4, 40])), (length,), generator=bits),
            torch.randperm(length, generator=bits),
            (token - first).clamp(min=0),
            token % (first + 1),
            first + length - 1 - token,
        ]
        return r.choice(kinds).clamp(max=far)

    def tensor(length: int) -> Tensor:
        made = drawn(length) if r.random() < 0.5 else torch.stack([drawn(length) for _ in range(batch)])
        if encoding.axes > 1 and r.random() < 0.5:
            made = torch.stack([made, *(made.flip(-1) for _ in range(encoding.axes - 1))], -1)
            return made if made.dim() == 3 else made[None]
        if encoding.axes > 1:
            return made[..., None] if made.dim() == 2 else made[None, :, None]
        made = made.int() if r.random() < 0.1 else made
        return made.expand(batch, length) if r.random() < 0.1 else made

    kind = r.choice(["nothing", "int", "keys", "both", "both", "independent"])
    if kind == "nothing":
        return {}
    if kind == "int":
        return (
            {"q_positions": r.randint(keys, keys + 50)}
            if r.random() < 0.5
            else {"k_positions": r.randint(rows, rows + 50)}
        )
    if kind == "independent" or rows > keys:
        return {"q_positions": tensor(rows), "k_positions": tensor(keys)}
    k_positions = tensor(keys)
    last = k_positions[..., keys - rows :] if k_positions.dim() < 3 else k_positions[:, keys - rows :]
    return {"k_positions": k_positions} | ({} if kind == "keys" else {"q_positions": last})


# ---- the law -------------------------------------------------------------------------------------------------------------
@ENCODING_LAWS.law(threshold=1e-8)
def random_calls(build: Example, draws: range = range(3), longest: int = 24) -> None:
    """Random calls of attend: every backend equals `reference` called for each sequence alone.

    Forward and every gradient; `auto` too. No call raises anything once it is accepted, nor changes an argument or a setting.
    draws: their numbers; longest: keys, at most.
    """
    for seed in draws:
        case = draw(build, seed, longest)
        truth: Named = {}
        for name in ("reference", "auto", *case.able()):
            here = f"draw {seed}, backend {name}"
            try:
                if not truth:
                    truth = _by_row(case)
                with small_blocks(1 + seed % 5, *case.tensors["k"].shape[:3:2]):
                    got = case.answer(name)
            except LawBroken as e:
                raise LawBroken(f"draw {seed}, {e}") from e
            except Exception as e:
                raise LawBroken(f"{here}: {type(e).__name__}: {e}; {case}") from e
            close(f"{here}, {case}", got, truth)


def _by_row(case: Call) -> Named:
    rows = [case.row(b).answer("reference") for b in range(len(case.tensors["q"]))]
    inputs = {"output", *(f"gradient of {name}" for name in case.tensors)}
    return {
        name: torch.cat([row[name] for row in rows]) if name in inputs else sum(row[name] for row in rows)
        for name in rows[0]
    }  # type: ignore[return-value]
