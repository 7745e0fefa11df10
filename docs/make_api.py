"""The index of public names, docs/api.md; the site has a page with the docstrings of each section.

python docs/make_api.py            # write the page
python docs/make_api.py --check    # exit code 1 where the page is not what this would write
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import longitude as lg
from longitude.report.table import markdown

PAGE = Path(__file__).with_name("api.md")
OPENING = """# Public names

Look up what `import longitude as lg` has. Most programs need these; `help(lg.attend)` shows arguments, shapes and units.
"""
FIRST = (
    "attend", "encoding", "list_encodings", "mixer", "MultiHeadAttention", "explain", "LongitudeConfig", "LongitudeForCausalLM",
    "from_hugging_face", "check", "measure", "testing",
)  # fmt: skip
"""Names that the page begins with."""
OTHERS = "more"
"""The section of single files of the package."""


def public_names() -> Iterator[tuple[str, Any]]:
    """("lg.attend", the function), ...: what dir(lg) lists, and what its modules list in __all__."""
    for name in dir(lg):
        value = getattr(lg, name)
        yield f"lg.{name}", value
        if isinstance(value, ModuleType):
            yield from ((f"lg.{name}.{each}", getattr(value, each)) for each in getattr(value, "__all__", []))


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def parameters(thing: Any) -> list[inspect.Parameter]:
    """Of a function or class. What another library's __init__ or dataclass takes is left out: it differs by its version."""
    init = thing.__init__ if isinstance(thing, type) else None
    if inspect.isfunction(init) and not init.__module__.startswith("longitude"):
        return []
    try:
        found = list(inspect.signature(thing).parameters.values())
    except ValueError:  # a class without a signature of its own
        return []
    if not is_dataclass(thing):
        return found
    ours = [kind for kind in inspect.getmro(thing) if kind.__module__.startswith("longitude")]
    fields = {name for kind in ours for name in vars(kind).get("__annotations__", {})}
    return [p for p in found if p.name in fields]


def signature(thing: Any) -> str:
    """Names and defaults: types stand in the docstrings and in the code."""
    words, keyword_only = [], False
    for p in parameters(thing):
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            words.append("*")
        keyword_only = p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL) or keyword_only
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = repr(p.default) if " at 0x" not in repr(p.default) else "..."
        words.append(stars + p.name + ("" if p.default is p.empty else f"={default}"))
    return f"({', '.join(words)})"


def home(name: str, value: Any) -> str:
    """The section of a name: the module that lists it, else the folder it is defined in."""
    if name.count(".") == 2:
        return name.rpartition(".")[0]
    if isinstance(value, ModuleType):
        return "modules"
    parts = value.__module__.split(".")
    return parts[1] if len(parts) > 2 else OTHERS


def page() -> str:
    """A table of the first names, then all names by section; modules with what they have."""
    names = dict(public_names())
    first = [[f"`lg.{name}`", first_line(names[f"lg.{name}"])] for name in FIRST]
    sections: dict[str, list[str]] = {name: [] for name in ("attention", "positions", "models", OTHERS)}
    for name, value in names.items():
        if callable(value) and not isinstance(value, ModuleType):
            sections.setdefault(home(name, value), []).append(f"`{name.rpartition('.')[2]}`")
    rows = [
        [f"`{name}`" if name in names else name, ", ".join(sorted(below))] for name, below in sections.items() if below
    ]
    tables = [markdown(["name", "what it is"], first), "## All", markdown(["section", "names"], rows)]
    return "\n\n".join([OPENING.rstrip(), *tables]) + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
