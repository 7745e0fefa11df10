"""docs/claims.md: one screen, a row for each claim; and for the site a page for each, with statements, protocol and charts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import calibration
from claims.base import CONFIRMED, NOT_RUN, REFUTED, RUNGS, UNDECIDED, Claim, Judged
from claims.evidence import Evidence, NotRun
from claims.protocol import preset_name
from claims.series import list_studies
from claims.tables import false_discovery
from longitude.report.figure import Figure
from longitude.report.table import markdown
from longitude.report.wording import count, paper, papers, with_base
from longitude.statistics.estimates import HOLDS, LOST, UNCLEAR
from longitude.study.analysis import CRITERIA, Analysis
from longitude.study.criterion import Criterion
from longitude.study.pictures.by_length import by_length
from longitude.study.presets import about
from longitude.study.results import LAST, Run
from longitude.study.tables import p_words

LINES = 7
"""Maximum number of lines in a chart."""
QUESTIONS = {
    "Does the loss rise past the training length?": "1b 2a 2b 3a 3b 3c 8a 8b 8c 10c 21a",
    "What do RoPE-scaling methods gain?": "4a 4b 4c 5 17",
    "What differs at the training length?": "1a 6a 16 19",
    "Which tasks can be solved?": "9a 9c 10a 10b 11a 18a 18b 21b",
    "What costs less?": "11b",
    "Without a published measurement, counted apart": "1c 6c 15a 15b",
}
"""Groups of the page: question -> numbers of its claims."""
RANK = {LOST: 0, None: 1, UNCLEAR: 2, HOLDS: 3}
"""Verdicts of statements, the one that decides a claim first."""
OPENING = """# Claims of the literature, tested

Look up whether a small test that you can repeat supports what papers say about position encodings and token mixers.

* {counts}
* {agreement}

**A verdict is about the sentence at this size, not about the paper.** A has models of 0.1 million parameters, B of 0.4 million
and more: they show that an encoding breaks, and cannot rank large models. The largest size with all planned seeds decides.
*Does not get worse* need not mean that the length is used: a model that sees 63 bytes does not get worse, too.
Most undecided claims compare models that are not known to be better than one that sees 63 to 255 bytes.
2a is judged in sliding windows at twice the length, which was decided after its rows were known.
`make verdicts ARGS="--only 2a"` prints the planned statement, too.
*Published* says whether our signs agree with published numbers, of up to 30 billion parameters, where we found some.

`make verdicts` prints every statement, from [committed results](../benchmarks/results/claims), in a minute.
`make verdicts ARGS="runs/claims --run --only 2a"` trains and judges one claim again. `make docs` builds a page for each claim,
with what would decide it. [How claims are tested](../benchmarks/claims/protocol.md) has the limits.

Each row links the paper. Its number, with the 95% interval, is of the statement that decides: the first contradicted or
undecided one, if there is one."""


NAMES = {"There": "In the paper", "Here": "Our test", "Varied": "Varied"}
PARTS = re.compile(rf"\s*\b({'|'.join(NAMES)}): ")
"""The parts of a protocol, which begin paragraphs."""


class Chart(NamedTuple):
    """A chart of the page, and its numbers as Markdown, which stand below it and in its file."""

    figure: Figure
    numbers: str


def index(judged: Sequence[Judged]) -> str:
    """docs/claims.md: two counts and the agreement with published numbers, then a row for each claim, by question."""
    published, others = ([claim for claim in judged if claim.claim.published == wanted] for wanted in (True, False))
    counts = f"{counted('published claims', published)} {counted('others', others)}"
    pairs = calibration.pairs()
    rates = "; ".join(f"{rung.upper()}: {calibration.rate(getattr(pair, rung) for pair in pairs)}" for rung in RUNGS)
    agreement = f"Same sign as published, in pairs of [published.csv](../benchmarks/published.csv): {rates}."
    parts = [OPENING.format(counts=counts, agreement=agreement)]
    for question, numbers in QUESTIONS.items():
        rows = [_row(claim) for claim in judged if claim.claim.number in numbers.split()]
        parts += [f"## {question}", markdown(["", "claim", "A", "B", "published", "number"], rows)] if rows else []
    parts += ["## The studies", "The rows of each study are in `benchmarks/results/claims/NAME`."]
    return _joined(parts)


def counted(noun: str, judged: Sequence[Judged]) -> str:
    """27 published claims: 9 confirmed, 5 refuted, 13 undecided."""
    verdicts = [UNDECIDED if claim.verdict == NOT_RUN else claim.verdict for claim in judged]
    return f"{len(judged)} {noun}: {', '.join(f'{verdicts.count(v)} {v}' for v in (CONFIRMED, REFUTED, UNDECIDED))}."


def word(judged: Judged, rung: str) -> str:
    """The verdict at a rung, bold where it is the claim's; instead of it which seeds are missing; empty if it was not judged."""
    verdict = judged.verdict_at(rung)
    if verdict == NOT_RUN:
        return next(
            (outcome.remark for outcome in judged.outcomes(rung) if outcome.verdict is None and outcome.number), verdict
        )
    return f"**{verdict}**" if verdict and rung == judged.rung else verdict or ""


