"""`longitude list`."""

from collections.abc import Iterator
from typing import Annotated, Any

import tyro

from longitude.cli.shared import DONE, print_json
from longitude.errors import unknown

PARTS = {
    "encodings": "position encodings",
    "mixers": "mixers (--encodings rope+mamba in a study)",
    "scaling": "RoPE scaling",
    "samplers": "training positions",
}
NAME, KIND = 25, 16
"""Columns of the two first words of a line."""


def list_(name: Annotated[str, tyro.conf.Positional] = "", json: bool = False) -> int:
    """List what there is: encodings, mixers, scaling schemes, samplers of positions, plugins, and what runs on this machine.

    Args:
        name: One of these: its options, properties, backends and papers. By default a line for each.
        json: Print JSON.
    """
    from longitude.catalogue import catalogue
    from longitude.report.table import width

    facts = catalogue()
    if name:
        found = [(part, each) for part in PARTS for each in facts[part] if each["name"] == name]
        if not found:
            names = [each["name"] for part in PARTS for each in facts[part]]
            raise unknown("name", name, names, "`longitude list` lists them.")
        if json:
            print_json(found[0][1])
        else:
            print("\n\n".join("\n".join(_entry(part, each)) for part, each in found))
        return DONE
    if json:
        print_json(facts)
        return DONE
    print("\n".join(_overview(facts, width())))
    return DONE


def _overview(facts: dict[str, Any], columns: int) -> Iterator[str]:
    """A line of name, kind and what it is for each, cut to the width of the terminal."""
    for part, title in PARTS.items():
        yield title
        for each in facts[part]:
            kind = f"{_kind(part, each):<{KIND}}" if part in ("encodings", "mixers") else ""
            line = f"  {each['name']:<{NAME - 2}}{kind}{each['is']}"
            yield line if len(line) <= columns else line[: columns - 1].rstrip() + "…"
        yield ""
    for each in facts["plugins"]:
        names = ", ".join(f"{kind} {name}" for name, kind in each["registers"].items())
        yield f"plugin {each['name']} ({each.get('path') or each['distribution']}): {names or 'no names'}"
        yield from (f"  {name} cannot be built at toy size: {reason}" for name, reason in each["problems"].items())
    here = facts["machine"]
    yield (
        f"here: longitude {here['longitude']}, torch {here['torch']}, threads {here['threads']}, CUDA {here['gpu'] or 'no'}, "
        f"MPS {'yes' if here['mps'] else 'no'}, transformers {here['transformers'] or 'not installed'}"
    )
    yield here["loops"]
    yield "options, properties and papers of one: longitude list NAME"


def _kind(part: str, each: dict[str, Any]) -> str:
    """Where an encoding acts; how the cache of a mixer grows with the N tokens before."""
    return f"cache {each['cache']}" if part == "mixers" else ", ".join(each["acts"]) or "-"


def _entry(part: str, each: dict[str, Any]) -> Iterator[str]:
    """Everything about one, a fact a line."""
    yield f"{each['name']}: {each['is']}"
    facts = {"class": each["class"]}
    if part == "encodings":
        facts |= {"acts as": _kind(part, each), "properties": ", ".join(_properties(each))}
        facts["options"] = " ".join(each["options"])
        for when, backends in each["backends"].items():
            facts[f"backends, {when}"] = " ".join(backends)
    else:
        required = (n if n in each["required"] else f"{n}={default}" for n, default in each["options"].items())
        facts["options"] = " ".join(required)
    if part == "mixers":
        facts |= {"takes of an encoding": " ".join(each["takes"]), "cache": each["cache"]}
    facts["source"] = each["source"] or ""
    yield from (f"  {head:<22}{words}" for head, words in facts.items() if words)


def _properties(entry: dict[str, Any]) -> Iterator[str]:
    words = {
        "relative (one number added to all positions changes nothing)": entry["relative"],
        "absolute": not entry["relative"],
        "learned": entry["learned"],
        "causal (keys in the future have no meaning)": entry["causal_only"],
        f"up to {entry['max_length']}": entry["max_length"],
        f"{entry['axes']} axes": entry["axes"] > 1,
        "a cache keeps keys without their rotation": not entry["stable_keys"],
        "one module for all layers": entry["learned"] and entry["shared"],
    }
    return (word for word, is_so in words.items() if is_so)
