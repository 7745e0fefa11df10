"""Compare several studies: their findings on the same text, the options that differ, and reasons against a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from longitude.report.wording import and_
from longitude.statistics.comparisons import Comparison, compared
from longitude.study.analysis import Analysis, analyse
from longitude.study.config import StudyConfig, listed, option
from longitude.study.results import Run
from longitude.study.tables import findings, in_brackets

OF_DATA = ("data", "tokenizer", "train_length", "positions", "position_range", "steps", "match", "batch_size")
"""Options that decide the data of a seed in training: if one differs, seeds of two studies are not paired."""
NOT_SHOWN = ("encodings", "seeds", "test_lengths", "methods", "device", "task", "documents", "stride", "threads")
"""Options that are compared elsewhere, or do not change the findings."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Studies of the same question on the same text.

    Attributes:
        analyses: Name -> study, in the order given.
        lengths: Lengths that all studies measured.
        options: Options that differ: name -> value of each study.
        comparisons: Pairs of all labels of all studies at the longest of these lengths, adjusted together.
        unpaired: Options that prevent comparisons, because seeds did not see the same data; empty if there are comparisons.
    """

    analyses: dict[str, Analysis]
    lengths: list[int]
    options: dict[str, list[Any]]
    comparisons: list[Comparison]
    unpaired: list[str]

    @property
    def frame(self) -> pd.DataFrame:
        """The findings of all at the common lengths, with the options that differ."""
        frames = []
        for i, (name, analysis) in enumerate(self.analyses.items()):
            frame = findings(analysis)
            frame = frame[frame["length"].isin(self.lengths)]
            for place, (key, values) in enumerate(self.options.items()):
                frame.insert(place, key, pd.Series([values[i]] * len(frame), index=frame.index, dtype=object))
            frame.insert(0, "run", name)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    @property
    def lines(self) -> list[list[str]]:
        """The table: run, encoding, the options that differ, a value for each length, effective length."""
        lines = []
        for i, (name, analysis) in enumerate(self.analyses.items()):
            options = [_word(values[i]) for values in self.options.values()]
            for label in analysis.run.labels:
                found = [each for each in analysis.of(label) if each.length in self.lengths]
                cells = [analysis.criterion.short(each) for each in found]
                reach = in_brackets(*analysis.criterion.reach(analysis.of(label)))
                lines.append([name, label, *options, *cells, reach])
        return lines

    @property
    def heads(self) -> list[str]:
        """Column heads of `lines`."""
        return ["run", "encoding", *map(option, self.options), *map(str, self.lengths), "effective length"]

    @property
    def sentence(self) -> str:
        """By how much the best of all is ahead at the longest common length, or why that is unknown."""
        if self.unpaired:
            differ = and_([option(name) for name in self.unpaired])
            return f"Seeds of these studies did not see the same data ({differ}), so no differences are tested."
        first = next(iter(self.analyses.values()))
        ranked = sorted(
            ((value.value, _named(name, value.label)) for name, analysis in self.analyses.items()
             for value in analysis.main if value.length == self.lengths[-1] and value.value is not None),
            reverse=not first.criterion.less_is_better,
        )  # fmt: skip
        two = {name for _, name in ranked[:2]}
        words = [first.criterion.best(each) for each in self.comparisons if {each.better, each.worse} == two]
        return f"Best at {self.lengths[-1]} {first.run.task.unit}: {words[0]}." if words else ""


def side_by_side(paths: Sequence[Path | str]) -> SideBySide:
    """Read studies and put them side by side.

    Args:
        paths: Two run directories or more.

    Raises:
        ValueError: The studies cannot be compared, with what differs between them; also as `read_run`.
    """
    analyses = dict(zip(_names(paths), map(analyse, paths), strict=True))
    (_, first), *others = analyses.items()
    for name, other in others:
        if why := _differs(first.run, other.run):
            raise ValueError(f"{name} cannot be compared with {first.run.path}: {why}")
    runs = [analysis.run for analysis in analyses.values()]
    lengths = [length for length in first.run.lengths if all(length in run.lengths for run in runs)]
    if not lengths:
        measured = "; ".join(f"{run.path} at {listed(run.lengths)}" for run in runs)
        remedy = "give one the --test-lengths of the other"
        raise ValueError(f"these studies have no length in common: {measured}; {remedy}")
    shown = [name for name in StudyConfig.__dataclass_fields__ if name not in NOT_SHOWN]
    every = {name: [getattr(run.config, name) for run in runs] for name in shown}
    options = {name: values for name, values in every.items() if any(value != values[0] for value in values)}
    unpaired = [name for name in OF_DATA if name in options]
    texts = {run.study["data"].get("training_sha256") for run in runs}
    if None not in texts:  # the same text may have different names
        unpaired = [*["data"] * (len(texts) > 1), *(name for name in unpaired if name not in ("data", "tokenizer"))]
    if {run.steps(label) for run in runs for label in run.labels} == {runs[0].config.steps} and "match" in unpaired:
        unpaired.remove("match")  # every model was trained for the same steps nevertheless
    pairs = [] if unpaired else _compared(analyses, lengths[-1])
    return SideBySide(analyses, lengths, options, pairs, unpaired)


def _compared(analyses: dict[str, Analysis], length: int) -> list[Comparison]:
    criterion, sums = next(iter(analyses.values())).criterion, {}
    for name, analysis in analyses.items():
        for label in analysis.run.labels:
            if (of := analysis.criterion.sums(label, length, analysis.run.methods[0])) is not None:
                sums[_named(name, label)] = of
    return compared(sums, length, criterion.metric, criterion.less_is_better)


def _differs(a: Run, b: Run) -> str | None:
    """Why two runs cannot be compared."""
    if not a.methods or not b.methods:
        return "one was measured by position only; add non-overlapping to its --methods"
    methods = a.methods[:1], b.methods[:1]
    asked = {"task": (a.config.task, b.config.task), "methods": methods, "stride": (a.config.stride, b.config.stride)}
    for name, (ours, theirs) in asked.items():
        if ours != theirs and (name != "stride" or a.methods[0] == "sliding"):
            return f"{option(name)} is {_word(theirs)}, not {_word(ours)}"
    if a.study["data"]["sha256"] != b.study["data"]["sha256"]:
        ours, theirs = (f"{run.study['data']['source']}, sha256 {run.study['data']['sha256'][:12]}" for run in (a, b))
        text = f"it was measured on another text or other parts of it ({theirs}; not {ours})"
        same = "studies of one --data, with one longest length and one number of --documents, measure the same"
        return f"{text}; {same}"
    return None


def _names(paths: Sequence[Path | str]) -> list[str]:
    """Names of the folders if they differ, else their whole paths. ValueError for a repeated folder, and for fewer than two."""
    whole = [Path(path) for path in paths]
    if len({path.resolve() for path in whole}) < max(2, len(whole)):
        raise ValueError(f"give two studies or more, each once, got {listed([str(path) for path in whole])}")
    names = [path.name for path in whole]
    return names if len(set(names)) == len(names) else [str(path) for path in whole]


def _named(run: str, label: str) -> str:
    return f"{label} of {run}"


def _word(value: Any) -> str:
    return listed(value) if isinstance(value, tuple | list) else str(value)
