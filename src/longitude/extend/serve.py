"""`serve.md`, the lines that serve an extended checkpoint, and the line that serves the original weights as it would be."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from longitude.checkpoints.compare import difference, frequencies_of, head_dim_of
from longitude.checkpoints.declared import class_of
from longitude.errors import UsageError
from longitude.extend.plan import ExtendPlan, Target, original_of
from longitude.positions.config_keys import FULL, SCHEMAS
from longitude.positions.hugging_face import to_hugging_face
from longitude.positions.scaling.linear import is_unrotated
from longitude.serving.config import Stops
from longitude.serving.effective import Case, judged, opened
from longitude.serving.findings import findings, wrong
from longitude.serving.line import FACTS, lines_in
from longitude.serving.write import started, written

FILE = "serve.md"
"""Name of the file in the new folder."""
CLOSE = 1e-3
"""Relative tolerance between the frequencies of an engine and those of transformers."""


class Line(NamedTuple):
    """How an engine serves the model.

    Attributes:
        engine: Its name.
        command: The command; empty if there is none.
        note: What differs from transformers, or why there is no command.
    """

    engine: str
    command: str
    note: str = ""


def of_folder(plan: ExtendPlan, folder: Path, name: str) -> list[Line]:
    """The command of each engine for the new folder, which it calls `name`: none if the engine's rules find it wrong."""
    config, alone, _ = opened(str(folder))
    file = "model.gguf" if name == "." else f"{name}.gguf"
    convert = f"python convert_hf_to_gguf.py {shlex.quote(name)} --outfile {shlex.quote(file)} && "
    lines = []
    for engine in ("vllm", "sglang", "llama.cpp"):
        facts, is_file = FACTS[engine], engine == "llama.cpp"
        command = started(engine, file if is_file else name, {facts.flag("length"): str(plan.length)})
        case = judged(lines_in(command)[0], config, alone)
        compare = "`longitude check FOLDER --against FILE` says whether the converter wrote all of it" * is_file
        if why := refusal(plan, case):
            lines.append(Line(facts.name, "", f"none: {why}"))
        else:
            lines.append(Line(facts.name, convert * is_file + command, otherwise(plan, case, plan.original) or compare))
    return [*lines, Line("transformers", f"transformers serve {shlex.quote(name)}")]


def refusal(plan: ExtendPlan, case: Case) -> str:
    """Why an engine does not serve the new length as transformers does; empty if it does."""
    if wrong(rows := findings(case)):
        return rows[0].text
    if is_unrotated(plan.scheme) and case.line.engine != "llama.cpp":
        return "it makes a table of max_position_embeddings times factor rows"
    return "; ".join(case.unknown) or otherwise(plan, case, plan.length)


def otherwise(plan: ExtendPlan, case: Case, length: int) -> str:
    """How an engine rotates a text of this length otherwise than transformers; empty if it does not."""
    width = head_dim_of(plan.source.config, FULL)
    for label, alone in case.alone.items():
        used = case.used.get(label, case.used.get(None))
        got, wanted = (rope and frequencies_of(rope, width, length) for rope in (used, alone))
        if got and wanted and (text := difference(got, wanted, CLOSE).text):
            return f"it {text}, in a text of {length} tokens"
    return ""


def line_for(engine: str, name: str, target: Target) -> str:
    """The line by which an engine serves a checkpoint's original weights at a new length, judged by the engine's own rules.

    Args:
        engine: "vllm", "sglang", "llama.cpp", "transformers" or "mlx".
        name: A folder, a config.json, a GGUF file or a name in the local cache; no weights are read.
        target: The extension, by a method that needs neither a search nor training.

    Raises:
        ValueError: A checkpoint that is extended already, or an engine that has no line for it; with the reason.
    """
    config, alone, _ = opened(name)
    rotation, length = alone.get(config.full, alone.get(None)), target.original or config.declared
    if rotation is None or length is None:
        raise UsageError("extend", "a checkpoint that rotates, with a declared length", "none", "pass --original")
    known = original_of(rotation.scaling, config.declared) or target.original
    if rotation.scaling is not None and (target.original is None or target.original != known):
        remedy = f"pass --original {known or 'L'}; if the weights were trained with it, also its --method and a larger --factor"
        raise UsageError("extend", "a checkpoint that is not extended yet", f"one with {rotation.scaling.name}", remedy)
    if target.to <= length:
        raise UsageError("--to", f"more than {length}, the training length", target.to)
    if target.searched or target.method == "drope":
        raise UsageError("--for", "a method that neither searches nor trains", target.method)
    scheme = target.scheme(target.factor or target.to / length, length)
    theirs = class_of(config.raw) if config.raw else None
    width = head_dim_of(theirs, config.full) if theirs is not None else config.text.get("head_dim")
    changed = rotation._replace(scaling=scheme, rotates=None, unrotated_temperature=None)
    made = to_hugging_face(changed, width)[SCHEMAS[0]]
    parameters = made if config.full is None else {**config.parameters, config.full: made}
    place = Path(name)
    model = name if place.suffix != ".json" else str(place.parent) if place.name == "config.json" else "MODEL"
    try:
        return written(engine, model, config, parameters, target.to, alone)
    except Stops as stop:
        raise ValueError(f"{name}: {engine} has no line for {target.method}: {stop.what} ({stop.source})") from stop


def page(plan: ExtendPlan, folder: Path, trained: bool) -> str:
    """Content of `serve.md` in the new folder, which is valid wherever that is moved."""
    parts = [
        "# How to serve this checkpoint",
        f"In this folder, give only the length, {plan.length} tokens:",
    ]
    parts.append(_listed(of_folder(plan, folder, ".")))
    if not trained and not plan.target.searched and SCHEMAS[0] in plan.inner:
        parts.append(
            f"Without this folder: `longitude extend MODEL --to {plan.length} --for ENGINE`, with the same method."
        )
    return "\n\n".join(parts) + "\n"


def terminal(plan: ExtendPlan | None, folder: str) -> Iterator[str]:
    """Engines that cannot serve the new folder, and a command of one that can; the file has those of all engines."""
    if plan is None or plan.layers is None:
        return
    lines = of_folder(plan, Path(folder), folder)
    yield from (f"{line.engine}: {line.note}." for line in lines if not line.command)
    line = next(line for line in lines if line.command)
    yield f"\nserve ({line.engine}; {folder}/{FILE} has other engines)\n{line.command}"


def _listed(lines: list[Line]) -> str:
    shown = []
    for line in lines:
        shown.append(f"{line.engine}:" + (f" {line.note}." if line.note else ""))
        shown += [f"```sh\n{line.command}\n```"] if line.command else []
    return "\n\n".join(shown)