def _row(judged: Judged) -> list[str]:
    """A claim's anchor and number, its sentence with a link to the paper, its words and its number."""
    claim, outcomes = judged.claim, judged.outcomes(judged.rung)
    worst = min(RANK[outcome.verdict] for outcome in outcomes)
    numbers = [outcome.number for outcome in outcomes if RANK[outcome.verdict] == worst and outcome.estimate]
    number = next(iter(numbers or [outcome.number for outcome in outcomes]))
    return [
        f'<a id="{anchor(claim)}"></a>{claim.number}',
        f"[{claim.claimed}]({claim.link})",
        *(word(judged, rung) for rung in RUNGS),
        calibration.published(claim.name) or "",
        re.sub(r" (bits|points)(?=[,\]])", "", number.partition(" (time")[0].partition(" at ")[0]),
    ]


def pages(judged: Sequence[Judged], evidence: Evidence, drawn: Mapping[str, Chart]) -> Iterator[tuple[str, str]]:
    """(name, Markdown) of the site's page for each claim, and of the page of studies; drawn: its `charts`."""
    chances = iter(map(p_words, false_discovery(judged)))
    for claim in judged:
        pictures = [(name, chart) for name, chart in drawn.items() if name.startswith(f"{claim.claim.number}-")]
        yield anchor(claim.claim), _joined([*_claim(claim, chances, evidence), *(_chart(*pair) for pair in pictures)])
    head = "The committed results of every study that a claim reads, each by its first method."
    studies = (_study(name, evidence) for name in list_studies())
    yield "studies", _joined(["# The studies of the claims", head, *studies])


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


# ---- a claim ---------------------------------------------------------------------------------------------------------
def anchor(claim: Claim) -> str:
    """Where links lead: its row on docs/claims.md, and its page of the site."""
    return f"{claim.number}-{claim.name}"


def _claim(judged: Judged, chances: Iterator[str], evidence: Evidence) -> list[str]:
    claim = judged.claim
    studies = ", ".join(f"[{name}](studies.md#study-{name})" for name in claim.studies)
    published = calibration.published(claim.name)
    parts = [f"# {claim.number} {claim.title}", f"Verdict: **{judged.verdict}**.", f"**{claim.claimed}**"]
    for rung, size in RUNGS.items():
        if claim.statements(rung):
            parts += [f"With models of {size}: {word(judged, rung)}.", _statements(judged, rung, chances)]
    parts += [f"Signs of published numbers: {published}."] * bool(published)
    parts += [f"**What would decide it**: {claim.costs}"] * bool(claim.costs)
    parts += [
        f"Source: [{claim.source}]({claim.link}).",
        PARTS.sub(lambda name: f"\n\n**{NAMES[name[1]]}**: ", claim.protocol).strip(),
        *([f"**Studies**: {studies}. [How claims are tested](protocol.md)."] if studies else []),
    ]
    if claim.varied:
        parts += ["Varied, no part of the verdict:", _statements(judged, "varied", chances)]
    return parts


def _statements(judged: Judged, wanted: str, chances: Iterator[str]) -> str:
    lines, clauses, above = [], {""}, ""
    for part, statement, outcome in judged.lines:
        if part == wanted:
            clause = judged.claim.clause_of(statement)
            remark = "as above" if outcome.remark and outcome.remark == above else outcome.remark
            word = ": ".join(filter(None, [outcome.word, remark]))
            lines.append(
                [clause if clause not in clauses else "", statement.words, outcome.number, next(chances), word]
            )
            clauses.add(clause)
            above = outcome.remark
    columns = ["clause", "statement", "number, 95% interval", "q", "verdict"]
    bare = [0] * (len(clauses) < 3)  # one clause is the sentence above
    bare += [3] * (not any(line[3] for line in lines))  # levels have intervals alone, without q
    rows = [[cell for place, cell in enumerate(row) if place not in bare] for row in (columns, *lines)]
    return markdown(rows[0], rows[1:])


# ---- charts ----------------------------------------------------------------------------------------------------------
def charts(judged: Sequence[Judged], evidence: Evidence) -> dict[str, Chart]:
    """By name: for each claim and each study, the labels and methods that it reads, by length."""
    read: dict[tuple[str, str], dict[tuple[str, str | None], None]] = {}
    for claim in judged:
        places = [place for part, statement, _ in claim.lines if part != "varied" for place in statement.reads]
        for place in places:
            method = None if place.method == LAST else place.method
            read.setdefault((claim.claim.number, place.study), {})[place.label, method] = None
    found = {}
    for (number, study), lines in read.items():
        chart = _drawn(study, [*lines], evidence)
        if chart is not None:
            found[f"{number}-{study}"] = chart
    return found


