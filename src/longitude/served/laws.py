"""The laws of a server. Each has the calls that it needs, and judges their answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product, zip_longest
from statistics import fmean, mode
from typing import NamedTuple, NoReturn

from scipy.stats import binom, hypergeom

from longitude.errors import UsageError
from longitude.measure.retrieval.prompts import encode
from longitude.served.calls import SPAN, STRIDE, Call, Groups, Served, Trial
from longitude.statistics.proportions import mean
from longitude.statistics.seeds import holm, t_interval
from longitude.testing.engine import Battery, DoesNotApply, LawBroken, Unknown

LAWS = Battery("server")
CALLS: dict[str, Callable[[Served], Groups]] = {}
"""The calls of each law."""
PATTERNS: dict[str, Callable[[Served], Sequence[Pattern]]] = {}
"""The patterns in which wrong answers of a law may fall."""
LEVEL = 0.001
"""Probability of a false finding, over all patterns of a law."""
MODULI = (4, 16, 64, 128)
BLOCKS, WIDTHS = (16, 64, 128, 256), (2, 8, 32)
"""Sizes of blocks whose borders are looked for, from the start of a prompt and from its end; tokens near a border."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FEWEST = 5
"""Trials of a cell of depth and length."""
AGAIN = 8
"""Equal calls, and documents that are asked again."""
JITTER = 16
"""Lengths of one cell differ by fewer tokens."""
EDGE = (-8, -4, 0, 4, 8)
"""Tokens around a window at which a needle starts; a needle takes about 20."""
SUSPECTS, CONFIRM, FRESH = 16, 16, 5000
"""Patterns with no right answer that are asked again, calls of each, and the first seed of their prompts."""
ANSWERED = 0.5
"""Part of the questions that a model must answer, where no pattern is found, so that its answers show anything."""
TEXTS, MOST = 6, 16_384
"""Texts whose log-probabilities are compared, and their most tokens."""
NATS, MARGIN = 0.05, 0.02
"""Difference of log-probabilities that rounding of weights to 16 bits may have; and part of a loss that counts as worse."""


class Pattern(NamedTuple):
    """Calls that may differ from all others: in words, and by which trials are of it."""

    name: str
    has: Callable[[Trial], bool]


def law(calls: Callable[[Served], Groups], patterns: Callable[[Served], Sequence[Pattern]] | None = None, **options):
    """Decorator of a law with its calls, and the patterns in which their wrong answers may fall."""

    def add(test):
        CALLS[test.__name__] = calls
        if patterns is not None:
            PATTERNS[test.__name__] = patterns
        return LAWS.law(**options)(test)

    return add


