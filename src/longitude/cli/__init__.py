"""The command line: one verb, one result.

A verb is a file NAME.py of this package with a function NAME that returns an exit code (NAME_ where Python has the name).
Where it takes a dataclass, its fields are options. A function `defaults` in the same file may give its parameters other defaults
for some arguments. Every verb has --plugin, which is done before anything else, because names and defaults may be a plugin's.

Exit codes: 0 done; 1 finished, but something in it failed or diverged; 2 wrong use, with one line: what was expected,
what was given and what to do; 3 for `check` alone: a law could not run; 130 interrupted.
Results go to standard output, progress and errors to standard error. Nothing here imports torch before a verb needs it.
"""

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, TextIO, cast, get_args, get_type_hints

import docstring_parser
import tyro

from longitude import __version__, plugins
from longitude.cli.shared import DONE, INTERRUPTED, WRONG_USE, write_any_sign
from longitude.errors import MissingPackage, UnsupportedVersion, Within, require_torch, unknown
from longitude.runs.terminal import Cleaned

PLUGIN = Parameter(
    "plugin",
    Parameter.KEYWORD_ONLY,
    default=(),
    annotation=Annotated[
        tuple[Path, ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(metavar="FILE", help="A Python file that registers your encodings, mixers or tasks"),
    ],
)


@cache
def verbs() -> dict[str, Callable[..., int]]:
    """The function of each verb, in the order of the alphabet."""
    found = {}
    for name in sorted(module.name for module in iter_modules(__path__) if module.name != "shared"):
        found[name.rstrip("_")] = getattr(import_module(f"{__name__}.{name}"), name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. What it prints controls no terminal, whatever files and servers hold."""
    write_any_sign()
    try:
        out, err = cast(TextIO, Cleaned(sys.stdout)), cast(TextIO, Cleaned(sys.stderr, keep="\r"))
        with redirect_stdout(out), redirect_stderr(err):
            return _run(arguments)
    except BrokenPipeError:  # the reader of our output is gone
        sys.stdout = None
        return DONE


def _run(arguments: Sequence[str] | None) -> int:
    """Run the command line, and print what is wrong in a line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--version"]:
        print(f"longitude {__version__}")
        return DONE
    try:
        _require_known(arguments)
        for before, argument in pairwise(["", *arguments]):
            if argument.startswith("--plugin=") or (before == "--plugin" and not argument.startswith("--")):
                plugins.load(argument.removeprefix("--plugin="))
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"longitude: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except (ImportError, RuntimeError) as error:
        if (reason := _unsupported(error) if isinstance(error, ImportError) else _beyond_memory(error)) is None:
            raise
        print(f"longitude: {reason}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        print(f"longitude: {error.strerror}: {error.filename2 or error.filename or 'while writing'}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("longitude: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


# ---- parsing: tyro reads the arguments; its box of errors becomes one line ------------------------------


def _beyond_memory(error: RuntimeError) -> str | None:
    """Error text for an allocation beyond the CPU's memory, for which torch has no error class; None for other errors."""
    asked = re.search(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", str(error))
    return (
        asked and f"{int(asked[1]) / 2**30:,.0f} GiB of memory were asked for at once, more than there is; ask for less"
    )


def _unsupported(error: ImportError) -> ImportError | None:
    """The error with the package to install, if that causes a failed import; a torch that is too old is reported first."""
    try:
        require_torch()
    except UnsupportedVersion as old:
        return old
    return error if isinstance(error, UnsupportedVersion | MissingPackage) else None


def _require_known(arguments: list[str]) -> None:
    """The nearest valid verb or option for an unknown one."""
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help"):
        return
    if verb.startswith("-"):
        raise unknown("option", verb, ["--help", "--version"], "`longitude --help` shows the commands.")
    if verb not in verbs():
        raise unknown("command", verb, verbs(), "`longitude --help` shows them.")
    valid = ["--help", "--plugin"]
    for name, (_, default) in _options(verbs()[verb], {}).items():
        valid.append(f"--{'no-' * (default is True)}{name.replace('_', '-')}")  # a flag that is on can be turned off
    for argument in arguments[1:]:
        name = argument.partition("=")[0].replace("_", "-")
        if argument.startswith("--") and name not in valid:
            raise unknown("option", argument, valid, f"`longitude {verb} --help` shows them.")


def _dispatch(arguments: list[str]) -> int:
    box = io.StringIO()
    run: Callable[[], int] | None = None

    def later(verb: Callable[..., int]) -> Callable[..., Callable[[], int]]:
        """A verb that only takes its arguments, so that tyro is done before the work begins."""

        def bound(*positional, plugin=(), **named) -> Callable[[], int]:
            return lambda: verb(*positional, **_arguments(verb, named))

        taken = _signature(verb, arguments)
        bound.__signature__ = taken
        bound.__doc__ = (verb.__doc__ or "").partition("Args:")[0]
        bound.__annotations__ = {each.name: each.annotation for each in taken.parameters.values()}
        return bound

    try:
        with redirect_stderr(box):
            run = tyro.extras.subcommand_cli_from_dict(
                {name: later(verb) for name, verb in verbs().items()},
                prog="longitude",
                description="Compare, use, extend and check the position encodings of transformers.",
                args=arguments or ["--help"],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            if len(arguments) > 1 and (
                examples := getattr(sys.modules[verbs()[arguments[0]].__module__], "EXAMPLES", None)
            ):
                print(f"examples:\n{examples}")
            return DONE
        raise ValueError(_one_line(box.getvalue())) from None
    return run()


def _options(verb: Callable[..., int], defaults: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each option of a verb, those of the dataclasses that it takes among them."""
    found: dict[str, tuple[Any, Any]] = {}
    kinds = get_type_hints(verb)
    for name, kind in get_type_hints(verb, include_extras=True).items():
        if name == "return" or tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            continue
        default = defaults.get(name, signature(verb).parameters[name].default)
        if not is_dataclass(kinds[name]):
            found[name] = _described(verb, name, kind, default), default
            continue
        own = get_type_hints(kinds[name], include_extras=True)
        for each in fields(kinds[name]):
            value = each.default if default is Parameter.empty else getattr(default, each.name)
            found[each.name] = _described(kinds[name], each.name, own[each.name], value), value
    return found


@cache  # reading the source of a class takes 10 ms, and each of its options asks
def _documented(holder: Any) -> dict[str, str]:
    """Descriptions of the arguments from the docstring of a function or dataclass."""
    return {
        each.arg_name: " ".join((each.description or "").split())
        for each in docstring_parser.parse_from_object(holder).params
    }


def _described(holder: Any, name: str, kind: Any, default: Any) -> Any:
    """The annotation of an argument with the help of its holder's docstring; None, False and () are no defaults to show."""
    shown: dict[str, Any] = {"help": _documented(holder).get(name, "")}
    if default in (None, False, (), "", Parameter.empty):
        shown["help_behavior_hint"] = ""
    if any(isinstance(each, Within) for each in getattr(kind, "__metadata__", ())):
        kind = kind.__origin__  # the dataclass checks its bounds
    given = [each for each in getattr(kind, "__metadata__", ()) if each is not tyro.conf.Positional]
    if given:  # written beside the option
        return kind
    if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
        many = kind.__origin__ is not str
        metavar = name.upper().removesuffix("S") + " ..." * many
        shown["metavar"] = metavar if default is Parameter.empty else f"[{metavar}]"
    elif default is None and len(inner := [each for each in get_args(kind) if each is not type(None)]) == 1:
        shown["metavar"] = getattr(inner[0], "__name__", "str").upper()
    return Annotated[kind, tyro.conf.arg(**shown)]


def _signature(verb: Callable[..., int], arguments: list[str]) -> Signature:
    """Signature of a verb for tyro: positional arguments, then options, with a dataclass for each group of the file.

    A file may have GROUPS, title -> options; and EXAMPLES, the end of its help.
    """
    module = sys.modules[verb.__module__]
    asked = verbs().get(arguments[0] if arguments else "") is verb
    options = _options(verb, module.defaults(arguments) if asked and hasattr(module, "defaults") else {})
    kinds = get_type_hints(verb, include_extras=True)
    found = [
        each.replace(annotation=_described(verb, name, kinds[name], each.default))
        for name, each in signature(verb).parameters.items()
        if tyro.conf.Positional in getattr(kinds[name], "__metadata__", ())
    ]
    for title, names in getattr(module, "GROUPS", {}).items():
        own = [(name, *options.pop(name)) for name in names.split()]
        group = make_dataclass(
            title, [(name, kind, field(default=default)) for name, kind, default in own], frozen=True
        )
        found.append(Parameter(title, Parameter.KEYWORD_ONLY, default=group(), annotation=group))
    for name, (kind, default) in options.items():
        found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return Signature([*found, PLUGIN])


def _arguments(verb: Callable[..., int], named: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the verb takes them, of options in groups."""
    module = sys.modules[verb.__module__]
    flat = dict(named)
    for title in getattr(module, "GROUPS", {}):
        flat |= vars(flat.pop(title))
    for name, kind in get_type_hints(verb).items():
        if is_dataclass(kind) and isinstance(kind, type):
            flat[name] = kind(**{each.name: flat.pop(each.name) for each in fields(kind)})
    return flat


def _one_line(box: str) -> str:
    """The first message in a box of tyro's, without the help that follows."""
    lines = [re.sub(r"[╭╮╰╯│]", " ", line).strip() for line in box.splitlines()[1:]]
    first: list[str] = []
    for line in lines:
        if line and not set(line) <= set("─-"):
            first.append(line)
        elif first:
            break
    return " ".join(" ".join(first).split()) + "; see longitude --help"
