"""Place embeddings: a digit's place in its number, found by token ids, selects a learned vector added at the input."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.positions.absolute import AtInput
from longitude.positions.base import register
from longitude.positions.coordinates import require_positions

DIGITS = tuple(range(10))
"""Ids of the digits 0 to 9 in tasks that write numbers."""
SEPARATORS = (10, 11)
"""Ids of + and = in these tasks."""


class Places(AtInput):
    """A learned vector per place, x + P[place]; P starts as N(0, 1), like nn.Embedding.

    In training, all places of a row except 0 are shifted by one number of 0 .. max_start - 1, drawn from torch's generator;
    otherwise, and with a cache, they are not. The attribute max_length is the number of rows of P.
    """

    learned = True

    def __init__(self, max_length: int, dim: int, max_start: int, digits: Sequence[int]):
        super().__init__()
        self.dim, self.max_start, self.max_length = dim, max_start, 1 + max_length + max_start
        self.digits = self.ids("digits", digits)
        self.table = nn.Parameter(torch.empty(self.max_length, dim))
        self.reset_parameters()

    def ids(self, option: str, numbers: Sequence[int]) -> tuple[int, ...]:
        """The token ids of an option as a tuple; ValueError unless they are different ints of 0 or more."""
        ids = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        if not ids or len({*ids}) < len(ids) or any(type(n) is not int or n < 0 for n in ids):
            who = type(self).__name__
            raise UsageError(who, f"{option} to be token ids, each 0 or more and named once", repr(numbers))
        return ids

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        places = self.positions_of(x, positions)
        require_positions(places, self.max_length, f"{type(self).__name__}, places")
        return x + self.table[places].to(x.dtype)

    def places(self, ids: Tensor, documents: Tensor | None = None, random_start: bool = False) -> Tensor:
        places = self.from_first(ids, documents)
        if random_start:
            places = places + (places > 0) * torch.randint(self.max_start, (len(ids), 1), device=ids.device)
        return places

    def from_first(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        """Places of tokens [B, L] without a random start: from 1 on, and 0 for tokens without a place."""
        raise NotImplementedError


@register("abacus")
class Abacus(Places):
    """Abacus, a digit's place in its number: the place, counted from the first digit written, selects a learned row.

    Numbers must be written from the least significant digit on, so that digits of equal significance share a row. All other
    tokens are at place 0. A place does not tell to which number a digit belongs: compose it with another encoding, or use the
    causal mask alone. The authors' code draws one start per batch; here each row has its own.

    Args:
        max_length: Digits of the longest number.
        dim: Width of x.
        max_start: In training the first digits of a row's numbers are at a place of 1 .. max_start, the same for all of them.
        digits: Token ids of digits; any run of them is a number.

    Source:
        McLeish et al. 2024, arXiv 2405.17399, https://arxiv.org/abs/2405.17399
    """

    source = "McLeish et al. 2024, https://arxiv.org/abs/2405.17399"

    def __init__(self, max_length: int, dim: int, max_start: int = 100, digits: Sequence[int] = DIGITS):
        super().__init__(max_length, dim, max_start, digits)

    def from_first(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        return counted(among(ids, self.digits), documents)


@register("coupled")
class Coupled(Places):
    """Position coupling by significance: digits of equal significance, in operands and answer, share a learned embedding.

    Numbers must be written from the least significant digit on. + and = share the row before that of the least significant
    digits; all other tokens have place 0.

    Args:
        max_length: Digits of the longest number.
        dim: Width of x.
        max_start: In training + and = get a random place of 1 .. max_start, drawn for each row.
        digits: Token ids of digits; any run of them is a number.
        separators: Token ids of + and =.

    Source:
        Cho et al. 2024, arXiv 2405.20671, https://arxiv.org/abs/2405.20671
    """

    source = "Cho et al. 2024, https://arxiv.org/abs/2405.20671"

    def __init__(
        self,
        max_length: int,
        dim: int,
        max_start: int = 100,
        digits: Sequence[int] = DIGITS,
        separators: Sequence[int] = SEPARATORS,
    ):
        super().__init__(max_length, dim, max_start, digits)
        self.separators = self.ids("separators", separators)
        if both := {*self.digits} & {*self.separators}:
            raise UsageError("Coupled", "separators that are no digits", f"{sorted(both)} among both")

    def from_first(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        place = counted(among(ids, self.digits), documents)
        separator = among(ids, self.separators)
        if documents is not None:
            separator &= documents >= 0
        return place + ((place > 0) | separator)


def among(ids: Tensor, some: Sequence[int]) -> Tensor:
    """Whether ids [B, L] are in a set, bool [B, L]."""
    return torch.isin(ids, torch.tensor(some, device=ids.device))


def counted(digit: Tensor, documents: Tensor | None) -> Tensor:
    """Index of each digit [B, L] in its run, from 1 on; 0 for other tokens. Runs end at document boundaries and padding."""
    first = digit & ~F.pad(digit, (1, 0))[:, :-1]  # padded first: torch.export would add a guard on a size of L - 1
    if documents is not None:
        digit = digit & (documents >= 0)
        first = first | (documents != F.pad(documents, (1, 0), value=-1)[:, :-1])
    order = torch.arange(digit.shape[1], device=digit.device)
    return (order + 1 - torch.where(first, order, 0).cummax(1).values) * digit
