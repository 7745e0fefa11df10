"""`serve.md`: the lines that serve an extended checkpoint, from the new folder or with the original weights."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from longitude.extend.plan import ExtendPlan
from longitude.positions.config_keys import SCHEMAS
from longitude.positions.scaling import DynamicNTK, LongRoPE, NTKByParts, YaRN
from longitude.positions.scaling.linear import is_unrotated
from longitude.serving.config import Config, Stops
from longitude.serving.effective import alone_of
from longitude.serving.line import FACTS
from longitude.serving.write import written

FILE = "serve.md"
"""Name of the file in the new folder."""
COMPARE = "`longitude check FOLDER --against FILE` says whether the converter wrote all of it"


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
    name, file, length = shlex.quote(folder), shlex.quote(file), plan.length
    convert = f"python convert_hf_to_gguf.py {name} --outfile {file}"
    lines = [
        Line("vLLM", f"vllm serve {name} --max-model-len {length}"),
        Line("SGLang", f"python -m sglang.launch_server --model-path {name} --context-length {length}"),
        Line("llama.cpp", f"{convert} && llama-server -m {file} -c {length}", COMPARE),
        Line("transformers", f"transformers serve {name}"),
    ]
    return [_if_any(plan, line) for line in lines]


def of_original(plan: ExtendPlan) -> list[Line]:
    """Commands for the original weights, with the new keys as options."""
    if SCHEMAS[0] not in plan.inner:
        return [
            Line("each engine", "", f"none with the original weights: config.json has no {SCHEMAS[0]}, but older keys")
        ]
    config, lines = Config.of(plan.source.json), []
    try:
        alone, _ = alone_of({}, config)
    except ValueError as error:  # keys that the rules of engines do not read
        return [Line("each engine", "", f"none with the original weights: {error}")]
    for engine in ("vllm", "sglang", "llama.cpp", "transformers"):
        try:
            command = written(engine, plan.source.name, config, plan.inner[SCHEMAS[0]], plan.length, alone)
            lines.append(Line(FACTS[engine].name, command))
        except Stops as stop:
            lines.append(Line(FACTS[engine].name, "", f"none with the original weights: {stop.what}"))
    return [_if_any(plan, line) for line in lines]


def _if_any(plan: ExtendPlan, line: Line) -> Line:
    """The line, or the reason why the engine cannot rotate as the scheme asks."""
    if isinstance(plan.scheme, DynamicNTK) and line.engine == "llama.cpp":
        return Line(line.engine, "", "none: it has no scheme that follows the length of the text")
    if isinstance(plan.scheme, DynamicNTK) and line.engine == "vLLM":
        return Line(line.engine, "", "none: it leaves the base unchanged for dynamic")
    if is_unrotated(plan.scheme) and line.engine in ("vLLM", "SGLang"):
        return Line(line.engine, "", "none: it makes a table of max_position_embeddings times factor rows")
    return line


def notes(plan: ExtendPlan) -> list[str]:
    """Differences of engines from transformers, with the folder and with the original weights."""
    scheme, sentences = plan.scheme, list[str]()
    if is_unrotated(scheme):
        sentences.append(
            "vLLM and SGLang make a table of max_position_embeddings times factor rows, which fit in no memory here."
        )
    elif isinstance(scheme, NTKByParts):
        missing = plan.attention_factor / YaRN(plan.factor, plan.original).factors()[0]
        if not math.isclose(missing, 1, rel_tol=1e-6):
            sentences.append(
                f'SGLang does not read attention_factor: give "attn_factor": {missing:.10g} in rope_parameters there.'
            )
    if isinstance(scheme, DynamicNTK):
        longest = round(scheme.factor * plan.original)
        sentences.append(f"SGLang rotates every text, short ones too, as transformers rotates one of {longest} tokens.")
        sentences.append("vLLM leaves the base unchanged, and serves the original context.")
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
    if not trained:
        parts += ["The original weights rotate in the same way with these options, without this folder:"]
        parts.append(_listed(of_original(plan)))
    parts += [f"* {note}" for note in notes(plan)]
    return "\n\n".join(parts) + "\n"


def terminal(plan: ExtendPlan | None, folder: str) -> Iterator[str]:
    """What engines do otherwise, and the command that serves the new folder; the file has those of all engines."""
    if plan is None or plan.layers is None:
        return
    yield from notes(plan)
    line = next(line for line in of_folder(plan, folder) if line.command)
    yield f"\nserve ({line.engine}; {folder}/{FILE} has other engines, and the original weights)\n{line.command}"


def _listed(lines: list[Line]) -> str:
    shown = []
    for line in lines:
        fence = "python" if line.engine == "transformers" and line.command.startswith("Auto") else "sh"
        shown.append(f"{line.engine}:" + (f" {line.note}." if line.note else ""))
        shown += [f"```{fence}\n{line.command}\n```"] if line.command else []
    return "\n\n".join(shown)
