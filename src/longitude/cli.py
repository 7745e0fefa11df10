"""The command line: one verb, one result.

Exit codes: 0 done; 1 finished, but something in it failed or diverged; 2 wrong use, with one line that says what was
expected, what came and what to do; 130 interrupted. Results go to standard output, progress and errors to standard
error. Nothing here imports torch before a verb needs it.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import tyro

from longitude import __version__
from longitude.bench.config import BenchConfig
from longitude.errors import unknown
from longitude.study.config import StudyConfig, option

DONE, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def study(
    config: Annotated[StudyConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/study"),
    fresh: bool = False,
    json: bool = False,
) -> int:
    """Train one small model per encoding and seed at a short length, measure each at longer lengths, write a report.

    The same command again continues where it stopped; with more encodings or seeds it adds them.

    Args:
        config: What to study.
        out: Directory of the run.
        fresh: Start over: remove the study that the directory holds.
        json: Print the rows as JSON instead of the table.
    """
    # Threads that spin while they wait for each other lose much as soon as anything else runs; docs/decisions.md has figures.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = _stderr()
    with console.status("reading the text, building the models") if console.is_terminal else nullcontext():
        from longitude.study import runner
        from longitude.study.progress import Terminal

        planned = runner.plan(config, out)
    with Terminal(console, planned.config, len(planned.cells)) as terminal:
        outcome = runner.study(planned, fresh=fresh, watcher=terminal, finished=terminal.finished)
    return _show(outcome.run, json, outcome.complete)


def report(run: Annotated[Path, tyro.conf.Positional], json: bool = False) -> int:
    """Build the report of a run again, from its saved results alone.

    Args:
        run: Directory of a study.
        json: Print the rows as JSON instead of the table.
    """
    if not (run / "study.json").is_file():
        raise ValueError(f"{run} holds no study: expected a directory with study.json, as `longitude study` writes")
    return _show(run, json, True)


def bench(
    config: Annotated[BenchConfig, tyro.conf.arg(name="")],
    out: Path = Path("runs/bench.json"),
    set: bool = False,
    json: bool = False,
) -> int:
    """Time and memory of encodings by backend and length, beside plain attention and other libraries; table, JSON, chart.

    Args:
        config: What to measure.
        out: The JSON; the chart stands beside it as .svg and .html.
        set: Measure the targets of this project instead, a fixed set of comparisons: under ten minutes on two quiet cores.
        json: Print the JSON instead of the table.
    """
    from longitude.bench.config import checked, checked_for_set, require_place

    config = checked_for_set(config) if set else checked(config)
    require_place(out)
    console = _stderr()
    with console.status("loading") if console.is_terminal else nullcontext():
        from longitude.bench import report, run

    with run.Progress(console) as progress:
        try:
            measured = run.run(config, set, progress)
        except KeyboardInterrupt:
            print("longitude: interrupted; nothing was written", file=sys.stderr)
            return INTERRUPTED
    run.write(out, measured)
    if json:
        _print_json(measured)
    else:
        from rich.console import Console

        shown = Console()
        for part in report.parts(measured):
            shown.print(part, highlight=False, markup=False)
        shown.print(f"chart: {out.with_suffix('.html')}", highlight=False, markup=False, soft_wrap=True)
    return FAILURES if report.failures(measured) else DONE


def list_(json: bool = False) -> int:
    """List what there is: encodings, scaling schemes, samplers of positions, and what runs on this machine.

    Args:
        json: Print JSON instead of tables.
    """
    from longitude.catalogue import catalogue

    found = catalogue()
    if json:
        _print_json(found)
        return DONE
    from rich.console import Console

    console = Console()
    for part in _tables(found):
        console.print(part, highlight=False)
    return DONE


def _tables(found: dict[str, Any]) -> Iterator[Any]:
    """The catalogue for the terminal."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(
            *columns, title=f"[bold]{title}[/]", title_justify="left", title_style="", box=None, pad_edge=False
        )
        made.columns[0].no_wrap = True
        return made

    entries = found["encodings"]
    everyone = set.intersection(*(set(takers) for entry in entries for takers in entry["backends"].values()))
    shown = table("encodings", "name", "class", "acts as", "properties", "source", "backends")
    for entry in entries:
        training, reading = entry["backends"]["training"], entry["backends"]["reading"]
        takers = [name if name in training else f"({name})" for name in reading if name not in everyone]
        shown.add_row(
            Text(entry["name"], "bold"),
            entry["class"],
            " ".join(entry["acts"]) or "-",
            _properties(entry),
            entry["source"] or "-",
            " ".join(takers) or "-",
        )
    yield shown
    yield (
        "relative: one number added to all positions changes nothing. causal: keys in the future have no meaning. raw keys: "
        "a cache keeps keys as they came. one for all: layers share one module, as in the paper. "
        f"backends: {' and '.join(sorted(everyone))} take all encodings; those in parentheses only without gradients.\n"
    )
    shown = table("their options", "name", "options; models give dim, num_heads, head_dim, max_length from their shape")
    for entry in entries:
        shown.add_row(Text(entry["name"], "bold"), " ".join(entry["options"]) or "-")
    yield shown
    shown = table("\nscaling of rotations", "name", "options (those with = may be left out)", "source")
    for entry in found["scaling"]:
        shown.add_row(Text(entry["name"], "bold"), _options(entry), entry["source"] or "-")
    yield shown
    shown = table("\nsamplers of training positions", "name", "options", "what it is")
    for entry in found["samplers"]:
        shown.add_row(Text(entry["name"], "bold"), _options(entry) or "-", entry["is"])
    yield shown
    here = found["machine"]
    yield (
        f"\nhere: longitude {here['longitude']}, torch {here['torch']}, threads {here['threads']}, "
        f"CUDA {here['cuda'] or 'no'}, "
        f"MPS {'yes' if here['mps'] else 'no'}, transformers {here['transformers'] or 'not installed'}"
    )


