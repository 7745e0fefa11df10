"""Published comparisons against ours: in how many pairs, and in which, is the sign the same?

python benchmarks/calibration.py

published.csv has a published pair per row. Its two sides are places of benchmarks/results/claims, study/label/length or
study/label/length/method: at rung A (0.1 million parameters) or in the one study of the pair, and at rung B (0.4 million).
predictions.csv has signs of ladder-a and ladder-b that were committed before the tables of these papers were opened: of a
label against another or against itself at the training length, at 1, 2, 4 and 16 times that length. RoPE has base 194 at B.
Only signs count: no pair asks whether both sides learned enough, and pairs share labels, so the rate has no interval.
"""

import csv
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR, Estimate, Sums, change, difference
from longitude.study.analysis import CRITERIA
from longitude.study.answers import SOLVED, share
from longitude.study.criterion import Criterion
from longitude.study.losses import TOLERANCE
from longitude.study.results import read_run

HERE = Path(__file__).parent
PUBLISHED, PREDICTIONS, STUDIES = HERE / "published.csv", HERE / "predictions.csv", HERE / "results" / "claims"
AGREES, DISAGREES, SPLIT = "agrees", "disagrees", "split"
RELATIONS = {
    "better": (-math.inf, 0.0),
    "rises": (TOLERANCE, math.inf),
    "not worse": (-math.inf, TOLERANCE),
    "level": (-TOLERANCE, TOLERANCE),
    "solved": (SOLVED, math.inf),
}
"""Where the interval lies if the relation holds: of loss / loss of the second side - 1; of the share of wrong answers minus that
of the second side; without a second side, of the share of right answers."""
RUNGS = ("a", "b")


class Pair(NamedTuple):
    """A row of published.csv, and whether our rows agree with it: `AGREES`, `DISAGREES`, `UNCLEAR`, or None without rows.

    Attributes:
        row: Its columns.
        a: At rung A, or in the one study of the pair.
        b: At rung B.
    """

    row: dict[str, str]
    a: str | None
    b: str | None

    @property
    def word(self) -> str:
        """Both rungs together; `SPLIT`, too, if another publication contradicts the one that is quoted."""
        return together([self.a, self.b, SPLIT if self.row["against"] else None])


@cache
def pairs(path: Path = PUBLISHED, studies: Path = STUDIES) -> tuple[Pair, ...]:
    """Every published pair, judged on the rows of a folder of studies."""

    def judged(row: dict[str, str], rung: str) -> str | None:
        first, second = row[f"ours_{rung}"], row[f"than_{rung}"]
        return agreement(row["relation"], estimate(first, second, studies)) if first else None

    return tuple(Pair(row, *(judged(row, rung) for rung in RUNGS)) for row in rows_of(path))


def published(claim: str, path: Path = PUBLISHED, studies: Path = STUDIES) -> str | None:
    """`AGREES`, `DISAGREES`, `SPLIT` or `UNCLEAR` for the name of a claim; None if no published pair is about it."""
    words = [pair.word for pair in pairs(path, studies) if claim in pair.row["claims"].split()]
    return together(words) if words else None


def estimate(first: str, second: str, studies: Path = STUDIES) -> Estimate | None:
    """The number that `RELATIONS` is about, paired by seed and document; None with fewer seeds than were planned.

    Raises:
        ValueError: The documents are different ones.
    """
    criterion, ours = sums_of(first, studies)
    other, theirs = sums_of(second or first, studies)
    if criterion.run.study["data"]["sha256"] != other.run.study["data"]["sha256"]:
        raise ValueError(f"{first} and {second} were measured on different documents; expected the same documents")
    if not second:
        number = share(ours.of)
    elif criterion.less_is_better:
        number = change(ours, theirs, criterion.metric)
    else:
        number = difference(theirs, ours, criterion.metric)
    return number if number and len(number.values) >= max(criterion.seeds_needed, other.seeds_needed) else None


def agreement(relation: str, found: Estimate | None) -> str:
    """`AGREES` if the interval lies inside the range of a relation, `DISAGREES` if it lies on one side outside."""
    if found is None:
        return UNCLEAR
    low, high = RELATIONS[relation]
    sides = {found.above(low) if math.isfinite(low) else HOLDS, found.below(high) if math.isfinite(high) else HOLDS}
    return DISAGREES if LOST in sides else AGREES if sides == {HOLDS} else UNCLEAR


def outcome(row: dict[str, str], rung: str) -> str | None:
    """Whether a prediction came true; None if the table has no such sign, or if there was no prediction at this rung."""
    predicted = row[f"predicted_{rung}"]
    if not predicted or row["sign"] in ("", "equal", SPLIT):
        return None
    return UNCLEAR if predicted == UNCLEAR else AGREES if predicted == row["sign"] else DISAGREES


def together(words: Iterable[str | None]) -> str:
    """One word for several: `UNCLEAR` has no say unless all are, and different ones are `SPLIT`."""
    decided = {word for word in words if word} - {UNCLEAR}
    return SPLIT if len(decided) > 1 else next(iter(decided), UNCLEAR)


def rate(words: Iterable[str | None]) -> str:
    """ "38 of 56 (68%), of 47 decided 81%"; None does not count."""
    every = [word for word in words if word]
    agree, decided = every.count(AGREES), len(every) - every.count(UNCLEAR)
    shares = [f"{agree / total:.0%}" if total else "-" for total in (len(every), decided)]
    return f"{agree} of {len(every)} ({shares[0]}), of {decided} decided {shares[1]}"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sums_of(place: str, studies: Path) -> tuple[Criterion, Sums]:
    """The criterion of a place's study, and its sums. ValueError if it was not measured."""
    study, label, length, *method = place.split("/")
    criterion = criterion_of(studies / study)
    sums = criterion.sums(label, int(length), *(method or criterion.run.methods[:1]))
    if sums is None:
        raise ValueError(f"{place} was not measured; expected study/label/length or study/label/length/method")
    return criterion, sums


@cache
def criterion_of(study: Path) -> Criterion:
    run = read_run(study)
    return CRITERIA[run.task.kind](run)


def main() -> None:
    """Print the agreement by kind and rung, each pair that does not agree, the predictions, and the one rate."""
    every, predictions = pairs(), rows_of(PREDICTIONS)
    for kind in dict.fromkeys(pair.row["kind"] for pair in every):
        of_kind = [pair for pair in every if pair.row["kind"] == kind]
        print(f"{kind}: A {rate(pair.a for pair in of_kind)}; B {rate(pair.b for pair in of_kind)}")
    for word in (DISAGREES, UNCLEAR):
        for pair in every:
            if at := [rung.upper() for rung in RUNGS if getattr(pair, rung) == word]:
                print(f"{word} at {' and '.join(at)}: {pair.row['pair']}. {pair.row['sentence']}")
    undisputed = [pair for pair in every if not pair.row["against"]]
    print(
        f"no publication against it: A {rate(pair.a for pair in undisputed)}; B {rate(pair.b for pair in undisputed)}"
    )
    for table in dict.fromkeys(row["table"] for row in predictions if row["sign"]):
        scored = [[outcome(row, rung) for row in predictions if row["table"] == table] for rung in RUNGS]
        print(f"predicted, {table}: A {rate(scored[0])}; B {rate(scored[1])}")
    scored = [[outcome(row, rung) for row in predictions] for rung in RUNGS]
    print(f"predicted before reading, all: A {rate(scored[0])}; B {rate(scored[1])}")
    print(f"same sign as published: A {rate(pair.a for pair in every)}; B {rate(pair.b for pair in every)}")


if __name__ == "__main__":
    main()
