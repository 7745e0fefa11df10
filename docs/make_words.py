"""Docstrings, which are plain text, for Sphinx, which reads reStructuredText."""

import inspect
import re
from typing import Any

SPAN = re.compile(r"(`[^`\n]+`)")
SIGN = re.compile(r"[\\|*]|_(?!\w)")
BUILTIN = {inspect.getdoc(kind) for kind in (tuple, dict, frozenset, int, float, str, bool)}
BULLET = re.compile(r"^\s*\* ")


def plain_to_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """For Sphinx's event autodoc-process-docstring: signs that mean something to reStructuredText are escaped, in place."""
    if "\n".join(lines).strip() in BUILTIN:  # of the value of an attribute that says nothing itself
        lines.clear()
    lines[:] = as_rst(lines)


def as_rst(lines: list[str]) -> list[str]:
    """Prose with its signs escaped and its `code` marked; what is indented outside of a section is code."""
    out: list[str] = []
    code = section = False
    for line in lines:
        if line and not line.startswith(" "):
            code, section = False, re.fullmatch(r"[A-Z][A-Za-z]+:", line) is not None
        elif line.startswith("    ") and not (code or section) and out and not out[-1]:
            out += ["::", ""]
            code = True
        out.append(line if code else _escaped(line))
    return out


def _escaped(line: str) -> str:
    bullet = BULLET.match(line)
    start = bullet.end() if bullet else 0
    parts = SPAN.split(line[start:])
    return line[:start] + "".join(f"`{part}`" if SPAN.fullmatch(part) else SIGN.sub(r"\\\g<0>", part) for part in parts)
