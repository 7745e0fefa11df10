"""The public API, frozen in docs/public_api.txt: names with their signatures, and what a subclass of yours may override.

Other members of classes may change; class methods, which make objects, stand there too.

python docs/make_signatures.py            # write the file: on purpose only, as `make freeze-api`
python docs/make_signatures.py --check    # print what differs; exit code 1 where anything does
"""

import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import make_api
from longitude.attention.masks import Mask
from longitude.attention.mixer import MIXERS, Mixer
from longitude.positions.base import ENCODINGS, Encoding
from longitude.positions.scaling import SCHEMES, Scaling
from longitude.registry import Registry
from longitude.study.tasks.base import TASKS

SUBCLASSED = (Encoding, Mixer, Mask, Scaling)
"""Classes that a user inherits."""
FILE = Path(__file__).with_name("public_api.txt")
OPENING = """\
# The public API: names, signatures, and what a user may call in the library by a word in quotes.
# Written by `make freeze-api`, never by hand; tests/test_public_api.py compares.
"""
ADVICE = """\
The public API is not that of docs/public_api.txt: each line with - is a promise that no longer holds, each with + a new one.
If you did not mean to change it, mend the code. If you did: run `make freeze-api`, read the difference, and say in CHANGELOG.md
what changed and why."""


def member(kind: type, name: str) -> str:
    """A method with its signature, or the name of a property or an attribute."""
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, staticmethod | classmethod):
        return name + make_api.signature(getattr(kind, name))
    if not inspect.isfunction(value):
        return name
    words = make_api.signature(value)
    return name + (f"({words[1:].removeprefix('self').removeprefix(', ')}")


def members(kind: type) -> Iterator[str]:
    """Of a class that users inherit all public members; of others the class methods that no class before it has."""
    own = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    if kind in SUBCLASSED:
        yield from (
            member(kind, name) for name in sorted({*own, *vars(kind).get("__annotations__", {})}) if name[0] != "_"
        )
    else:
        inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
        makers = {name for name, value in own.items() if isinstance(value, classmethod)} - inherited
        yield from (member(kind, name) for name in sorted(makers))


def registered(registry: Registry) -> Iterator[str]:
    """What a user calls by a word: encoding "alibi" (num_heads, ...)."""
    for name, factory in registry.items():
        if factory.__module__.startswith("longitude."):
            yield f'{registry.noun} "{name}" {make_api.signature(factory)}'


def text() -> str:
    """The whole file."""
    named = dict(make_api.public_names())
    lines, known = [], {}
    for name, value in sorted(named.items(), key=lambda each: each[0].count(".")):
        if not callable(value):
            lines.append(name)
        elif (first := known.setdefault(value, name)) != name:
            lines.append(f"{name} is {first}")
        else:
            lines.append(name + make_api.signature(value))
            if isinstance(value, type) and value.__module__.startswith("longitude"):
                lines += [f"{name}.{each}" for each in members(value)]
    lines += [each for registry in (ENCODINGS, MIXERS, SCHEMES, TASKS) for each in registered(registry)]
    return OPENING + "\n".join(sorted(lines)) + "\n"


def difference(before: str, after: str) -> list[str]:
    """The lines that went, with a -, and those that came, with a +."""
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in found if line[0] in "+-" and not line.startswith(("+++", "---"))]


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = difference(FILE.read_text(encoding="utf-8"), text())
        print(*found, *([ADVICE] if found else []), sep="\n")
        return int(bool(found))
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
