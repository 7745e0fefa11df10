"""transformers' own tests of a model, run over ours and over a stock Llama on our attention: `make conformance`.

The tests are those of the installed transformers: its source distribution is downloaded once, and its tests/ unpacked into
build/conformance, which git ignores. Nothing of them is kept here. What runs and what cannot apply stands in models.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "conformance"
TESTS = BUILD / f"transformers-{version('transformers')}" / "tests"


def fetch() -> Path:
    """The folder of transformers' tests, downloaded if it is not there yet."""
    if (TESTS / "test_modeling_common.py").exists():
        return TESTS
    BUILD.mkdir(parents=True, exist_ok=True)
    source = f"transformers=={version('transformers')}"
    options = ["--no-deps", "--no-binary", "transformers", "--dest", str(BUILD)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, source], check=True)
    top = TESTS.parent.name
    with tarfile.open(BUILD / f"{top}.tar.gz") as archive:
        tests = [member for member in archive.getmembers() if member.name.startswith(f"{top}/tests/")]
        archive.extractall(BUILD, tests, filter="data")
    return TESTS


class Table:
    """What ran, by model, and why the rest did not: printed at the end."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str], str] = {}
        self.reasons: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that falls in any of its parts has fallen; one that skips any part does not apply."""
        model, test = report.nodeid.split("::")[1:3]
        worst = self.outcomes.get((model, test), "")
        if report.failed:
            self.outcomes[model, test] = "failed"
        elif report.skipped and worst != "failed":
            self.outcomes[model, test] = "not applicable"
            self.reasons[plain(report.longrepr[2] if report.longrepr else "")][model, test] = None
        elif report.when == "call" and not worst:
            self.outcomes[model, test] = "passed"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        out, counts = terminalreporter, defaultdict(Counter)
        for (model, _), outcome in self.outcomes.items():
            counts[model][outcome] += 1
        wide = max(map(len, counts), default=0)
        out.section(f"transformers {version('transformers')}: its tests of models")
        for model, row in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
            out.line(f"{model:{wide}s}" + "".join(f"{row[kind]:6d} {kind}" for kind in OUTCOMES))
        out.section("why tests do not apply: how many tests, over how many models")
        for reason, tests in sorted(self.reasons.items(), key=lambda item: -len(item[1])):
            models = list(dict.fromkeys(model for model, _ in tests))
            named = f": {'; '.join(models)}" if len(models) < 4 else ""
            out.line(f"{len(tests):5d} over {len(models):2d}  {reason}{named}")


OUTCOMES = "passed", "not applicable", "failed"


def plain(reason: str) -> str:
    """A reason without the name of the one class that it came from."""
    reason = re.sub(r"<class '[\w.]+'>", "this model", reason.removeprefix("Skipped: "))
    return re.sub(r"\b(Longitude(For|Model|Enc|Dec)|Llama)\w*", "this model", reason)


def main() -> int:
    fetch()
    options = "-q -p no:cacheprovider -o addopts= -o filterwarnings=default --disable-warnings --import-mode=importlib".split()
    return int(pytest.main([str(HERE / "models.py"), *options, *sys.argv[1:]], plugins=[Table()]))


if __name__ == "__main__":
    raise SystemExit(main())
