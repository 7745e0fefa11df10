"""`longitude measure`."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, FAILURES, print_json
from longitude.errors import UsageError
from longitude.measure.config import MeasureConfig

GROUPS = {
    "data": "text documents lengths trained seed",
    "perplexity": "methods stride targets bos",
    "retrieval": "tasks trials depths chat",
    "server": "endpoint model tokenizer concurrency thinking",
    "execution": "dtype device batch chunk",
}
EXAMPLES = """  longitude measure models/llama models/llama-yarn --lengths 256 512 1024
  longitude measure models/llama --tasks passkey needle-single --lengths 512"""


def measure(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    config: Annotated[MeasureConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/measure"),
    fresh: bool = False,
    json: bool = False,
    plan: bool = False,
) -> int:
    """Measure checkpoints at each length: perplexity on your text, and retrieval.

    The same command continues where it stopped; nothing is measured twice.

    Args:
        models: Folders of Hugging Face causal models, or names on the hub; none with --endpoint.
        config: What to measure.
        out: Directory of the run. It may have the measurements of many questions; its report is of the last one.
        fresh: Measure again what this question needs.
        json: Print the rows as JSON instead of the tables.
        plan: Measure nothing; print tokens, FLOPs, memory and time on this machine and on one H100, from config.json alone.
    """
    from longitude.runs.terminal import Progress

    if plan and config.endpoint is not None:
        raise UsageError("--plan", "checkpoints, whose cost is known", "--endpoint", "leave one of them out")
    if plan:
        return _print_costs(models, config, json)
    with Progress() as bar:
        bar.update("reading the text and the configurations", 0)
        from longitude.measure import run
        from longitude.measure.plan import plan as checked
        from longitude.runs.store import Store

        Store(out).require_place(run.VERB)
        planned = checked(config, models)
        bar.total = sum(len(planned.units(subject)) for subject in planned.subjects)
        results = run.measure(planned, out, bar, fresh)
    show(results, json)
    finite = all(row.value is not None or row.count == 0 for row in results.rows)
    return DONE if finite and not results.failures else FAILURES


def show(results: Any, json: bool) -> None:
    """Write the report of measurements, a `Results`; print its tables, or its rows."""
    from longitude.measure import report, to_frame
    from longitude.report.table import show as display

    path = report.write_report(results)
    if json:
        print_json(to_frame(results.rows))
    else:
        display(*report.terminal(results), f"report: {path}")


def _print_costs(models: tuple[str, ...], config: MeasureConfig, json: bool) -> int:
    """Print the estimated costs of the measurement."""
    from longitude.cli.shared import print_costs
    from longitude.measure.plan import costs
    from longitude.runs.machine import available_memory, device_of
    from longitude.runs.terminal import Progress

    with Progress() as bar:
        parts = costs(config, models, lambda what, *share: (bar.update(what, *share), bar.note(what)))
    free = f"{available_memory(device_of(config.device).type) / 1e9:.1f} GB are free"
    lines = [f"\n{cost.model}: needs {cost.memory}, of which {free}" for cost in parts]
    return print_costs(parts, json, *dict.fromkeys([*lines, *(cost.reason for cost in parts if cost.reason)]))
