"""Lines that serve a longer context with the original weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longitude.checkpoints.compare import head_dim_of
from longitude.checkpoints.declared import class_of
from longitude.errors import UsageError
from longitude.positions.hugging_face import to_hugging_face
from longitude.positions.scaling import BaseChange
from longitude.positions.scaling.base import method_of, scheme_of
from longitude.serving.check import opened
from longitude.serving.config import ROPE, Config, Parameters, Stops
from longitude.serving.effective import ENGINES, Ropes, alone_of, judged
from longitude.serving.findings import findings, wrong
from longitude.serving.line import Line, joined, lines_in

START = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "llama.cpp": "llama-server -m",
    "transformers": "AutoModelForCausalLM.from_pretrained(",
    "mlx": "mlx_lm.load(",
}
"""The words of a line before the model."""


def written(engine: str, name: str, config: Config, parameters: Parameters, length: int, alone: Ropes) -> str:
    """The line by which an engine serves `length` tokens of the original weights with these rope parameters. Stops: none does."""
    name = name if engine != "llama.cpp" or name.endswith(".gguf") else "MODEL.gguf"
    flags = ENGINES[engine].line(config, parameters, length)
    line = joined(Line(engine, tuple(START[engine].split()), (name,)), (), flags)
    rows = findings(judged(lines_in(line)[0], config, alone))
    if wrong(rows):
        raise Stops(rows[0].text, rows[0].source)
    return line


def extended(
    engine: str, name: str, to: int, method: str = "yarn", factor: float | None = None, base: float | None = None,
    original: int | None = None,
) -> str:  # fmt: skip
    """The line by which an engine serves a checkpoint at `to` tokens, judged by the engine's own rules.

    Args:
        engine: A key of ENGINES.
        name: A folder, a config.json, a GGUF file or a name in the local cache; no weights are read.
        to: The new length in tokens.
        method: A method of `longitude extend` that needs neither a search nor training.
        factor: Its factor; by default `to` over the original length.
        base: The new base of the method "base".
        original: The training length; by default the declared one.

    Raises:
        ValueError: A checkpoint that is extended already, or an engine that has no line for it; with the reason.
    """
    raw, config = opened(name)
    alone, _ = alone_of(raw, config)
    parameters = _parameters(raw, config, alone, to, method, factor, base, original)
    place = Path(name)
    model = name if place.suffix != ".json" else str(place.parent) if place.name == "config.json" else "MODEL"
    try:
        return written(engine, model, config, parameters, to, alone)
    except Stops as stop:
        raise ValueError(f"{name}: {engine} has no line for {method}: {stop.what} ({stop.source})") from stop


def _parameters(
    raw: Any, config: Config, alone: Ropes, to: int, method: str, factor: float | None, base: float | None, original: int | None
) -> Parameters:  # fmt: skip
    """Rope parameters of config.json for a method."""
    full = config.full
    rotation = alone.get(full, alone.get(None))
    length = original or config.declared
    if rotation is None or length is None:
        raise UsageError("extend", "a checkpoint that rotates, with a declared length", "none", "pass --original")
    if rotation.scaling is not None:
        raise UsageError("extend", "a checkpoint that is not extended yet", f"one with {rotation.scaling.name}")
    if to <= length:
        raise UsageError("--to", f"more than {length}, the training length", to)
    if method_of(method).searched or method == "drope":
        raise UsageError("--for", "a method that neither searches nor trains", method)
    if method == "base" and base is None:
        raise UsageError("--method base", "--base, the new rope_theta", "none")
    scheme = BaseChange(base) if base is not None else scheme_of(method, factor or to / length, length)
    theirs = class_of(raw) if raw else None
    width = head_dim_of(theirs, full) if theirs is not None else config.text.get("head_dim")
    made = to_hugging_face(rotation._replace(scaling=scheme, rotates=None, unrotated_temperature=None), width)[ROPE]
    return made if full is None else {**config.parameters, full: made}
