"""`longitude study`."""

import os
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.report import show
from longitude.cli.shared import FAILURES, keep_threads_from_spinning
from longitude.study.config import StudyConfig

GROUPS = {
    "data": "task data tokenizer train_length positions position_range documents",
    "model": "encodings layers hidden heads",
    "training": "steps seeds batch_size precision learning_rates warmup weight_decay start",
    "evaluation": "test_lengths methods stride",
    "execution": "device threads workers",
}
FIRST = "encodings data out seeds steps test_lengths plan"
EXAMPLES = """  longitude study --encodings rope alibi rope+fox --data notes/ --out runs/mine
  longitude study --preset classic --plan"""


def defaults(arguments: list[str]) -> dict[str, Any]:
    """Defaults of `study`: those of the preset or task that the arguments name, or what was asked last in their --out."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--preset", "--task", "--out"):
        parser.add_argument(option, nargs="?")
    asked = parser.parse_known_args(arguments)[0]
    chosen = {"config": StudyConfig(), "out": Path("runs/study"), **_of_preset_or_task(asked.preset, asked.task)}
    if {"-h", "--help"} & {*arguments} or asked.preset or asked.task or asked.out is None:
        return chosen
    from longitude.study.results import question_of

    question = question_of(Path(asked.out))
    return chosen if question is None else chosen | {"config": StudyConfig.of(question["configuration"])}


def _of_preset_or_task(preset: str | None, task: str | None) -> dict[str, Any]:
    """Defaults of the preset or the task that the arguments name."""
    if preset:
        from longitude.study.presets import of_preset  # loads torch

        config = of_preset(preset)
        if task and task != config.task:
            raise ValueError(f"--preset {preset} is of --task {config.task}, not {task}; leave one of them out")
        return {"config": config, "out": Path("runs") / (Path(preset).stem if preset.endswith(".toml") else preset)}
    if task in (None, "text"):
        return {}
    from longitude.study.tasks.base import of_task

    return {"config": of_task(task), "out": Path("runs") / task}


def study(
    config: Annotated[StudyConfig, tyro.conf.arg(name="")],
    workers: int | None = None,
    preset: str = "quick",
    out: Path = Path("runs/study"),
    fresh: bool = False,
    json: bool = False,
    plan: bool = False,
) -> int:
    """Train small models at a short length, measure them at longer ones, and report.

    The same command continues where it stopped; nothing is computed twice.

    Args:
        config: What to study.
        workers: Models to train in parallel on this machine, each in a separate process; by default one per GPU, or as many
            as the cores allow with --threads each.
        preset: Where the defaults of all options come from: quick (five minutes), classic (the protocol of ALiBi's paper),
            everything (all encodings), or ladder-a, ladder-b, ladder-c and ladder-gpu (growing sizes). claims/NAME are the
            studies of docs/claims.md. Your own .toml file works as well, written like those in longitude/study/presets.
        out: Directory of the run; by default runs/study, or runs and the name of the task or preset. With --out, options that
            you leave out are as you asked last there.
        fresh: Train the models of this question again.
        json: Print the rows as JSON instead of the table.
        plan: Run nothing; print parameters, steps, FLOPs and memory of every model, and about how long the study takes on this
            machine, from a few steps of each model. If this machine lacks the --device, there are no times.
    """
    keep_threads_from_spinning()
    if "LOCAL_RANK" in os.environ:  # two processes would write one folder
        raise ValueError(
            "a study trains each model in one process: expected the command without torchrun or accelerate launch, got a "
            "launched process; --workers N trains N models side by side, and several machines may share --out"
        )
    from longitude.runs.terminal import Progress

    with Progress() as bar:
        bar.update("reading the text, building the models", 0)
        from longitude.runs.machine import there
        from longitude.study.executors import executor_of
        from longitude.study.plan import plan as checked
        from longitude.study.runner import study as run

        elsewhere = plan and not there(config.device)
        planned = checked(config, out, elsewhere)
        executor = executor_of(planned.config, len(planned.trials), workers)
    if plan:
        return _print_costs(planned, workers, json, elsewhere)
    with Progress() as bar:
        watch = lambda trials, *share: bar.update(", ".join(trials), *share)  # noqa: E731
        finished = run(planned, fresh, watch, bar.note, executor, shlex.join(["longitude", *sys.argv[1:]]))
    code = show(finished, json)
    return code if finished.complete else FAILURES


def _print_costs(planned: Any, workers: int | None, json: bool, elsewhere: bool) -> int:
    """Print the estimated costs of the study; elsewhere: without times, because this machine lacks its device."""
    from longitude.cli.shared import print_costs
    from longitude.report.wording import count
    from longitude.runs.terminal import Progress
    from longitude.study.executors import executor_of
    from longitude.study.plan import costs, wall_seconds
    from longitude.study.rates import models_trained

    with Progress() as bar:
        step = lambda *now: bar.update(f"a few steps of {now[0]}", *now[1:])  # noqa: E731
        rows = costs(planned, step, timed=not elsewhere)
    config, trials = planned.config, models_trained(planned.config)
    at_once = getattr(executor_of(config, trials, workers), "workers", 1)
    minutes = wall_seconds(rows, len(config.seeds), at_once, len(config.learning_rates)) / 60
    whole = f"{at_once} at once: about {minutes:.1f} minutes on this machine as busy as now"
    if elsewhere:
        whole = f"without times: --device {config.device} is not on this machine"
    return print_costs(rows, json, f"\n{count(trials, 'model')} of these, {whole}")
