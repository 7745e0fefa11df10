"""`serve.md`, the lines that serve an extended checkpoint, and the line that serves the original weights as it would be."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import class_of
from longitude.errors import UsageError
from longitude.extend.plan import ExtendPlan, Target, original_of
from longitude.positions.config_keys import SCHEMAS
from longitude.positions.hugging_face import to_hugging_face
from longitude.positions.scaling import DynamicNTK, LongRoPE, NTKByParts, YaRN
from longitude.positions.scaling.linear import is_unrotated
from longitude.serving.config import Stops
from longitude.serving.effective import opened
from longitude.serving.vllm import FOUR_TIMES
from longitude.serving.write import started, written

FILE = "serve.md"
"""Name of the file in the new folder."""


@dataclass(frozen=True)
class Line:
    """How an engine serves the model.

    Attributes:
        engine: Its name.
        command: The command; empty if there is none.
        note: What differs from transformers, or why there is no command.
    """

    engine: str
    command: str
    note: str = ""


def of_folder(plan: ExtendPlan, folder: str) -> list[Line]:
    """Commands for the new folder."""
    file = "model.gguf" if folder == "." else f"{folder}.gguf"
    convert = f"python convert_hf_to_gguf.py {shlex.quote(folder)} --outfile {shlex.quote(file)}"

    def command(engine: str, model: str, flag: str) -> str:
        return started(engine, model, {flag: str(plan.length)})

    compare = "`longitude check FOLDER --against FILE` says whether the converter wrote all of it"
    lines = [
        Line("vLLM", command("vllm", folder, "--max-model-len")),
        Line("SGLang", command("sglang", folder, "--context-length")),
        Line("llama.cpp", f"{convert} && {command('llama.cpp', file, '-c')}", compare),
        Line("transformers", f"transformers serve {shlex.quote(folder)}"),
    ]
    return [_if_any(plan, line) for line in lines]


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


def _if_any(plan: ExtendPlan, line: Line) -> Line:
    """The line, or the reason why the engine cannot rotate as the scheme asks."""
    if isinstance(plan.scheme, DynamicNTK) and line.engine == "llama.cpp":
        return Line(line.engine, "", "none: it has no scheme that follows the length of the text")
    if isinstance(plan.scheme, DynamicNTK) and line.engine == "vLLM":
        return Line(line.engine, "", "none: it leaves the base unchanged for dynamic")
    if plan.config["model_type"] in FOUR_TIMES and isinstance(plan.scheme, NTKByParts) and line.engine == "vLLM":
        return Line(line.engine, "", "none: it computes the ramp from 4 times the original length")
    if is_unrotated(plan.scheme) and line.engine in ("vLLM", "SGLang"):
        return Line(line.engine, "", "none: it makes a table of max_position_embeddings times factor rows")
    return line


def notes(plan: ExtendPlan) -> list[str]:
    """Differences of engines from transformers, with the folder and with the original weights."""
    scheme, sentences = plan.scheme, list[str]()
    if isinstance(scheme, NTKByParts):
        missing = plan.attention_factor / YaRN(plan.factor, plan.original).factors()[0]
        if not math.isclose(missing, 1, rel_tol=1e-6):
            sentences.append(
                f'SGLang does not read attention_factor: give "attn_factor": {missing:.10g} in rope_parameters there.'
            )
    if isinstance(scheme, DynamicNTK):
        longest = round(scheme.factor * plan.original)
        sentences.append(f"SGLang rotates every text, short ones too, as transformers rotates one of {longest} tokens.")
    if isinstance(scheme, LongRoPE):
        factor = plan.attention_factor
        sentences.append(f"vLLM takes the long factors at every length if the served length is above {plan.original}.")
        sentences.append(
            f'vLLM and SGLang do not read attention_factor: give "short_mscale": {factor:.10g}, "long_mscale": {factor:.10g} in '
            f"rope_parameters there."
        )
    return sentences


def page(plan: ExtendPlan, trained: bool) -> str:
    """Content of `serve.md`, which is valid wherever its folder is moved."""
    parts = [
        "# How to serve this checkpoint",
        f"In this folder, give only the length, {plan.length} tokens:",
    ]
    parts.append(_listed(of_folder(plan, ".")))
    if not trained and not plan.target.searched and SCHEMAS[0] in plan.inner:
        parts.append(
            f"Without this folder: `longitude extend MODEL --to {plan.length} --for ENGINE`, with the same method."
        )
    parts += [f"* {note}" for note in notes(plan)]
    return "\n\n".join(parts) + "\n"


def terminal(plan: ExtendPlan, folder: str) -> Iterator[str]:
    """What engines do otherwise, and the command that serves the new folder; the file has those of all engines."""
    lines = of_folder(plan, folder)
    yield from (*notes(plan), *(f"{line.engine}: {line.note}." for line in lines if not line.command))
    line = next(line for line in lines if line.command)
    yield f"\nserve ({line.engine}; {folder}/{FILE} has other engines)\n{line.command}"


def _listed(lines: list[Line]) -> str:
    shown = []
    for line in lines:
        shown.append(f"{line.engine}:" + (f" {line.note}." if line.note else ""))
        shown += [f"```sh\n{line.command}\n```"] if line.command else []
    return "\n\n".join(shown)
