"""`longitude study`."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.report import show
from longitude.cli.shared import FAILURES, waiting
from longitude.study.config import StudyConfig

LINES = 7
"""Plain lines per model where there is no terminal."""


def defaults(arguments: list[str]) -> dict[str, Any]:
    """Of `study`, for the preset or the task that the arguments name."""
    named = re.findall(r"--task[= ](\S+)", " ".join(arguments))
    presets = re.findall(r"--preset[= ](\S+)", " ".join(arguments))
    if presets:
        from longitude.study.presets import of_preset  # loads torch

        config = of_preset(presets[-1])
        if named and named[-1] != config.task:
            raise ValueError(
                f"--preset {presets[-1]} is of --task {config.task}, not {named[-1]}; leave one of them out"
            )
        return {"config": config, "out": Path("runs") / Path(presets[-1]).stem}
    if named in ([], ["text"]):
        return {}
    from longitude.study.tasks.base import of_task

    return {"config": of_task(named[-1]), "out": Path("runs") / named[-1]}


def study(
    config: Annotated[StudyConfig, tyro.conf.arg(name="")],
    preset: str = "quick",
    out: Path = Path("runs/study"),
    fresh: bool = False,
    json: bool = False,
    workers: int | None = None,
) -> int:
    """Train one small model per encoding and seed at a short length, measure each at longer lengths, write a report.

    The same command again continues where it stopped; with more encodings or seeds it adds them.

    Args:
        config: What to study.
        preset: Where the defaults of all options come from: quick (five minutes), classic (the protocol of ALiBi's paper),
            everything, or a .toml file of your own, written like those in longitude/study/presets.
        out: Directory of the run; by default runs/study, or runs and the name of the task or preset.
        fresh: Start over: remove the study that the directory holds.
        json: Print the rows as JSON instead of the table.
        workers: Models that are trained side by side on this machine, each in a process of its own; by default one for each
            GPU, or one for as many cores as a model has --threads. They change no result.
    """
    # Threads that spin while they wait for each other lose much as soon as anything else runs; docs/decisions.md has figures.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with waiting("reading the text, building the models"):
        from longitude.runs.progress import Progress
        from longitude.study.executors import executor_of
        from longitude.study.plan import plan
        from longitude.study.runner import study as run

        planned = plan(config, out, fresh)
        executor = executor_of(planned.config.device, planned.config.threads, len(planned.trials), workers)
    with Progress(lines=LINES * len(planned.trials)) as bar:
        outcome = run(planned, fresh, bar.update, bar.note, executor)
    code = show(out, json)
    return code if outcome.complete else FAILURES
