"""Comparisons within a study: of its training lengths (ceilings), and of its sizes (whether labels keep their order)."""

from itertools import pairwise, product
from typing import NamedTuple

from longitude.statistics.estimates import HOLDS, LOST, SIGNIFICANT, UNCLEAR, Estimate, level, orders_kept, unpaired
from longitude.statistics.seeds import holm
from longitude.study.analysis import CRITERIA
from longitude.study.criterion import Criterion
from longitude.study.results import Run


class Ceiling(NamedTuple):
    """A label at a tested length, compared with the same label trained at that length on as many tokens.

    Attributes:
        label: One of the study's labels.
        size: Width and layers of both.
        length: The tested length.
        value: Value of the label at the study's training length.
        ceiling: Value of the label trained at the tested length.
        gap: value - ceiling, unpaired over seeds, on the same documents.
        p: p-value adjusted by Holm over all of the study; None if there is no interval.
        learned: Whether the ceiling learned enough at its own training length.
    """

    label: str
    size: str
    length: int
    value: Estimate
    ceiling: Estimate
    gap: Estimate
    p: float | None = None
    learned: bool = True

    @property
    def verdict(self) -> str:
        """Whether the label is worse than its ceiling; seeds decide, as between two labels."""
        decided = self.gap.over == "seeds and documents" and self.p is not None and self.p < SIGNIFICANT
        if not self.learned:
            return "learned too little"
        return {HOLDS: "above", LOST: "below", UNCLEAR: UNCLEAR}[self.gap.above(0) if decided else UNCLEAR]


def ceilings(run: Run) -> list[Ceiling]:
    """A comparison for every label and tested length at which it was also trained, by the first method."""
    criteria = {(part.config.size, part.train_length): CRITERIA[run.task.kind](part) for part in run.parts}
    found = []
    for (size, length), at_length in criteria.items():
        if length == run.train_length:
            continue
        for label in run.labels:
            a, b = (each.sums(label, length, run.methods[0]) for each in (criteria[size, run.train_length], at_length))
            gap = unpaired(a, b, at_length.metric) if a and b else None
            if a and b and gap:
                value, ceiling = (level(each, at_length.metric) for each in (a, b))
                learned = not at_length.learned_too_little(label)
                found.append(Ceiling(label, size, length, value, ceiling, gap, learned=learned))
    known = [each.gap.p for each in found if each.gap.p is not None]
    adjusted = iter(holm(known))
    return [each if each.gap.p is None else each._replace(p=next(adjusted)) for each in found]


class Kept(NamedTuple):
    """How many pairs of labels stand in the same order at two neighboring sizes, at a tested length.

    Attributes:
        smaller: The smaller size, width and layers.
        larger: The next larger size.
        length: The tested length.
        kept: Number of pairs in the same order by their means.
        pairs: Number of pairs that were measured at both, of labels that learned enough at both.
    """

    smaller: str
    larger: str
    length: int
    kept: int
    pairs: int


def by_train_length(run: Run) -> dict[int, Run]:
    """The parts of the study's first size, its own training length first."""
    return {part.train_length: part for part in run.parts if part.config.size == run.config.size}


def by_size(run: Run) -> dict[str, Run]:
    """The parts of the study's training length, the one of the fewest parameters first."""
    parts = [part for part in run.parts if part.train_length == run.train_length]
    parts.sort(key=lambda part: max((t.parameters or 0 for t in part.trials), default=0))
    return {part.config.size: part for part in parts}


def agreement(run: Run) -> list[Kept]:
    """How many pairs of labels keep their order from each size to the next, at every tested length, by the first method."""

    def values(criterion: Criterion, length: int) -> dict[str, float]:
        labels = [label for label in run.labels if not criterion.learned_too_little(label)]
        sums = {label: criterion.sums(label, length, run.methods[0]) for label in labels}
        return {label: float(level(each, criterion.metric).value or 0) for label, each in sums.items() if each}

    criteria = {size: CRITERIA[run.task.kind](part) for size, part in by_size(run).items()}
    found = []
    for ((smaller, a), (larger, b)), length in product(pairwise(criteria.items()), run.lengths):
        found.append(Kept(smaller, larger, length, *orders_kept(values(a, length), values(b, length))))
    return found
