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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from textwrap import fill
from typing import Annotated, Any, Literal, TextIO, cast, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from longitude import plugins
from longitude.cli.shared import DONE, INTERRUPTED, WRONG_USE, write_any_sign
from longitude.errors import MissingPackage, UnsupportedVersion, Within, require_torch, unknown
from longitude.runs.terminal import Cleaned

USES = {"compare": "study report measure bench", "use": "list show", "extend": "extend", "check": "check"}
"""The verbs by what they are for, in the order of README."""
RESUMED = ("study", "measure", "extend")
"""Commands that keep finished units in their folder."""

ALL = "--help-all"

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
    names = sorted(module.name for module in iter_modules(__path__) if module.name != "shared")
    return {name.rstrip("_"): getattr(import_module(f"{__name__}.{name}"), name) for name in names}


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
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(_overview()))
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
        kept = "; what is finished is kept, and the same command continues" if arguments[0] in RESUMED else ""
        print(f"longitude: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED


def _overview() -> Iterator[str]:
    """The commands by use, with the first line of what each does."""
    yield "Compare, use, extend and check the position encodings of transformers.\n\nusage: longitude COMMAND ..."
    for use, names in USES.items():
        yield f"\n{use}"
        for name in names.split():
            yield fill(
                f"  {name:<9}{(verbs()[name].__doc__ or '').partition(chr(10))[0]}", 80, subsequent_indent=" " * 11
            )
    yield "\nlongitude COMMAND --help   options and examples\nlongitude --version        the version"


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
    verb = arguments[0]
    if verb.startswith("-"):
        raise unknown("option", verb, ["--help", "--version"], "`longitude --help` shows the commands.")
    if verb not in verbs():
        raise unknown("command", verb, verbs(), "`longitude --help` shows them.")
    more = hasattr(sys.modules[verbs()[verb].__module__], "FIRST")
    valid = ["--help", "--plugin", *[ALL] * more]
    for name, parameter in _parameters(verbs()[verb], {}).items():
        if parameter.kind is Parameter.KEYWORD_ONLY:  # a flag that is on can be turned off
            valid.append(f"--{'no-' * (parameter.default is True)}{name.rstrip('_').replace('_', '-')}")
    for argument in arguments[1:]:
        name = argument.partition("=")[0].replace("_", "-")
        if argument.startswith("--") and name not in valid:
            raise unknown("option", argument, valid, f"`longitude {verb} {ALL if more else '--help'}` shows them.")


def _dispatch(arguments: list[str]) -> int:
    name, box, verb = arguments[0], io.StringIO(), verbs()[arguments[0]]

    def bound(*positional, plugin=(), **named) -> Callable[[], int]:
        """The verb with its arguments, so that tyro is done before the work begins."""
        return lambda: verb(*positional, **_arguments(verb, named))

    taken = _signature(verb, arguments)
    bound.__signature__ = taken
    bound.__doc__ = (verb.__doc__ or "").partition("Args:")[0]
    bound.__annotations__ = {name: parameter.annotation for name, parameter in taken.parameters.items()}
    try:
        with redirect_stderr(box):
            run = tyro.cli(
                bound,
                prog=f"longitude {name}",
                args=["--help" if argument == ALL else argument for argument in arguments[1:]],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            module = sys.modules[verb.__module__]
            if hasattr(module, "FIRST") and ALL not in arguments:
                print(f"{ALL} shows every option\n")
            print(f"examples:\n{module.EXAMPLES}")
            return DONE
        raise ValueError(_one_line(box.getvalue(), name)) from None
    return run()


def _parameters(verb: Callable[..., int], defaults: Mapping[str, Any]) -> dict[str, Parameter]:
    """Parameters of a verb as tyro takes them, with the fields of a dataclass in its place; only options are keywords."""
    plain, kinds, parameters = get_type_hints(verb), get_type_hints(verb, include_extras=True), {}
    for name, parameter in signature(verb).parameters.items():
        default = defaults.get(name, parameter.default)
        options: dict[str, tuple[Any, Any]] = {name: (kinds[name], default)}
        holder: Any = verb
        if is_dataclass(plain[name]):
            holder, of_fields = plain[name], get_type_hints(plain[name], include_extras=True)
            unset = default is Parameter.empty
            options = {
                f.name: (of_fields[f.name], f.default if unset else getattr(default, f.name)) for f in fields(holder)
            }
        for option, (kind, value) in options.items():
            way = Parameter.POSITIONAL_OR_KEYWORD if _is_positional(kind) else Parameter.KEYWORD_ONLY
            described = _described(holder, option, kind, value)
            parameters[option] = Parameter(option, way, default=value, annotation=described)
    return parameters


def _is_positional(kind: Any) -> bool:
    return tyro.conf.Positional in getattr(kind, "__metadata__", ())


@cache  # reading the source of a class takes 10 ms, and each of its options asks
def _documented(holder: Any) -> dict[str, str]:
    """Descriptions of the arguments from the docstring of a function or dataclass."""
    params = docstring_parser.parse_from_object(holder).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _described(holder: Any, name: str, kind: Any, default: Any) -> Any:
    """The annotation of an argument with the help of its holder's docstring; None, False and () are no defaults to show."""
    shown: dict[str, Any] = {"help": _documented(holder).get(name, "")}
    if name.endswith("_"):  # Python has the name itself
        shown["name"] = name.rstrip("_")
    if default in (None, False, (), "", Parameter.empty):
        shown["help_behavior_hint"] = ""
    if any(isinstance(mark, Within) for mark in getattr(kind, "__metadata__", ())):
        kind = kind.__origin__  # the dataclass checks its bounds
    if any(mark is not tyro.conf.Positional for mark in getattr(kind, "__metadata__", ())):  # written beside the option
        return kind
    if _is_positional(kind):
        many = kind.__origin__ is not str
        metavar = name.upper().removesuffix("S") + " ..." * many
        shown["metavar"] = metavar if default is Parameter.empty else f"[{metavar}]"
    elif default is None and len(inner := [part for part in get_args(kind) if part is not type(None)]) == 1:
        one_of = get_origin(inner[0]) is Literal
        name_of_kind = getattr(inner[0], "__name__", "str").upper()
        shown["metavar"] = "|".join(get_args(inner[0])) if one_of else name_of_kind
    return Annotated[kind, tyro.conf.arg(**shown)]


def _signature(verb: Callable[..., int], arguments: list[str]) -> Signature:
    """Signature of a verb for tyro: positional arguments, then options, with a dataclass for each group of the file.

    A file has EXAMPLES, the end of its help. It may have GROUPS, title -> options; and FIRST, the options that --help shows.
    """
    module = sys.modules[verb.__module__]
    parameters = _parameters(verb, module.defaults(arguments) if hasattr(module, "defaults") else {})
    if hasattr(module, "FIRST") and {"-h", "--help"} & {*arguments}:
        return Signature([*map(parameters.__getitem__, module.FIRST.split()), PLUGIN])
    groups = []
    for title, names in getattr(module, "GROUPS", {}).items():
        options = [parameters.pop(name) for name in names.split()]
        members = [(option.name, option.annotation, field(default=option.default)) for option in options]
        group = make_dataclass(title, members, frozen=True)
        groups.append(Parameter(title, Parameter.KEYWORD_ONLY, default=group(), annotation=group))
    return Signature(sorted([*parameters.values(), *groups, PLUGIN], key=lambda parameter: parameter.kind))


def _arguments(verb: Callable[..., int], named: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the verb takes them, of options in groups."""
    module = sys.modules[verb.__module__]
    flat = dict(named)
    for title in getattr(module, "GROUPS", {}):
        flat |= vars(flat.pop(title))
    for name, kind in get_type_hints(verb).items():
        if is_dataclass(kind) and isinstance(kind, type):
            flat[name] = kind(**{option.name: flat.pop(option.name) for option in fields(kind)})
    return flat


def _one_line(box: str, verb: str) -> str:
    """The first message in a box of tyro's, without the help that follows."""
    lines = [re.sub(r"[╭╮╰╯│]", " ", line).strip() for line in box.splitlines()[1:]]
    first: list[str] = []
    for line in lines:
        if line and not set(line) <= set("─-"):
            first.append(line)
        elif first:
            break
    message = " ".join(" ".join(first).split())
    message = re.sub(r"'None', |, 'None'(?=\))", "", message)  # the default of an option, which nobody types
    message = message.replace("Unrecognized options:", f"`longitude {verb}` takes no further argument, got")
    return f"{message}; see longitude {verb} --help"
