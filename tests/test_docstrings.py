"""Docstrings of public names: one line, then what it takes, returns and comes from; and the page of the API made of them."""

import inspect

import make_api
from longitude.attention.mixer import MIXERS
from longitude.catalogue import section
from longitude.positions.base import ENCODINGS
from longitude.positions.scaling import SCHEMES
from make_api import first_line, parameters, public_names


def documented(thing: object) -> set[str]:
    """The names that "Args:" or "Attributes:" explain, each at the begin of a line and before a colon."""
    lines = section(thing, "Args") + section(thing, "Attributes")
    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ") and ":" in line]
    return {name.partition("(")[0].strip(" *`") for head in heads for name in head.split(",")}


def missing(name: str, thing: object) -> list[str]:
    """What a docstring lacks, as "lg.attend: Args: mask"."""
    doc, found = inspect.getdoc(thing) or "", []
    if not first_line(thing).rstrip("`").endswith((".", "?")):
        found.append("first line: one sentence")
    if doc.count("\n") and doc.split("\n")[1]:
        found.append("a blank line after the first")
    named = [p.name for p in parameters(thing) if p.kind is not p.VAR_KEYWORD]
    found += [f"Args: {name}" for name in named if name not in documented(thing)]
    returns = None if isinstance(thing, type) else inspect.signature(thing).return_annotation
    if returns not in (None, "None") and not section(thing, "Returns") + section(thing, "Yields"):
        found.append("Returns")
    registered = [*MIXERS.values(), *ENCODINGS.values(), *SCHEMES.values()]
    if thing in registered and not section(thing, "Source"):
        found.append("Source")
    return [f"{name}: {each}" for each in found]


def test_public_names_are_documented() -> None:
    things = [(name, each) for name, each in public_names() if inspect.isclass(each) or inspect.isfunction(each)]
    lacking = [each for name, thing in things for each in missing(name, thing)]
    assert lacking == [], "\n".join(lacking)


def test_the_page_of_the_api_is_what_docstrings_say() -> None:
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.page(), "run `make api`"
