"""Whether each task can be learned: the label that a task names as its ceiling, at the task's defaults, one seed.

    python benchmarks/ceilings.py --out benchmarks/results/DATE-ceilings.json --runs runs/ceilings

Each is an ordinary study in a folder of its own under --runs; what is there already is not trained again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from longitude.study.analysis import CRITERIA
from longitude.study.results import read_run
from longitude.study.tasks.base import TASKS, task_of


def with_ceilings() -> list[str]:
    """Tasks that know a label that solves them."""
    return [name for name in sorted(TASKS) if task_of(name).ceiling is not None]


def trained(task: str, folder: Path) -> None:
    """The study of a task's ceiling, as a user runs it."""
    command = ["study", "--task", task, "--encodings", str(task_of(task).ceiling), "--seeds", "0", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "longitude", *command], check=True)


def found_in(folder: Path) -> dict[str, Any]:
    """A study in a line: the share of right answers, the floor of each length, and what it was run with."""
    run = read_run(folder)
    [trial], criterion = run.trials, CRITERIA[run.task.kind](run)
    shares = {length: criterion.finding(trial.label, length, run.methods[0]).value for length in run.lengths}
    return {
        "task": run.config.task,
        "label": trial.label,
        "metric": run.task.words,
        "steps": run.config.steps,
        "train_length": run.config.train_length,
        "shares": shares,
        "floors": run.study["data"]["floor"],
        "seconds": trial.training_seconds,
        "machine": run.study["machine"]["cpu"],
        "made": run.study["begun"][:10],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/ceilings"))
    options = parser.parse_args()
    for task in with_ceilings():
        trained(task, options.runs / task)
    rows = [found_in(options.runs / task) for task in with_ceilings()]
    options.out.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
