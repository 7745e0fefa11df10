"""`longitude bench`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude.bench.config import BenchConfig
from longitude.cli.shared import DONE, FAILURES, INTERRUPTED, print_json, stderr_console


def defaults(arguments: list[str]) -> dict[str, Any]:
    """Of `bench`: a file for each kind of measurement, so that none overwrites another."""
    given = {argument.replace("_", "-") for argument in arguments}
    kind = next((option[1:] for option in ("--set", "--mixer-set", "--decode") if option in given), "")
    return {"out": Path(f"runs/bench{kind}.json")}


def bench(
    config: Annotated[BenchConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/bench.json"),
    set: bool = False,
    mixer_set: bool = False,
    decode: bool = False,
    json: bool = False,
) -> int:
    """Time and memory of encodings by backend and length, beside plain attention and other libraries; table, JSON, chart.

    Args:
        config: What to measure.
        out: The JSON; the chart stands beside it as .svg and .html. Each of --set, --mixer-set and --decode has its own.
        set: Measure the targets of this project instead, a fixed set of comparisons: under ten minutes on two quiet cores.
        mixer_set: The same for mixers and whole models, a second set.
        decode: Measure a generated token instead: time and memory of every mixer behind contexts of any length, a few minutes.
        json: Print the JSON instead of the table.
    """
    from longitude.bench.config import checked, checked_for_decoding, checked_for_set, require_place

    if set + mixer_set + decode > 1:
        raise ValueError("expected one of --set, --mixer-set and --decode, got several; leave the others out")
    the_set = "encodings" if set else "mixers" if mixer_set else None
    if decode:
        config = checked_for_decoding(config)
    else:
        config = checked(config) if the_set is None else checked_for_set(config, "--set" if set else "--mixer-set")
    require_place(out)
    console = stderr_console()
    with console.status("loading") if console.is_terminal else nullcontext():
        from longitude.bench import decode_report, report, run

    shown = decode_report if decode else report
    with run.Progress(console) as progress:
        try:
            measured = run.run_decoding(config, progress) if decode else run.run(config, the_set, progress)
        except KeyboardInterrupt:
            print("longitude: interrupted; nothing was written", file=sys.stderr)
            return INTERRUPTED
    run.write(out, measured)
    if json:
        print_json(measured)
    else:
        from rich.console import Console

        terminal = Console()
        for part in shown.parts(measured):
            terminal.print(part, highlight=False, markup=False)
        terminal.print(f"chart: {out.with_suffix('.html')}", highlight=False, markup=False, soft_wrap=True)
    return FAILURES if shown.failures(measured) else DONE