def _drawn(study: str, lines: Sequence[tuple[str, str | None]], evidence: Evidence) -> Chart | None:
    """Labels by method, as many as a chart can tell apart; None where the study was not run, or a chart would show nothing."""
    try:
        run = evidence.run(study)
    except NotRun:
        return None
    first = run.methods[0]
    done = {trial.label for trial in run.trials if trial.status == "done"}
    drawn = [(label, method or first) for label, method in lines if label in done and method in (None, *run.methods)]
    drawn = list(dict.fromkeys(drawn)) if len({*drawn}) <= LINES else [line for line in drawn if line[1] == first]
    if not drawn or len(drawn) > LINES or len(run.lengths) < 3:
        return None
    drawn.sort(key=lambda line: (run.labels.index(line[0]), run.methods.index(line[1])))
    labels, methods = ({line[place]: None for line in drawn} for place in (0, 1))
    kept = {"encodings": [*labels], "methods": [each for each in run.config.methods if each in methods]}
    study = {**run.study, "configuration": {**run.study["configuration"], **kept}}
    part = Run(run.path, study, tuple(trial for trial in run.trials if trial.label in labels), run.rows)
    criterion = CRITERIA[run.task.kind](part)
    gate = r" \+ attention \((\w+)=true\)"  # a chart has no room for all of it
    short = {label: re.sub(gate, r", \1", name) for label, name in papers([*labels]).items()}
    names = [short[label] + ("" if method == first else f", {method}") for label, method in drawn]
    findings = [
        criterion.finding(label, length, method)._replace(label=name)
        for name, (label, method) in zip(names, drawn, strict=True)
        for length in run.lengths
    ]
    named = {**run.study, "configuration": {**run.study["configuration"], "encodings": names}}
    analysis = Analysis(Run(run.path, named, (), []), criterion, {first: findings}, {})
    figure = next(iter(by_length(analysis)))
    rows = []
    for name in names:
        values = [(criterion.number(each), criterion.bounds(each)) for each in analysis.of(name)]
        rows.append([name, *(f"{value} [{ends}]" if ends else value for value, ends in values)])
    return Chart(figure, markdown([f"{run.task.words} at", *map(str, run.lengths)], rows))


def _chart(name: str, chart: Chart) -> str:
    study = name.partition("-")[2]
    words = f"{chart.figure.title}, study {study}. {chart.figure.alt.partition(';')[0]}."
    image = f"![{words}]({name}.svg)"
    return f"{image}\n\n<details><summary>The numbers of the chart</summary>\n\n{chart.numbers}\n\n</details>"


# ---- a study ---------------------------------------------------------------------------------------------------------
def _study(name: str, evidence: Evidence) -> str:
    head = f"## Study {name}\n\n{about(preset_name(name))}"
    try:
        run = evidence.run(name)
    except NotRun:
        return f"{head}\n\nNot run: `longitude study --preset {preset_name(name)}`, with `--plan` how long it takes."
    return f"{head} Its options are in the preset `{preset_name(name)}`.\n\n{_when(run)}\n\n{_values(evidence.criterion(name))}"


def _values(criterion: Criterion) -> str:
    """Mean over seeds of every label at every length, by the study's first method."""
    run = criterion.run
    lines = [
        [
            paper(with_base(label)),
            *(criterion.number(criterion.finding(label, length, run.methods[0])) for length in run.lengths),
        ]
        for label in run.labels
    ]
    table = markdown([f"{run.task.words} at", *map(str, run.lengths)], lines)
    return f"<details><summary>All values, {run.methods[0]}</summary>\n\n{table}\n\n</details>"


def _when(run: Run) -> str:
    """Models, time, machine and versions."""
    study, trials = run.study, run.trials
    done = sum(trial.status == "done" for trial in trials)
    seconds = sum((trial.training_seconds or 0) + (trial.measuring_seconds or 0) for trial in trials)
    machine, versions = study["machine"], study["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    releases = ", ".join(f"{name} {versions[name]}" for name in ("longitude", "torch", "python"))
    later = "".join(
        f"; {count(len(part['trials']), 'model')} of them {part['begun'][:10]} on {part['machine']['cpu']}"
        for part in study.get("joined", [])
    )
    return (
        f"{done} of {count(len(trials), 'model')} done, {seconds / 60:.0f} minutes one by one, begun {study['begun'][:10]} "
        f"on {where}{later}. Versions: {releases}. Data: {study['data']['source']}."
    )
