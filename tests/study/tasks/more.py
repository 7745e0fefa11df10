"""The tasks of examples/tasks.py, by name; they are registered only while they are read, for the sake of other tests."""

import runpy
from pathlib import Path
from typing import Any

from longitude.study.tasks.base import TASKS, Task, task_of

ours = {*TASKS}
FILE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tasks.py"))
MORE = {name: TASKS.factories.pop(name) for name in {*TASKS} - ours}


def task_named(name: str) -> Task:
    """A task of the package or of the file."""
    return MORE[name]() if name in MORE else task_of(name)