def _properties(entry: dict[str, Any]) -> str:
    said = {
        "relative": entry["relative"],
        "absolute": not entry["relative"],
        "learned": entry["learned"],
        "causal": entry["causal_only"],
        f"up to {entry['max_length']}": entry["max_length"],
        f"{entry['axes']} axes": entry["axes"] > 1,
        "raw keys": not entry["stable_keys"],
        "one for all": entry["learned"] and entry["shared"],
    }
    return ", ".join(words for words, is_so in said.items() if is_so)


def _options(entry: dict[str, Any]) -> str:
    return " ".join(n if n in entry["required"] else f"{n}={default}" for n, default in entry["options"].items())


VERBS: dict[str, Callable[..., int]] = {"study": study, "report": report, "bench": bench, "list": list_}
OPTIONS: dict[str, type] = {"study": StudyConfig, "bench": BenchConfig}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--version"]:
        print(f"longitude {__version__}")
        return DONE
    try:
        _require_known(arguments)
        return _dispatch(arguments)
    except ValueError as error:
        print(f"longitude: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:  # whoever read our output has stopped reading
        sys.stdout = None
        return DONE
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        print(f"longitude: {error.strerror}: {error.filename or 'while writing'}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("longitude: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


def _show(run: Path, json: bool, complete: bool) -> int:
    """Write the report of a run; print its table and conclusion, or its rows."""
    from longitude.study import report as reports, statistics
    from longitude.study.results import read_run

    results = read_run(run)
    path = reports.write_report(results)
    if json:
        from longitude.measure import to_frame

        _print_json(to_frame(results.rows))
    else:
        from rich.console import Console

        console = Console()
        console.print(statistics.table(results))
        console.print(statistics.conclusion(results), highlight=False, markup=False)
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return DONE if complete else FAILURES


def _print_json(value) -> None:
    from json import dumps, loads

    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1, ensure_ascii=False))


def _stderr():
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


# ---- parsing: tyro reads the arguments; what it would say in a box is said in one line ------------------------------


def _require_known(arguments: list[str]) -> None:
    """The nearest valid verb or option for one that nobody knows."""
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] not in ("-h", "--help"):
            raise unknown("option", arguments[0], ["--help", "--version"], "`longitude --help` shows the verbs.")
        return
    verb = arguments[0]
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS, "`longitude --help` shows them.")
    names = [name for name in signature(VERBS[verb]).parameters if name != "config"]
    if verb in OPTIONS:
        names += [field.name for field in fields(OPTIONS[verb])]
    valid = [*map(option, names), "--help"]
    for argument in arguments[1:]:
        name = option(argument.partition("=")[0].removeprefix("--"))
        if argument.startswith("--") and name not in valid:
            raise unknown("option", argument, valid, f"`longitude {verb} --help` shows them.")


def _dispatch(arguments: list[str]) -> int:
    said = io.StringIO()
    run: Callable[[], int] | None = None

    def later(verb: Callable[..., int]) -> Callable[..., Callable[[], int]]:
        """A verb that only takes its arguments, so that tyro is done before the work begins."""

        def bound(*positional, **named) -> Callable[[], int]:
            return lambda: verb(*positional, **named)

        bound.__signature__ = signature(verb)
        bound.__doc__ = verb.__doc__
        bound.__annotations__ = verb.__annotations__
        return bound

    try:
        with redirect_stderr(said):
            run = tyro.extras.subcommand_cli_from_dict(
                {name: later(verb) for name, verb in VERBS.items()},
                prog="longitude",
                description="Where a transformer's tokens are, and whether it still knows past its training length.",
                args=arguments or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            return DONE
        raise ValueError(_one_line(said.getvalue())) from None
    return run()


def _one_line(box: str) -> str:
    """What tyro says first in its box, without the help that follows."""
    lines = [re.sub(r"[╭╮╰╯│]", " ", line).strip() for line in box.splitlines()[1:]]
    said = []
    for line in lines:
        if said and (not line or set(line) <= set("─-")):
            break
        said.append(line)
    return " ".join(" ".join(said).split()) + "; see longitude --help"


if __name__ == "__main__":
    sys.exit(main())
