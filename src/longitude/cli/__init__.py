"""The command line: one verb, one result.

Exit codes: 0 done; 1 finished, but something in it failed or diverged; 2 wrong use, with one line that says what was
expected, what came and what to do; 130 interrupted. Results go to standard output, progress and errors to standard
error. Nothing here imports torch before a verb needs it.
"""

import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from inspect import Signature, signature
from typing import Any

import tyro

from longitude import __version__
from longitude.bench.config import BenchConfig
from longitude.cli.bench import bench
from longitude.cli.catalogue import list_
from longitude.cli.check import check
from longitude.cli.extend import ExtendOptions, extend
from longitude.cli.measure import measure
from longitude.cli.shared import DONE, INTERRUPTED, WRONG_USE
from longitude.cli.study import defaults as study_defaults, report, study
from longitude.errors import unknown
from longitude.measure.config import MeasureConfig
from longitude.study.config import StudyConfig, option

VERBS: dict[str, Callable[..., int]] = {
    "study": study,
    "report": report,
    "extend": extend,
    "measure": measure,
    "check": check,
    "bench": bench,
    "list": list_,
}
OPTIONS: dict[str, type] = {
    "study": StudyConfig,
    "extend": ExtendOptions,
    "measure": MeasureConfig,
    "bench": BenchConfig,
}
"""Verbs whose argument `config` is a dataclass of options."""
DEFAULTS: dict[str, Callable[[list[str]], dict[str, Any]]] = {"study": study_defaults}
"""Verbs whose parameters have other defaults for some arguments."""


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

        bound.__signature__ = _signature(verb, arguments)
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


def _signature(verb: Callable[..., int], arguments: list[str]) -> Signature:
    """That of a verb, with the defaults of its options where the arguments decide them."""
    found, name = signature(verb), verb.__name__
    if arguments[:1] != [name] or name not in DEFAULTS:
        return found
    defaults = DEFAULTS[name](arguments)
    parameters = found.parameters.values()
    return found.replace(
        parameters=[each.replace(default=defaults.get(each.name, each.default)) for each in parameters]
    )


def _one_line(box: str) -> str:
    """What tyro says first in its box, without the help that follows."""
    lines = [re.sub(r"[╭╮╰╯│]", " ", line).strip() for line in box.splitlines()[1:]]
    said = []
    for line in lines:
        if said and (not line or set(line) <= set("─-")):
            break
        said.append(line)
    return " ".join(" ".join(said).split()) + "; see longitude --help"
