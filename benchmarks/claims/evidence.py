"""Results that claims are judged on: the studies of a folder, each as `longitude study` leaves it, or as it was committed."""

from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from claims.protocol import differs, preset_name, preset_of
from longitude.runs.files import read_json
from longitude.statistics.estimates import Sums
from longitude.study.analysis import CRITERIA
from longitude.study.criterion import Criterion
from longitude.study.data import package_of
from longitude.study.results import ROWS, Run, is_kept, question_of, read_run

RESULTS = Path(__file__).parents[1] / "results"
"""Folder of the committed results of the benches."""
KEPT = RESULTS / "claims"
"""Folder of the kept studies of the series."""


class NotRun(Exception):
    """Results that a statement reads are not there; the message says which."""


class Measured(NamedTuple):
    """A label of a study at a length, as a statement reads it.

    Attributes:
        study: A name of the series.
        label: As the study's preset spells it.
        length: One of the study's.
        method: One of the study's; None: the first, that it concludes from.
    """

    study: str
    label: str
    length: int
    method: str | None = None

    def __str__(self) -> str:
        return f"{self.label} at {self.length}" + (f" ({self.method})" if self.method else "")


class Evidence:
    """The studies of a folder, read when they are asked for.

    Args:
        root: The folder; a study of the series is its folder of that name, with or without its models.
    """

    expected = staticmethod(cache(preset_of))
    """By which options a study must have been run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.criterion = cache(self._criterion)

    @cached_property
    def there(self) -> set[str]:
        """The studies that were run."""
        return {path.name for path in self.root.glob("*/") if question_of(path) is not None}

    def run(self, study: str) -> Run:
        """A study. NotRun where it is not there."""
        return self.criterion(study).run

    def _criterion(self, study: str) -> Criterion:
        """Criterion of a study. ValueError if it was run with other options than those of its preset."""
        path, config = self.root / study, self.expected(study)
        saved = question_of(path)
        if saved is None:
            raise NotRun(f"study {study} was not run")
        if why := differs(config, saved):
            raise ValueError(
                f"{path} holds results of another protocol: they were run with {why}, as --preset {preset_name(study)} has it; "
                f"run it again, or leave this study out of {self.root}"
            )
        if not is_kept(path) and not (path / ROWS).exists():
            raise NotRun(f"no model of study {study} was measured yet")
        run = read_run(path)
        return CRITERIA[run.task.kind](run)

    def bench(self, name: str) -> dict[str, Any]:
        """The newest committed result of a bench, "" of the encodings' own. NotRun where there is none."""
        name = name and f"-{name}"
        path = max(RESULTS.glob(f"????-??-??{name}.json"), default=None)
        if path is None:
            raise NotRun(f"no result of `make bench{name}` is here: they are in benchmarks/results of the repository")
        return read_json(path)

    def missing(self, of: Measured) -> str:
        """Which seeds of a label that its preset plans were not run, in words; empty if all were."""
        planned = {*self.expected(of.study).seeds}
        seeds = planned & {trial.seed for trial in self.run(of.study).of(of.label) if trial.status == "done"}
        return f"{len(seeds)} of {len(planned)} seeds" * (seeds < planned)

    def sums(self, of: Measured) -> Sums:
        """Sums from which the metric of a label at a length is computed, for its seeds; over packages, of Python's library.

        Documents of one package are alike, so a package is drawn whole. NotRun if a seed diverged.
        """
        criterion = self.criterion(of.study)
        run = criterion.run
        if diverged := [str(trial.seed) for trial in run.of(of.label) if trial.status == "diverged"]:
            raise NotRun(
                f"{of.label} of study {of.study}: seed {', '.join(diverged)} diverged; the others alone are not judged"
            )
        sums = criterion.sums(of.label, of.length, of.method or run.methods[0])
        if sums is None:
            why = next((trial.reason for trial in run.of(of.label) if trial.reason), "no seed has a value there")
            raise NotRun(f"{of} of study {of.study} was not measured: {why}")
        data = run.study["data"]
        if data.get("split_by") != "packages":
            return sums
        packages = [package_of(name) for name in data["validation_names"]]
        member = np.array([[one == other for other in dict.fromkeys(packages)] for one in packages])
        return sums._replace(of=sums.of @ member, over=sums.over @ member)
