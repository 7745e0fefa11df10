"""Documents and padding: each run of tokens of one document is a row of its own, with windows and blocks of its own."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.attention.documents import begins_of


class Tokens(NamedTuple):
    """real: no padding. begins: the first of a document after another one. [B, L] each."""

    real: Bool[Tensor, "B L"]
    begins: Bool[Tensor, "B L"]


def tokens_of(documents: Int[Tensor, "B Lk"], past: int) -> Tokens | None:
    """Of the tokens from `past` on; None where all are real and none begins anything."""
    real, begins = documents >= 0, begins_of(documents)
    found = Tokens(real[:, past:], begins[:, past:])
    return found if bool(found.begins.any()) or not bool(found.real.all()) else None


class Group(NamedTuple):
    """Runs that go on after the same number of tokens, and are about as long: rows of a call of their own."""

    before: int
    rows: list[int]
    lengths: list[int]
    last: list[bool]  # of its row
    tokens: Int[Tensor, "runs L"]  # the last one repeated to the longest
    beyond: Int[Tensor, "runs L"]  # how far behind the end of its run: 0 within it

    @property
    def real(self) -> Bool[Tensor, "runs L"]:
        return self.beyond == 0


def groups_of(tokens: Tokens, counts: list[int]) -> list[Group]:
    """counts: how many tokens each row has heard of the document that it may go on with. At most twice the tokens come."""
    runs = defaultdict(list)
    for row, count in enumerate(counts):
        places = tokens.real[row].nonzero().flatten()
        cuts = tokens.begins[row, places].nonzero().flatten().tolist()
        parts = places.tensor_split(cuts)
        for n, part in enumerate(parts):
            if len(part):
                before = count if n == 0 else 0
                runs[before, len(part).bit_length()].append((row, part, n == len(parts) - 1))
    groups = []
    for (before, _), found in runs.items():
        rows, parts, last = zip(*found, strict=True)
        lengths = [len(part) for part in parts]
        padded = torch.stack([torch.cat([p, p[-1:].expand(max(lengths) - len(p))]) for p in parts])
        ends = torch.tensor(lengths, device=padded.device)[:, None] - 1
        beyond = (torch.arange(max(lengths), device=padded.device) - ends).clamp(min=0)
        groups.append(Group(before, list(rows), lengths, list(last), padded, beyond))
    return groups
