"""Laws of documents in one row and padding at either side: each sequence is as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longitude.attention.masks import NoMask
from longitude.testing.battery.decoding import CACHES
from longitude.testing.engine import LawBroken
from longitude.testing.examples import DIM, MixerExample, shared_law
from longitude.testing.fixtures import LayerStack, close, numbers, random_cuts

NOISE = 50.0
"""Scale of the numbers at padding, relative to those of tokens."""


@shared_law(threshold=1e-9, needs=CACHES)
def packed_documents(
    build: MixerExample, rows: tuple[tuple[int, ...], ...] = ((4, 26, 1, 19), (29, 4)), first_call: int = 32
) -> None:
    """Documents packed into one row = documents alone, forward and gradients, also where padding follows.

    Ids come back (0 1 0 1): each run is a document. Also with a cache, cut anywhere, so that a document continues across calls,
    with positions given to each call or to the first alone. rows: the lengths of each row's documents; first_call: tokens of a
    first call, in the middle of a document that follows a longer one in every row.
    """
    batch = _Streams(len(rows), max(map(sum, rows)) + 2)
    for row, lengths in enumerate(rows):
        for document, length in enumerate(lengths):
            batch.put(row, sum(lengths[:document]), length, document % 2)
    for name, net in _stacks(build):
        batch.same_as_alone(f"{name}packed and alone", net)
    batch.same_in_chunks("packed", LayerStack(build), first_call)


@shared_law(threshold=1e-9, needs=CACHES)
def padding(build: MixerExample, lengths: tuple[int, ...] = (5, 33, 2, 20)) -> None:
    """Padded on the left or right = not padded, whatever the padding contains, forward and gradients.

    Outputs at padding are finite. With a cache, cut anywhere, with positions passed to each call or only to the first, decoding
    after left padding = decoding without padding. A recurrence also skips padding between tokens: padding on the right leaves
    the state unchanged for later tokens.
    """
    from longitude.attention.cache import StateLayer

    width = max(lengths)
    for side in ("left", "right"):
        batch = _Streams(len(lengths), width)
        for row, length in enumerate(lengths):
            batch.put(row, width - length if side == "left" else 0, length, 0)
        for name, net in _stacks(build):
            batch.same_as_alone(f"{name}{side}-padded and alone", net)
        net = LayerStack(build)
        begun = width - 1 if side == "left" else sorted(lengths)[-2] * 2 // 3  # by then every row has begun
        batch.same_in_chunks(f"{side}-padded", net, begun)
        if side == "right" and isinstance(net.mixer.cache_layer(), StateLayer):
            _continued(batch, net)


def _stacks(build: MixerExample) -> Iterator[tuple[str, LayerStack]]:
    """The layers in every form, and those of encoders also without a mask."""
    for name, options in build.forms((5,)).items():
        net = LayerStack(build, **options)
        yield f"{name}: " if name else "", net
        if net.mixer.bidirectional and not net.encoding.causal_only:
            net.mask = NoMask()
            yield f"{name}, without a mask: ".removeprefix(", "), net


class _Streams:
    """Sequences in the rows of a batch, with noise everywhere else."""

    def __init__(self, rows: int, width: int):
        self.x = NOISE * numbers(rows, width, DIM, seed=5)
        self.documents = torch.full((rows, width), -1)
        self.positions = torch.zeros(rows, width, dtype=torch.long)
        self.alone: list[Tensor] = []
        self.sequences: list[tuple[int, slice]] = []  # row and tokens

    def put(self, row: int, start: int, length: int, document: int) -> None:
        tokens = slice(start, start + length)
        self.alone.append(numbers(1, length, DIM, seed=10 * row + len(self.alone)))
        self.x[row, tokens], self.documents[row, tokens] = self.alone[-1][0], document
        self.positions[row, tokens] = torch.arange(length)
        self.sequences.append((row, tokens))

    def same_as_alone(self, what: str, net: LayerStack) -> None:
        direction, real = torch.zeros_like(self.x), (self.documents >= 0)[..., None]
        for row, tokens in self.sequences:
            direction[row, tokens] = numbers(tokens.stop - tokens.start, DIM, seed=9)  # that of `answer` for one alone
        together = net.answer(self.x, self.positions, self.documents, direction=direction)
        if not bool(together["output"].isfinite().all()):
            raise LawBroken(f"{what}: expected finite outputs at padding, too")
        close(f"{what}, gradient of padding", together["gradient of x"] * ~real, torch.zeros_like(self.x))
        totals = {name: torch.zeros_like(together[name]) for name in together}
        for sequence, (row, tokens) in zip(self.alone, self.sequences, strict=True):
            separate = net.answer(sequence, 0)
            for name, total in totals.items():
                if name in ("output", "gradient of x"):
                    close(f"{what}, {name} of {tokens} in row {row}", together[name][row, tokens], separate[name][0])
                else:
                    total += separate[name]
        for name in totals.keys() - {"output", "gradient of x"}:
            close(f"{what}, {name}", together[name], totals[name])

    @torch.no_grad()
    def same_in_chunks(self, what: str, net: LayerStack, first_call: int) -> None:
        """first_call: tokens of a first call after which positions need not be given. Encoders have no calls after a first."""
        if net.encoding.reads_neighbors:
            return
        whole, width = net(self.x, self.positions, self.documents), self.x.shape[1]
        real = (self.documents >= 0)[..., None]
        between = {tokens.stop for _, tokens in self.sequences} - {width}
        single = random_cuts(width, 2, most=3)[-2]  # a few tokens one by one, somewhere
        one_by_one = (0, *range(single, min(single + 12, width)), width)
        for cuts in (one_by_one, random_cuts(width, 0), random_cuts(width, 1), (0, *sorted(between), width)):
            parts = net.in_chunks(self.x, cuts, lambda a, b: self.positions[:, a:b], self.documents)
            close(f"{what}, cut at {cuts[1:-1]}", parts * real, whole * real)
        if not net.encoding.at_input and net.encoding.axes == 1:  # on several, tokens follow the largest of the row
            cuts = (0, *sorted({first_call, min(first_call + 1, width), min(first_call + 9, width), width}))
            parts = net.in_chunks(self.x, cuts, lambda a, b: None if a else self.positions[:, :b], self.documents)
            close(f"{what}, cut at {cuts[1:-1]}, positions of the first call alone", parts * real, whole * real)


@torch.no_grad()
def _continued(batch: _Streams, net: LayerStack) -> None:
    """Rows padded on the right, then nine more tokens each."""
    more = numbers(len(batch.alone), 9, DIM, seed=77)
    after = torch.arange(9) + torch.tensor([[row.shape[1]] for row in batch.alone])
    x, positions = torch.cat([batch.x, more], 1), torch.cat([batch.positions, after], 1)
    documents = torch.cat([batch.documents, torch.zeros_like(after)], 1)
    width, end = batch.x.shape[1], x.shape[1]
    for cuts, until in (((0, end), end), ((0, width, end), width), ((0, 3, width - 2, width + 4, end), end)):
        at = lambda a, b: positions[:, a:b] if a < until else None  # noqa: B023, E731
        out = net.in_chunks(x, cuts, at, documents)
        for n, row in enumerate(batch.alone):
            want = net(torch.cat([row, more[n : n + 1]], 1), 0)[0, -9:]
            close(f"sequence {n}, padded on the right and continued, cut at {cuts[1:-1]}", out[n, width:], want)