def lengths_of(served: Served) -> list[int]:
    """Up to three lengths: a quarter of the longest, and each a quarter of the next where consecutive ones do not overlap."""
    least, most = sum(served.edges) + SPAN, served.longest - SPAN
    if most < least:
        raise UsageError("--length", f"{least + SPAN} tokens or more", served.longest)
    lengths = [max(least, served.longest // 64)]
    for part in (16, 4):
        lengths.append(max(lengths[-1] + SPAN, served.longest // part))
    return [length for length in lengths if length <= most]


def powers_of_two(least: int, most: int) -> list[int]:
    return [2**i for i in range(2, 31) if least <= 2**i <= most]


# ---- judging ---------------------------------------------------------------------------------------------------------
def rate(trials: Sequence[Trial]) -> str:
    """Right answers with Wilson's interval."""
    value, low, high = mean([float(trial.right) for trial in trials])
    return f"{sum(trial.right for trial in trials)} of {len(trials)} right ({value:.0%}, {low:.0%} to {high:.0%})"


Members = list[tuple[Pattern, list[Trial]]]
"""The answered calls of each pattern."""


def split(served: Served, name: str) -> tuple[list[Trial], Members]:
    """Answered calls of a law, up to the longest: all, and by pattern; without patterns of all calls or of none."""
    trials = [
        trial
        for trial in served.answered[name]
        if not trial.answer.refused and not trial.answer.hidden and not served.is_stale(trial)
        if trial.call.length <= served.longest
    ]
    members = [(pattern, [trial for trial in trials if pattern.has(trial)]) for pattern in PATTERNS[name](served)]
    return trials, [(pattern, inside) for pattern, inside in members if 0 < len(inside) < len(trials)]


def wrong_of(trials: Sequence[Trial]) -> int:
    return sum(not trial.right for trial in trials)


def worst(trials: list[Trial], members: Members) -> tuple[int, float]:
    """(the pattern whose calls are wrong more often than all others, its p-value by Fisher's test and Holm's)."""
    wrong, total = wrong_of(trials), len(trials)
    p = holm([float(hypergeom.sf(wrong_of(part) - 1, total, wrong, len(part))) for _, part in members])
    return min(enumerate(p), key=lambda pair: pair[1], default=(0, 1.0))


def suspects(served: Served, name: str) -> list[tuple[Pattern, list[Call]]]:
    """More calls of patterns that are too small to show whether their wrong answers are by chance: those with no right one."""
    trials, members = split(served, name)
    if worst(trials, members)[1] < LEVEL or wrong_of(trials) > (1 - ANSWERED) * len(trials):
        return []
    silent = [pair for pair in members if wrong_of(pair[1]) == len(pair[1])]
    silent.sort(key=lambda pair: len(pair[1]), reverse=True)
    return [
        (pattern, [fresh(served, part[j % len(part)].call, j) for j in range(CONFIRM * served.trials)])
        for pattern, part in silent[:SUSPECTS]
    ]


def fresh(served: Served, call: Call, j: int) -> Call:
    """A call of the same length with other text; elsewhere, too, unless the law is about places."""
    (first, last), [place] = served.edges, call.places
    if call.law != "borders":
        near = place - SPAN // 2 + STRIDE * j % SPAN
        place = max(first, min(near, call.length - last))
    return replace(call, places=(place,), keys=FRESH + j, values=FRESH + j, text=FRESH + j)


def judge(served: Served, name: str) -> None:
    """Raise LawBroken with the pattern whose calls are wrong more often; Unknown where the answers cannot show one."""
    trials, members = split(served, name)
    if 2 * len(trials) < len(served.answered[name]):
        raise Unknown(f"{len(trials)} of {len(served.answered[name])} calls were answered; see counts")
    i, p = worst(trials, members)
    if p < LEVEL:
        pattern, inside = members[i]
        broken(served, name, pattern.name, inside, [trial for trial in trials if trial not in inside], p)
    if wrong_of(trials) > (1 - ANSWERED) * len(trials):
        raise Unknown(f"{rate(trials)}: the model has to answer more of them, so that a pattern can show")
    by_chance = (1 + wrong_of(trials)) / (2 + len(trials))
    again = served.confirmed[name]
    values = holm([float(binom.sf(wrong_of(calls) - 1, len(calls), by_chance)) for calls in again.values()])
    for (pattern_name, calls), p in zip(again.items(), values):
        if p < LEVEL:
            broken(served, name, pattern_name, calls, trials, p)


def broken(
    served: Served, law: str, name: str, members: Sequence[Trial], others: Sequence[Trial], p: float
) -> NoReturn:
    """Raise LawBroken for calls of a pattern, and keep the shortest as evidence."""
    served.evidence[law] = min((trial for trial in members if not trial.right), key=lambda trial: trial.tokens)
    raise LawBroken(f"{name}: {rate(members)}; others: {rate(others)}; p = {p:.1g}")


# ---- the laws --------------------------------------------------------------------------------------------------------
def equal_calls(served: Served) -> Groups:
    groups = []
    for length in (*lengths_of(served), served.longest):
        call = Call(law="repeatable", length=length, places=(served.place(length, 0.5),))
        turns = range(AGAIN * served.trials)
        groups += [[replace(call, turn=turn)] for turn in turns]
        groups.append([replace(call, turn=turn, together=True) for turn in turns])
    return groups


@law(equal_calls)
def repeatable(served: Served) -> None:
    """Equal prompts have equal answers at temperature 0, alone and with others."""
    kinds: dict[tuple[int, bool], list[Trial]] = defaultdict(list)
    for trial in served.answered["repeatable"]:
        kinds[trial.call.length, trial.call.together].append(trial)
    seldom = []
    for (length, together), trials in kinds.items():
        how = "at the same time" if together else "one after the other"
        answers = [trial.answer.text.strip() for trial in kinds[length, False] if not trial.answer.refused]
        if not answers:
            continue
        usual_text = mode(answers)
        others = [t for t in trials if t.answer.text.strip() != usual_text and not t.answer.refused]
        if len(others) > 1:
            served.evidence["repeatable"] = others[0]
            other_text = others[0].answer.text.strip()
            ids = (encode(served.tokenizer, text, "never") for text in (usual_text, other_text))
            first = next((i for i, (a, b) in enumerate(zip_longest(*ids)) if a != b), 0)
            raise LawBroken(
                f"prompts of {trials[0].tokens} tokens: {len(others)} of {len(trials)} equal calls {how} have another answer, "
                f"from its token {first} on, such as {other_text[:40]!r} for {usual_text[:40]!r}"
            )
        if others:
            seldom.append(f"1 of {len(trials)} equal calls of {trials[0].tokens} tokens {how} differs")
    if seldom:
        raise Unknown(f"{'; '.join(seldom)}; add --trials {4 * served.trials}")


def depth_grid(served: Served) -> Groups:
    def needle(length: int, cell: int, turn: int) -> Call:
        place = served.place(length, DEPTHS[cell], cell + turn)
        return Call(law="depth", length=length, places=(place,), keys=turn, values=cell, text=turn)

    cells = [*product(range(len(DEPTHS)), range(FEWEST * served.trials))]
    grid = [[needle(n - jitter(cell + turn), cell, turn) for cell, turn in cells] for n in nominal_lengths(served)]
    too_long = [needle(served.beyond, 0, turn) for turn in range(2)] if served.beyond else []
    return [*grid, too_long]


def nominal_lengths(served: Served) -> list[int]:
    return sorted({*lengths_of(served), served.longest // 2, served.longest})


def cells(served: Served) -> list[Pattern]:
    lengths = nominal_lengths(served)
    grid = [
        Pattern(
            f"needles at depth {DEPTHS[i]:.0%} of {n + served.added} tokens",
            lambda t, n=n, i=i: n - JITTER < t.call.length <= n and t.call.values == i,
        )
        for n, i in product(lengths, range(len(DEPTHS)))
    ]
    long, far = [*longer(served, lengths)], [*farther(served.answered["depth"])]
    both = [
        Pattern(f"{a.name}: {b.name}", lambda trial, a=a, b=b: a.has(trial) and b.has(trial))
        for a, b in product(long[1:], far)
    ]
    return [*long, *far, *grid, *both]


@law(depth_grid, cells, rests_on=("repeatable",))
def depth(served: Served) -> None:
    """A needle is read at every depth, up to the declared length."""
    judge(served, "depth")


def consecutive_lengths(served: Served) -> Groups:
    return [
        [
            Call(
                law="length_classes",
                length=length + i,
                places=(served.place(length, 0.5, i * (i + 1) // 2),),  # no residue of lengths goes with one of places
                keys=SPAN * turn + i,
                values=i,
                text=turn,
            )
            for i in range(SPAN)
        ]
        for length, turn in product(lengths_of(served), range(served.trials))
    ]


def residues(served: Served) -> list[Pattern]:
    def residue(modulus: int, rest: int) -> Pattern:
        return Pattern(f"prompts of {rest} modulo {modulus} tokens", lambda trial: trial.tokens % modulus == rest)

    return [residue(modulus, rest) for modulus in MODULI for rest in range(modulus)]


@law(consecutive_lengths, residues, rests_on=("repeatable",))
def length_classes(served: Served) -> None:
    """Answers do not depend on the length of a prompt modulo 4, 16, 64 or 128."""
    judge(served, "length_classes")


def jitter(i: int) -> int:
    """Tokens by which a length differs from the one that is meant, so that no length modulo a block stands for it."""
    return 5 * i % JITTER


def longer(served: Served, lengths: Iterable[int]) -> Iterator[Pattern]:
    """Prompts of a length and more, for each length."""
    for length in sorted(lengths):
        name = f"prompts of {length + served.added} tokens and more"
        yield Pattern(name, lambda trial, n=length: trial.call.length > n - JITTER)


def farther(trials: Sequence[Trial]) -> Iterator[Pattern]:
    """Needles farther from the end than some distance, for distances between those that were tried."""
    distances = sorted({trial.call.distance for trial in trials})
    for near, far in pairwise(distances):
        if far > near * 1.01:
            name = f"needles farther than {near} to {far} tokens from the end"
            yield Pattern(name, lambda trial, far=far: trial.call.distance >= far)


def places_and_edges(served: Served) -> Groups:
    lengths, (first, last) = lengths_of(served), served.edges
    longest = lengths[-1] if served.longest <= MOST else lengths[:2][-1]
    start = max(first, (longest - SPAN - last) // 2)
    places = [
        Call(law="borders", length=longest - STRIDE * i % SPAN, places=(start + i,), keys=turn, values=i, text=turn)
        for i, turn in product(range(SPAN), range(served.trials))
    ]
    windows = [
        Call(law="borders", length=length, places=(length - distance,), keys=turn, values=distance, text=100 + turn)
        for window, edge, turn in product(powers_of_two(last, longest), EDGE, range(3 * served.trials))
        for length, distance in [(longest - jitter(turn), window + edge)]
        if last <= distance <= length - first
    ]
    borders = [
        Call(law="borders", length=length, places=(served.place(length, 0.5, turn),), keys=turn, text=200 + turn)
        for power, near in product(powers_of_two(lengths[0], served.longest), range(-2, 3))
        for length, turn in product([power + near - served.added], range(4 * served.trials))
        if length <= served.longest
    ]
    return [places, windows, borders]


def blocks_and_edges(served: Served) -> list[Pattern]:
    trials = served.answered["borders"]

    def arc(block: int, width: int, start: int, whence: str) -> Pattern:
        def has(trial: Trial) -> bool:
            place = trial.call.places[0] + served.added if whence == "start" else trial.call.distance
            return (place - start) % block < width

        name = f"needles that start {start} to {start + width - 1} tokens from the {whence}, modulo {block}"
        return Pattern(name, has)

    arcs = [
        arc(block, width, start, whence)
        for block, whence, width in product(BLOCKS, ("start", "end"), WIDTHS)
        for start in range(0, block, max(1, width // 2))
        if width < block
    ]
    exact = [
        Pattern(f"prompts of {power + near} tokens", lambda t, n=power + near: t.tokens == n)
        for power, near in product(powers_of_two(16, 2 * served.longest), range(-2, 3))
    ]
    edges = [
        Pattern(
            f"needles that start {window + edge} tokens before the end", lambda t, d=window + edge: t.call.distance == d
        )
        for window, edge in product(powers_of_two(16, served.longest), EDGE)
    ]
    lengths = {trial.call.length for trial in trials}
    return [*longer(served, lengths), *farther(trials), *arcs, *exact, *edges]


@law(places_and_edges, blocks_and_edges, rests_on=("repeatable", "depth", "length_classes"))
def borders(served: Served) -> None:
    """Needles at the borders of blocks, windows and powers of two are read as all others."""
    judge(served, "borders")


def cached_prompts(served: Served) -> Groups:
    """In order: every document cold, again, with another question, and one of its length; then each again."""
    groups, last = [], []
    for i in range(AGAIN * served.trials):
        length = lengths_of(served)[:2][-1] - jitter(i)
        places = (served.place(length, 0.2, i), served.place(length, 0.6, i))
        cold = Call(law="prefix", length=length, places=places, keys=i, values=i, text=300 + i)
        other = replace(cold, values=1000 + i, text=300 + i + 1000 * (i % 2))
        groups += [[cold], [replace(cold, turn=1)], [replace(cold, asked=1)], [other]]
        last.append([replace(cold, turn=2)])
    return [*groups, *last]


@law(cached_prompts, rests_on=("repeatable",))
def prefix(served: Served) -> None:
    """A prompt that shares its start, or its length, with others has its own answer."""
    every = [trial for trials in served.answered.values() for trial in trials]
    if len(stale := [trial for trial in every if served.is_stale(trial)]) > 1:
        served.evidence["prefix"] = stale[0]
        raise LawBroken(
            f"{len(stale)} of {len(every)} answers have the number of another prompt, from {stale[0].tokens} tokens on"
        )
    trials = served.answered["prefix"]
    if refused := [trial.answer.refused for trial in trials if trial.answer.refused]:
        raise Unknown(refused[0])
    count = len(trials) // 5
    asked, last = trials[: 4 * count], trials[4 * count :]
    cold = asked[::4]
    if wrong_of(cold) > (1 - ANSWERED) * count:
        raise Unknown(f"cold: {rate(cold)}: the model has to answer more of them")
    texts_of: dict[int, set[str]] = defaultdict(set)
    for trial in served.answered.get("repeatable", ()):
        texts_of[trial.call.length].add(trial.answer.text.strip())
    for name, steps, equal in (
        ("again", asked[1::4], True),
        ("another question", asked[2::4], False),
        ("another prefix", asked[3::4], False),
        ("after other calls", last, True),
    ):
        others = [b for a, b in zip(cold, steps) if equal and a.answer.text.strip() != b.answer.text.strip()]
        p = float(hypergeom.sf(wrong_of(steps) - 1, 2 * count, wrong_of(cold) + wrong_of(steps), count))
        if len(others) > 1 and p >= LEVEL and any(len(texts) > 1 for texts in texts_of.values()):
            raise Unknown(f"{name}: {len(others)} of {count} have another answer than cold, and so have equal calls")
        if len(others) > 1 or p < LEVEL:
            served.evidence["prefix"] = next(
                (trial for trial in others or steps if others or not trial.right), steps[0]
            )
            differ = f"; {len(others)} have another answer than cold" * equal
            raise LawBroken(f"{name}: {rate(steps)}; cold: {rate(cold)}{differ}")


def texts(served: Served) -> Groups:
    if not served.echoes:
        return []
    length = min(served.longest - 1, MOST)
    return [[
        Call(law="by_position", length=length, text=400 + i, skip=skip)
        for i in range(TEXTS) for skip in ((0,) if served.reference else (0, length // 2))
    ]]  # fmt: skip


@law(texts)
def by_position(served: Served) -> None:
    """Log-probabilities are those of --reference at every position; without one, more context does not raise the loss."""
    trials = served.answered["by_position"]
    if not served.echoes:
        raise DoesNotApply("the completions of this server give no log-probabilities of a prompt")
    if refused := [trial.answer.refused for trial in trials if trial.answer.refused]:
        raise Unknown(refused[0])
    (compare_with_reference if served.reference else compare_halves)(served, trials)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of one value a text with its 95% interval."""
    value, low, high = t_interval(values)
    assert value is not None and low is not None and high is not None
    return value, low, high


def compare_with_reference(served: Served, trials: Sequence[Trial]) -> None:
    """LawBroken with the position from which log-probabilities are not the reference's.

    The second token sees one before it, and no encoding acts: what differs there is of the weights or their rounding.
    """
    assert served.reference is not None
    differences = [
        [abs(a - b) for a, b in zip(trial.answer.nats, served.reference(served.ids_of(trial.call)), strict=True)]
        for trial in trials
    ]

    def of(first: int, last: int) -> list[float]:
        return [fmean(row[first:last]) for row in differences]

    allowed, length = NATS + 2 * max(of(0, 1)), len(differences[0])
    bins = list(pairwise([1, *powers_of_two(4, length - 1), length]))
    size = max(fmean(of(*ends)) for ends in bins)
    if differ := [ends for ends in bins if interval(of(*ends))[1] > allowed]:
        first, last = differ[0]
        near = (a for a in range(first, last, JITTER) if interval(of(a, a + JITTER))[1] > allowed)
        first = next(near, first) if first > 1 else 1
        served.evidence["by_position"] = trials[0]
        cause = "a window, or an original length" if first > 1 else "a base, or a factor"
        raise LawBroken(
            f"log-probabilities differ from the reference's from token {first} on, by up to {size:.2g} nats: {cause}"
        )
    if size > allowed:
        raise Unknown(
            f"log-probabilities differ by {size:.2g} nats; {allowed:.2g} may be of weights and their rounding"
        )


def compare_halves(served: Served, trials: Sequence[Trial]) -> None:
    """LawBroken if the second half of the texts is predicted worse with the first half before it than alone."""
    half = len(trials[1].answer.nats)
    value, low, high = interval([
        fmean(whole.answer.nats[-half:]) / fmean(alone.answer.nats) - 1 for whole, alone in zip(trials[::2], trials[1::2])
    ])  # fmt: skip
    change = (
        f"with the text before them {half} tokens have a loss {value:+.1%} [{low:+.1%}, {high:+.1%}] higher than alone"
    )
    if low > MARGIN:
        served.evidence["by_position"] = trials[0]
        raise LawBroken(change)
    if high > MARGIN:
        raise Unknown(change)


@law(lambda served: [])
def counts(served: Served) -> None:
    """The server reads the tokens that were sent, refuses none within the declared length, and ends its answers."""
    trials = sorted((t for trials in served.answered.values() for t in trials), key=lambda trial: trial.answer.sent)
    if not trials:
        raise Unknown("it judges the calls of other laws, and none is asked for; name one in --laws, too")
    cut = [trial for trial in trials if trial.answer.cut]
    refused = [trial for trial in trials if trial.answer.refused and trial.call.length <= served.longest]
    for bad, say in (
        (cut, lambda answer: f"the server read {answer.read} of {answer.sent} tokens, and gave no error"),
        (refused, lambda answer: f"a prompt of {answer.sent} tokens is refused: {answer.refused}"),
    ):
        what = say(bad[0].answer) if bad else ""
        if len(bad) == len(trials) and bad[0].answer.cut:
            raise Unknown(f"{what}; so is every call, and nothing shows a length: is --tokenizer the model's?")
        if len(bad) > 1:
            served.evidence["counts"] = bad[0]
            raise LawBroken(f"{what}; so are {len(bad)} of {len(trials)} calls")
    if hidden := [trial for trial in trials if trial.answer.hidden]:
        part = len(hidden) / len(trials)
        least = hidden[0].answer.sent
        shorter = [trial for trial in trials if trial.answer.sent < least]
        if float(hypergeom.sf(len(hidden) - 1, len(trials), len(hidden), len(trials) - len(shorter))) < LEVEL:
            served.evidence["counts"] = hidden[0]
            raise LawBroken(
                f"from {least} tokens on {len(hidden)} of {len(trials) - len(shorter)} answers are empty: cut, or hidden in "
                f"reasoning; none of {len(shorter)} shorter ones is"
            )
        raise Unknown(f"{part:.0%} of the answers are empty: cut, or hidden in reasoning; add --thinking TOKENS")
