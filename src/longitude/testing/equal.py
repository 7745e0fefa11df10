"""Laws of sameness: one answer on every backend, in pieces, padded, packed, and in any batch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.masks import Causal, Documents, Mask, NoMask, Padding, Window
from longitude.attention.operation import attend, refusal, requests
from longitude.positions.composed import compose
from longitude.testing.fixtures import (
    SHAPES,
    Example,
    LawBroken,
    Named,
    Stack,
    close,
    differentiable,
    heads_and_tokens,
    learned_of,
    numbers,
    parameters_of,
    refused,
    small_blocks,
    with_gradients,
)


def masks(batch: int, keys: int, causal_only: bool) -> dict[str, Mask]:
    """Every kind of mask, at a size: spans, free predicates, unions, rows that differ, queries with nothing to look at."""
    token = torch.arange(keys)
    third, half = max(1, keys // 3), max(1, keys // 2)
    ids = token // third
    own_ids = torch.stack([ids, token // half, *[ids] * batch][:batch])
    pads = torch.stack([token >= min(2, keys - 1), token >= 0, *[token >= 1] * batch][:batch])
    again = Documents(token // third % 2)  # documents that come back
    holes = Padding(token % 3 != 0)  # the first query sees nothing
    kinds: dict[str, Mask] = {
        "causal": Causal(),
        "window": Window(3),
        "documents": Causal() & Documents(ids),
        "documents by row": Window(half) & Documents(own_ids),
        "padding": Causal() & Padding(pads),
        "padding on the right": Causal() & Padding(pads.flip(1)),
        "window, padding on the right": Window(half) & Padding(pads.flip(1)),
        "padded documents": Causal() & Documents(own_ids) & Padding(pads),
        "documents that come back": Causal() & again,
        "holes": Causal() & holes,
        "union": Causal() & (Window(2) | Documents(ids)),
    }
    if not causal_only:
        kinds |= {
            "none": NoMask(),
            "documents both ways": Documents(own_ids),
            "padding both ways": Padding(pads),
            "union both ways": Window(2) | Documents(ids) & Padding(pads),
            "another order": Causal(order=(token * 5 + 2) % keys) if keys % 5 else Causal(),
        }
    return kinds


PRECISIONS = ((torch.float64, 1e-10), (torch.float32, 2e-4))
LENGTHS = ((1, 1), (7, 7), (63, 63), (5, 12))


def law_backends(
    build: Example, lengths: tuple[tuple[int, int], ...] = LENGTHS, kinds: tuple[str, ...] | None = None
) -> str | None:
    """Law 2. Every backend that accepts equals `reference` in float64, forward and every gradient: of queries, keys, values,
    of the tokens that context reads, and of each parameter. In float32 too, as near as float32 can be. One that refuses
    raises a ValueError that names those that work. kinds: names of masks, where not all.
    """
    for rows, keys in lengths:
        q, k, v, x = heads_and_tokens(rows, keys)
        for kind, mask in masks(q.shape[0], keys, compose(build()).causal_only).items():
            if kinds is not None and kind not in kinds:
                continue
            exact = build().float().double()
            where = f"{rows} queries, {keys} keys, mask {kind}"
            truth = _answer(exact, differentiable(q=q, k=k, v=v, x=x), mask, "reference")
            # float32 where it tells more than float64 and no pair of so many stands at a kink (relu, floor) by chance.
            for dtype, tolerance in PRECISIONS[: 2 if 12 <= keys <= 100 else 1]:
                encoding = build().float().to(dtype)
                inputs = differentiable(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), x=x.to(dtype))
                for name in BACKENDS:
                    here = f"backend {name}, {dtype}, {where}"
                    if (refusal := refusal_of(encoding, inputs, mask, name)) is None:
                        with small_blocks(max(3, keys // 4), q.shape[0], keys):
                            close(here, _answer(encoding, inputs, mask, name), truth, tolerance)
                        continue
                    message = refused(here, lambda: _answer(encoding, inputs, mask, name), refusal)  # noqa: B023
                    named, taken = message.rsplit("; ", 1)[1].split(" can, and 'auto' takes ")
                    able = [b for b in BACKENDS if refusal_of(encoding, inputs, mask, b) is None]
                    if [b for b in BACKENDS if repr(b) in named] != able or taken not in map(repr, able):
                        raise LawBroken(f"{here}: expected a refusal that names {able}, which work, got {message!r}")
                    with torch.no_grad():  # some need no gradients to accept
                        if refusal_of(encoding, inputs, mask, name) is None:
                            got = _answer(encoding, inputs, mask, name)["output"]
                            close(f"{here}, without gradients", got, truth["output"], tolerance)
    return None


def _context(encoding: torch.nn.Module, inputs: Named, mask: Mask) -> dict[str, Tensor]:
    documents = documents_of(mask, inputs["x"])
    return compose(encoding).context(inputs["x"], None, documents)[0]  # type: ignore[arg-type]


def documents_of(mask: Mask, x: Tensor) -> Tensor | None:
    """The documents [B, Lk] of a mask that joins any by &: a stream starts again at each."""
    for part in mask.parts():
        if isinstance(part, Documents):
            return part.ids.expand(x.shape[:2])
    return None


def _answer(encoding: torch.nn.Module, inputs: Named, mask: Mask, backend: str) -> Named:
    def forward() -> Tensor:
        context = _context(encoding, inputs, mask)
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, encoding=encoding, context=context, mask=mask, backend=backend)  # type: ignore[arg-type]

    return with_gradients(forward, {**inputs, **parameters_of(encoding)} if torch.is_grad_enabled() else {})


def refusal_of(encoding: torch.nn.Module, inputs: Named, mask: Mask, backend: str) -> str | None:
    context = _context(encoding, inputs, mask)
    q, k, v = (inputs[name] for name in "qkv")
    parts = requests(q, k, v, encoding, context, mask, None, None, None, 0.0, False)  # type: ignore[arg-type]
    return refusal(BACKENDS[backend], [part.request for part in parts])


def law_queries_are_last(build: Example) -> str | None:
    """Law 3. With fewer queries than keys, and positions not said or said of the keys alone, queries are the last."""
    length = 9
    encoding = build()
    q, k, v, x = heads_and_tokens(length, length)
    with torch.no_grad():
        context = encoding.context(x)[0]
        for said in ({}, {"k_positions": 4}, {"k_positions": torch.arange(length) * 2 + 1}):
            for mask in (Causal(), Window(3)):
                options: dict = {"encoding": encoding, "context": context, "mask": mask, **said}
                whole = attend(q, k, v, **options)
                for rows in (1, 4):
                    close(
                        f"the last {rows} queries alone, {said}",
                        attend(q[:, :, -rows:], k, v, **options),
                        whole[:, :, -rows:],
                    )
    return None


def law_pieces(build: Example) -> str | None:
    """Law 3. The whole pass = chunked prefill = one token at a time with the cache, in two layers with grouped heads; from
    position 0 and from a later one, with positions as an int and as a tensor, and in a left-padded batch.
    """
    try:
        from longitude.attention.cache import LongitudeCacheLayer
    except ImportError:
        return "the cache needs transformers: pip install 'longitude[models]'"
    length, stack = 13, Stack(build())
    x = numbers(3, length, SHAPES["dim"])
    token = torch.arange(length)
    padding = torch.tensor([0, 2, 9])[:, None]  # of each row; the last is still padding in the second piece
    packed = torch.where(token < padding, -1, 0)
    steps = {"pieces": (0, 6, 7, length), "one by one": tuple(range(length + 1))}
    settings = {
        "": (lambda a, b: a, None),
        "from position 7": (lambda a, b: 7 + a, None),
        "positions as a tensor": (lambda a, b: token[a:b] * 2 + 1, None),
        "left-padded": (lambda a, b: (token - padding).clamp(min=0)[:, a:b], packed),
    }
    for setting, (at, documents) in settings.items():
        seen = 1.0 if documents is None else (documents >= 0)[..., None]
        with torch.no_grad():
            whole = stack(x, at(0, length), documents=documents)
            for kind, cuts in steps.items():
                caches = [LongitudeCacheLayer() for _ in stack.layers]
                parts = [
                    stack(x[:, a:b], at(a, b), documents=None if documents is None else documents[:, :b], caches=caches)
                    for a, b in pairwise(cuts)
                ]
                close(f"whole pass and {kind} {setting}", torch.cat(parts, 1) * seen, whole * seen)
    return None


def _alone(stack: Stack, rows: list[Tensor]) -> list[Named]:
    """Each sequence [1, L, dim] by itself."""
    answers = []
    for row in rows:
        inputs = differentiable(x=row)
        answers.append(with_gradients(lambda x=inputs["x"]: stack(x), {**inputs, **learned_of(stack)}))
    return answers


def _same_as_alone(what: str, together: Named, alone: list[Named], places: list[tuple[int, slice]]) -> None:
    """Outputs and gradients of inputs at (row, tokens); gradients of parameters add up."""
    for n, (row, tokens) in enumerate(places):
        for name in ("output", "gradient of x"):
            close(f"{what}, sequence {n}, {name}", together[name][row, tokens], alone[n][name][0])
    for name in together.keys() - {"output", "gradient of x"}:
        close(f"{what}, {name}", together[name], sum(a[name] for a in alone))  # type: ignore[arg-type]


def law_padding(build: Example) -> str | None:
    """Law 4. Padded on the left or right = not padded, whatever stands in the padding; forward and gradients."""
    stack = Stack(build())
    lengths, width = (5, 9, 1), 9
    rows = [numbers(1, n, SHAPES["dim"], seed=n) for n in lengths]
    for side in ("left", "right"):
        x = 50 * numbers(len(rows), width, SHAPES["dim"], seed=5)
        documents = torch.full((len(rows), width), -1)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        places = []
        for b, (n, row) in enumerate(zip(lengths, rows, strict=True)):
            tokens = slice(width - n, width) if side == "left" else slice(0, n)
            x[b, tokens], documents[b, tokens], positions[b, tokens] = row[0], 0, torch.arange(n)
            places.append((b, tokens))
        _together(f"{side}-padded and alone", stack, x, positions, documents, rows, places)
    return None


def law_packing(build: Example) -> str | None:
    """Law 4. Documents packed into one row = documents alone; forward and gradients. Also where padding follows."""
    stack = Stack(build())
    lengths = ((4, 6, 1), (7, 2))
    rows, places = [], []
    x = 50 * numbers(2, 12, SHAPES["dim"], seed=5)
    documents, positions = torch.full((2, 12), -1), torch.zeros(2, 12, dtype=torch.long)
    for b, own in enumerate(lengths):
        start = 0
        for d, n in enumerate(own):
            rows.append(numbers(1, n, SHAPES["dim"], seed=10 * b + d))
            tokens = slice(start, start + n)
            x[b, tokens], documents[b, tokens], positions[b, tokens] = rows[-1][0], d, torch.arange(n)
            places.append((b, tokens))
            start += n
    _together("packed and alone", stack, x, positions, documents, rows, places)
    return None


def _together(
    what: str, stack: Stack, x: Tensor, positions: Tensor, documents: Tensor, rows: list[Tensor], places: list
) -> None:
    seen = torch.zeros(*x.shape[:2], 1, dtype=x.dtype)
    inputs = differentiable(x=x)
    out = stack(inputs["x"], positions, documents=documents)
    direction = torch.zeros_like(out)
    for b, tokens in places:
        seen[b, tokens] = 1
        length = tokens.stop - tokens.start
        direction[b, tokens] = numbers(length, x.shape[2], seed=9)  # as with_gradients takes for the sequence alone
    wanted = {**inputs, **learned_of(stack)}
    grads = torch.autograd.grad((out * direction).sum(), list(wanted.values()), allow_unused=True)
    together = {"output": out.detach()} | {
        f"gradient of {name}": torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(wanted.items(), grads, strict=True)
    }
    close(f"{what}, gradient of padding", together["gradient of x"] * (1 - seen), torch.zeros_like(x))
    _same_as_alone(what, together, _alone(stack, rows), places)


def law_rows(build: Example) -> str | None:
    """Law 4. A row of a batch = the row alone; forward and gradients."""
    stack = Stack(build())
    x = numbers(3, 7, SHAPES["dim"])
    inputs = differentiable(x=x)
    together = with_gradients(lambda: stack(inputs["x"]), {**inputs, **learned_of(stack)})
    places = [(b, slice(0, 7)) for b in range(3)]
    _same_as_alone("batch and alone", together, _alone(stack, [x[b : b + 1] for b in range(3)]), places)
    return None
