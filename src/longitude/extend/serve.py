"""Commands that serve an extended checkpoint: the new folder, or the original weights with the new keys as options.

Each engine reads the keys of config.json in its own way; notes name differences from transformers.

Source:
    vLLM: get_rope (vllm/model_executor/layers/rotary_embedding), get_config (vllm/transformers_utils/config.py).
    https://github.com/vllm-project/vllm, https://docs.vllm.ai/en/stable/features/context_extension/
    SGLang: get_rope (python/sglang/srt/layers/rotary_embedding/factory.py), ModelConfig (python/sglang/srt/configs).
    https://github.com/sgl-project/sglang
    llama.cpp: common/arg.cpp, the constructor of llama_context (src/llama-context.cpp), load_model of tools/server.
    https://github.com/ggml-org/llama.cpp
    Read in November 2026.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longitude.checkpoints.gguf import HALVES, NEIGHBOURS
from longitude.checkpoints.source import ropes_of
from longitude.extend.plan import ExtendPlan
from longitude.positions.config_keys import BASES, SCHEMAS, SHARES
from longitude.positions.hugging_face import ORIGINAL, RopeConfig
from longitude.positions.scaling import NTK, BaseChange, DynamicNTK, Linear, LongRoPE, NTKByParts
from longitude.positions.scaling.linear import is_unrotated

FILE = "serve.md"
"""Name of the file in the new folder."""
RENAMED = {"mistral": "llama", "mixtral": "llama", "cohere": "command-r", "gemma3_text": "gemma3"}
"""Model type of transformers -> architecture of llama.cpp, if they differ by more than hyphens and underscores."""
FLAGS = {
    "rope.freq_base": "--rope-freq-base",
    "rope.scaling.type": "--rope-scaling",
    "rope.scaling.factor": "--rope-scale",
    "rope.scaling.original_context_length": "--yarn-orig-ctx",
    "rope.scaling.yarn_beta_fast": "--yarn-beta-fast",
    "rope.scaling.yarn_beta_slow": "--yarn-beta-slow",
}
"""Keys of a GGUF file, after the architecture -> flags of llama.cpp. Others are given with --override-kv."""
DOUBLES = (*BASES, *SHARES, *SCHEMAS[1:], ORIGINAL)
"""Older keys for the contents of rope_parameters."""
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


def overrides(plan: ExtendPlan) -> dict[str, Any]:
    """The keys of config.json that the extension changes, without the older doubles of the same parameters."""
    before, after = plan.source.inner, plan.inner
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    if SCHEMAS[0] in changed:
        changed = {key: value for key, value in changed.items() if key not in DOUBLES}
    return changed if plan.source.inner is plan.source.json else {"text_config": changed}


def gguf_keys(plan: ExtendPlan) -> dict[str, str | int | float]:
    """Keys of a GGUF file of the original weights, after the architecture, by which llama.cpp rotates as the new folder.

    Raises:
        ValueError: No keys do; with the reason.
    """
    scheme, before = plan.scheme, ropes_of(plan.source)
    if not isinstance(before, RopeConfig) or before.scaling is not None or "deepseek" in plan.source.config.model_type:
        raise ValueError("its file may have more about positions than these keys")
    keys: dict[str, str | int | float] = {"context_length": plan.length}
    match scheme:
        case Linear():
            return keys | {"rope.scaling.type": "linear", "rope.scaling.factor": scheme.factor}
        case NTK() | BaseChange() if plan.base is not None:
            return keys | {"rope.freq_base": plan.base}
        case NTKByParts(truncate=True):
            keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": scheme.factor}
            keys["rope.scaling.original_context_length"] = scheme.original_max_length
            betas = {"rope.scaling.yarn_beta_fast": scheme.beta_fast, "rope.scaling.yarn_beta_slow": scheme.beta_slow}
            keys |= betas if (scheme.beta_fast, scheme.beta_slow) != (32, 1) else {}
            if (missing := _missing(plan)) is not None:
                keys["rope.scaling.attn_factor"] = missing
            return keys
    raise ValueError("its schemes are linear, yarn and a base, and others need a tensor of factors")


def _missing(plan: ExtendPlan) -> float | None:
    """The factor that engines which multiply by 0.1 ln s + 1 need in addition; None if they need none."""
    assert plan.scheme is not None
    missing = plan.attention_factor / (0.1 * math.log(plan.factor) + 1)
    return None if math.isclose(missing, 1, rel_tol=1e-6) else missing


def architecture(model_type: str) -> str | None:
    """The architecture of llama.cpp for a model type of transformers; None if it is not known."""
    plain = {name.replace("-", "").replace("_", ""): name for name in (*NEIGHBOURS, *HALVES)}
    return RENAMED.get(model_type) or plain.get(model_type.replace("_", ""))


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
    name, length, keys = shlex.quote(plan.source.name), plan.length, overrides(plan)
    in_json = shlex.quote(json.dumps(keys))
    vllm = f"vllm serve {name} --hf-overrides {in_json} --max-model-len {length}"
    sglang = f"python -m sglang.launch_server --model-path {name} --json-model-override-args {in_json} --context-length {length}"
    loads = f"AutoModelForCausalLM.from_pretrained({plan.source.name!r}, **{keys!r})"
    lines = [Line("vLLM", vllm), Line("SGLang", sglang), _llama_cpp(plan), Line("transformers", loads)]
    return [_if_any(plan, line) for line in lines]


def _if_any(plan: ExtendPlan, line: Line) -> Line:
    """The line, or the reason why the engine cannot rotate as the scheme asks."""
    if isinstance(plan.scheme, DynamicNTK) and line.engine == "llama.cpp":
        return Line(line.engine, "", "none: it has no scheme that follows the length of the text")
    if is_unrotated(plan.scheme) and line.engine in ("vLLM", "SGLang"):
        return Line(line.engine, "", "none: it makes a table of max_position_embeddings times factor rows")
    return line


def _llama_cpp(plan: ExtendPlan) -> Line:
    try:
        keys = gguf_keys(plan)
    except ValueError as error:
        return Line("llama.cpp", "", f"none with the original file: {error}; convert the new folder")
    known = architecture(plan.source.config.model_type)
    arguments = ["llama-server", "-m", "MODEL.gguf", "-c", str(plan.length)]
    for key, value in keys.items():
        kind = {str: "str", int: "int", float: "float"}[type(value)]
        arguments += (
            [FLAGS[key], str(value)] if key in FLAGS else ["--override-kv", f"{known or 'ARCH'}.{key}={kind}:{value}"]
        )
    note = "" if known else "ARCH is what the file has as general.architecture"
    return Line("llama.cpp", " ".join(arguments), note)


def notes(plan: ExtendPlan) -> list[str]:
    """Differences of engines from transformers, with the folder and with the original weights."""
    scheme, sentences = plan.scheme, list[str]()
    if is_unrotated(scheme):
        sentences.append(
            "vLLM and SGLang make a table of max_position_embeddings times factor rows, which fit in no memory here."
        )
    elif isinstance(scheme, NTKByParts) and (missing := _missing(plan)) is not None:
        sentences.append(
            f'SGLang does not read attention_factor, nor did earlier releases of vLLM: give "attn_factor": {missing:.10g} in '
            f"rope_parameters there."
        )
    if isinstance(scheme, DynamicNTK):
        longest = round(scheme.factor * plan.original)
        sentences.append(
            f"vLLM and SGLang rotate every text, short ones too, as transformers rotates one of {longest} tokens."
        )
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


def terminal(plan: ExtendPlan | None, folder: str, trained: bool) -> Iterator[str]:
    """The commands for the terminal: with the original weights, or, if weights were trained, with the folder."""
    if plan is None or plan.layers is None:
        return
    yield f"\nserve ({folder}/{FILE} has more)"
    for line in of_folder(plan, folder) if trained else of_original(plan):
        yield f"{line.engine}: {line.command}{'; ' * bool(line.command and line.note)}{line.note}"
    yield from notes(plan)


def _listed(lines: list[Line]) -> str:
    shown = []
    for line in lines:
        fence = "python" if line.engine == "transformers" and line.command.startswith("Auto") else "sh"
        shown.append(f"{line.engine}:" + (f" {line.note}." if line.note else ""))
        shown += [f"```{fence}\n{line.command}\n```"] if line.command else []
    return "\n\n".join(shown)
