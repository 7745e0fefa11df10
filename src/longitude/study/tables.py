"""The tables of a study as CSV, and their words."""

from typing import Any

import pandas as pd

from longitude.measure.rows import TRAINING
from longitude.report.wording import count
from longitude.statistics.estimates import Comparison
from longitude.study.analysis import Analysis
from longitude.study.criterion import LEARNED, Criterion, Effective, Finding
from longitude.study.results import RULE, Run, ngrams_named


def csv(frame: pd.DataFrame) -> str:
    """A table as CSV; several numbers of a cell have spaces between them, and missing values are empty."""

    def cell(value: Any) -> Any:
        return " ".join(map(str, value)) if isinstance(value, tuple) else value

    return frame.map(cell).to_csv(index=False)


def short_findings(analysis: Analysis) -> pd.DataFrame:
    """Seven columns of every label at every length, by the first method."""
    columns = ["label", "length", "value", "low", "high", "change", "verdict"]
    frame: Any = pd.DataFrame(analysis.main, columns=pd.Index(Finding._fields), dtype=object)[columns]
    return frame.rename(columns={"label": "encoding", "value": analysis.criterion.metric})


def findings(analysis: Analysis, method: str | None = None) -> pd.DataFrame:
    """Findings of every label at every length, by one method or all, with effective lengths and training."""
    every = [
        finding for name, of_method in analysis.findings.items() for finding in of_method if method in (None, name)
    ]
    if not every:
        return pd.DataFrame()
    frame = pd.DataFrame(every, columns=pd.Index(Finding._fields), dtype=object)
    frame["learned"] = frame["learned"].map(LEARNED.get, na_action="ignore").astype(object)
    effective = {
        (finding.method, finding.label): analysis.effective(finding.label, finding.method) for finding in every
    }
    for name in Effective._fields:
        of_row = [getattr(effective[finding.method, finding.label], name) for finding in every]
        frame[f"effective_length_{name}".removesuffix("_value")] = pd.Series(of_row, dtype=object)
    for name, values in training(analysis.run).items():
        frame[name] = pd.Series([values[finding.label] for finding in every], dtype=object)
    return frame


def training(run: Run) -> dict[str, dict[str, Any]]:
    """Column of a row -> label -> its value for training, the mean for seconds; None if no row has it."""
    rows = {label: [row for row in run.rows if row.label == label] for label in run.labels}
    by_name = {
        name: {label: getattr(of_label[0], name) if of_label else None for label, of_label in rows.items()}
        for name in TRAINING
    }
    for label, of_label in rows.items():
        seconds = {row.seed: row.train_seconds for row in of_label if row.train_seconds is not None}
        by_name["train_seconds"][label] = sum(seconds.values()) / len(seconds) if seconds else None
    return by_name


def every_comparison(analysis: Analysis) -> pd.DataFrame:
    """A row for each pair of labels at each length by each method: the fields of `Comparison`."""
    rows = [
        {"method": method} | comparison._asdict()
        for method, every in analysis.comparisons.items()
        for comparison in every
    ]
    return pd.DataFrame(rows, columns=["method", *Comparison._fields], dtype=object)


def floor_lines(run: Run) -> list[list[str]]:
    """Baselines without a model, as name and cells: n-grams at the training length, or a rule without positions at each."""
    bits = [
        [ngrams_named(order), *(f"{value:.2f}" if length == run.train_length else "" for length in run.lengths)]
        for order, value in run.floor.items()
    ]
    shares = [f"{run.guessing[length]:.0%}" if length in run.guessing else "" for length in run.lengths]
    return [*bits, *([[RULE, *shares]] if run.guessing else [])]


def in_words(pair: Comparison, criterion: Criterion, more: int = 0) -> dict[str, str]:
    """The numbers of a comparison; more: additional digits."""
    return {
        "by": criterion.amount(pair.value, more),
        "ends": criterion.span(pair.low, pair.high, more),
        "seen": f"{count(pair.seeds, 'seed')}, {pair.documents} {criterion.things}",
        "p_words": p_words(pair.p),
        "q_words": p_words(pair.q),
        "distinguished": "yes" if pair.decided else "no",
    }


def p_words(value: float | None) -> str:
    """A p-value in a table, such as 0.012."""
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def with_ends(value: str, ends: str) -> str:
    """0.120 [0.11 to 0.13]: with its interval, if there is one."""
    return f"{value} [{ends}]" if ends else value


def number(value: float | None) -> str | None:
    """A number in a table, such as 1,024 or 0.004 or 3.1e+07."""
    return None if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
