"""Laws of streams: documents in one row and padding at either side are as if each sequence were alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longitude.attention.backends import BACKENDS
from longitude.attention.state_cache import StateLayer
from longitude.testing.fixtures import (
    LawBroken,
    Named,
    close,
    differentiable,
    error,
    learned_of,
    numbers,
    with_gradients,
)
from longitude.testing.mixers.fixtures import DIM, MixerExample, Network, random_cuts

NEAR = 1e-10
GARBAGE = 50.0


Rows = tuple[tuple[int, ...], ...]


def law_packing(build: MixerExample, rows: Rows = ((4, 26, 1, 19), (29, 4)), first_call: int = 32) -> str | None:
    """Documents packed into one row = documents alone, forward and gradients, also where padding follows; and with a cache,
    cut anywhere, so that a document goes on across calls, with positions given to each of them or to the first alone.
    rows: the lengths of the documents in each; first_call: tokens of a first call, in the middle of a document that follows a
    longer one in every row.
    """
    batch = _Streams.packed(rows, max(map(sum, rows)) + 2)
    for name, options in build.forms((5,)).items():
        batch.same_as_alone(f"{name}: packed and alone".removeprefix(": "), Network(build, **options))
    batch.same_in_pieces("packed", Network(build), first_call)
    return None


def law_runs(build: MixerExample) -> str | None:
    """A run is a document: numbers that come back (0 0 1 1 0 0) name other documents. Packed so, also with padding between two
    documents, = documents alone, forward and gradients; and with a cache, cut anywhere.
    """
    batch = _Streams(2, 23)
    for row, runs in enumerate((((0, 6, 0), (6, 2, 1), (8, 12, 0), (20, 3, 1)), ((2, 7, 3), (9, 2, 0), (13, 10, 3)))):
        for start, length, document in runs:
            batch.put(row, start, length, document)
    net = Network(build)
    batch.same_as_alone("numbers that come back", net)
    batch.same_in_pieces("numbers that come back", net, first_call=21)
    return None


def law_padding(build: MixerExample, lengths: tuple[int, ...] = (5, 33, 2, 20)) -> str | None:
    """Padded on the left or right = not padded, whatever stands in the padding, forward and gradients; what padding gets is
    finite. With a cache, cut anywhere, with positions given to each call or to the first alone: decoding behind left padding =
    decoding alone. A recurrence passes over padding between tokens, too: padding on the right leaves the state for what
    follows.
    """
    for side in ("left", "right"):
        batch = _Streams.padded(lengths, max(lengths), side)
        for name, options in build.forms((5,)).items():
            batch.same_as_alone(f"{name}: {side}-padded and alone".removeprefix(": "), Network(build, **options))
        net = Network(build)
        begun = max(lengths) - 1 if side == "left" else sorted(lengths)[-2] * 2 // 3  # every row has, then
        batch.same_in_pieces(f"{side}-padded", net, begun)
        if side == "right" and isinstance(net.mixer.cache_layer(), StateLayer):
            _goes_on(batch, net)
    return None


@torch.no_grad()
def law_restarts(build: MixerExample) -> str | None:
    """Positions that start over within a sequence, the same in all rows or not: cut anywhere with a cache = the whole pass; and
    where they are not given, they count on from the last one, not from the largest.
    """
    net, x = Network(build), numbers(2, 21, DIM)
    place = torch.arange(21)
    of_all = torch.where(place < 9, place, torch.where(place < 15, place - 9, place - 12))  # 0 .. 8, 0 .. 5, 3 .. 8
    for what, positions in (("of all", of_all), ("by row", torch.stack([of_all, (place - 6) % 15]))):
        whole = net(x, positions)
        for cuts, first_call in ((random_cuts(21, 3), 21), (random_cuts(21, 4), 21), ((0, 11, 17, 18, 21), 17)):
            at = lambda a, b: positions[..., a:b] if a < first_call else None  # noqa: B023, E731
            close(f"restarts {what}, cut at {cuts[1:-1]}", net.in_pieces(x, cuts, at), whole, NEAR)
    return None


def law_dropout(build: MixerExample) -> str | None:
    """Where a mixer has dropout: in training the mean over 1000 draws is the output without, and something is dropped; and with
    documents, padding on either side and rows of nothing but padding it gives finite outputs and gradients, on every backend.
    """
    if not build.has("dropout"):
        return "it has no dropout"
    draws, p = 1000, 0.4
    x = numbers(1, 7, DIM).expand(draws, -1, -1)
    net = Network(build, layers=1, dropout=p)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
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
        net = Network(build, dropout=p, **options).train()
        with torch.random.fork_rng(devices=[]):
            for seed in range(5):
                torch.manual_seed(seed)
                given = differentiable(x=numbers(4, 12, DIM))
                try:
                    out = net(given["x"], 0, documents)
                except ValueError:  # a backend that does not know how
                    continue
                grads = torch.autograd.grad(out.sum(), [given["x"], *learned_of(net).values()], allow_unused=True)
                if not all(g is None or bool(g.isfinite().all()) for g in (out, *grads)):
                    raise LawBroken(f"backend {backend}: with padding, an output or a gradient is not finite")
    return None


class _Streams:
    """Sequences at places of a batch, with noise everywhere else."""

    def __init__(self, rows: int, width: int):
        self.x = GARBAGE * numbers(rows, width, DIM, seed=5)
        self.documents = torch.full((rows, width), -1)
        self.positions = torch.zeros(rows, width, dtype=torch.long)
        self.alone: list[Tensor] = []
        self.places: list[tuple[int, slice]] = []

    def put(self, row: int, start: int, length: int, document: int) -> None:
        tokens = slice(start, start + length)
        self.alone.append(numbers(1, length, DIM, seed=10 * row + len(self.alone)))
        self.x[row, tokens], self.documents[row, tokens] = self.alone[-1][0], document
        self.positions[row, tokens] = torch.arange(length)
        self.places.append((row, tokens))

    @classmethod
    def packed(cls, lengths: tuple[tuple[int, ...], ...], width: int) -> _Streams:
        made = cls(len(lengths), width)
        for row, own in enumerate(lengths):
            start = 0
            for document, length in enumerate(own):
                made.put(row, start, length, document)
                start += length
        return made

    @classmethod
    def padded(cls, lengths: tuple[int, ...], width: int, side: str) -> _Streams:
        made = cls(len(lengths), width)
        for row, length in enumerate(lengths):
            made.put(row, width - length if side == "left" else 0, length, 0)
        return made

    def separate(self, net: Network) -> list[Named]:
        answers = []
        for row in self.alone:
            inputs = differentiable(x=row)
            answers.append(with_gradients(lambda x=inputs["x"]: net(x, 0), {**inputs, **learned_of(net)}))
        return answers

    def same_as_alone(self, what: str, net: Network) -> None:
        inputs = differentiable(x=self.x)
        out = net(inputs["x"], self.positions, self.documents)
        if not bool(out.isfinite().all()):
            raise LawBroken(f"{what}: expected finite outputs at padding, too")
        direction, real = torch.zeros_like(out), torch.zeros_like(out)
        for row, tokens in self.places:
            direction[row, tokens] = numbers(tokens.stop - tokens.start, DIM, seed=9)  # as with_gradients takes
            real[row, tokens] = 1
        wanted = {**inputs, **learned_of(net)}
        grads = torch.autograd.grad((out * direction).sum(), list(wanted.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(wanted.items(), grads, strict=True)
        }
        close(f"{what}, gradient of padding", found["x"] * (1 - real), torch.zeros_like(out), NEAR)
        separate = self.separate(net)
        for n, (row, tokens) in enumerate(self.places):
            close(f"{what}, sequence {n}, output", out[row, tokens], separate[n]["output"][0], NEAR)
            close(
                f"{what}, sequence {n}, gradient of x", found["x"][row, tokens], separate[n]["gradient of x"][0], NEAR
            )
        for name in found.keys() - {"x"}:
            total = sum(each[f"gradient of {name}"] for each in separate)
            close(f"{what}, gradient of {name}", found[name], total, NEAR)  # type: ignore[arg-type]

    @torch.no_grad()
    def same_in_pieces(self, what: str, net: Network, first_call: int) -> None:
        """first_call: tokens of a first call after which positions need not be given."""
        whole, width = net(self.x, self.positions, self.documents), self.x.shape[1]
        real = (self.documents >= 0)[..., None]
        some = {tokens.stop for _, tokens in self.places} - {width}  # exactly between two documents
        single = random_cuts(width, 2, most=3)[-2]  # a few tokens one by one, somewhere
        one_by_one = (0, *range(single, min(single + 12, width)), width)
        for cuts in (one_by_one, random_cuts(width, 0), random_cuts(width, 1), (0, *sorted(some), width)):
            parts = net.in_pieces(self.x, cuts, lambda a, b: self.positions[:, a:b], self.documents)
            close(f"{what}, cut at {cuts[1:-1]}", parts * real, whole * real, NEAR)
        cuts = (0, *sorted({first_call, min(first_call + 1, width), min(first_call + 9, width), width}))
        parts = net.in_pieces(self.x, cuts, lambda a, b: None if a else self.positions[:, :b], self.documents)
        close(f"{what}, cut at {cuts[1:-1]}, positions of the first call alone", parts * real, whole * real, NEAR)


@torch.no_grad()
def _goes_on(batch: _Streams, net: Network) -> None:
    """Rows padded on the right, then nine more tokens each."""
    more = numbers(len(batch.alone), 9, DIM, seed=77)
    after = torch.arange(9) + torch.tensor([[row.shape[1]] for row in batch.alone])
    x, positions = torch.cat([batch.x, more], 1), torch.cat([batch.positions, after], 1)
    documents = torch.cat([batch.documents, torch.zeros_like(after)], 1)
    width = batch.x.shape[1]
    for cuts, given in (
        ((0, width + 9), width + 9),
        ((0, width, width + 9), width),
        ((0, 3, width - 2, width + 4, width + 9), width + 9),
    ):
        caches = net.caches()
        parts = [
            net(x[:, a:b], positions[:, a:b] if a < given else None, documents[:, :b], caches)
            for a, b in pairwise(cuts)
        ]
        out = torch.cat(parts, 1)
        for n, row in enumerate(batch.alone):
            want = net(torch.cat([row, more[n : n + 1]], 1), 0)
            close(
                f"sequence {n}, padded on the right and gone on, cut at {cuts[1:-1]}",
                out[n, width:],
                want[0, -9:],
                NEAR,
            )
