"""How llama.cpp applies flags, computes rotations and decides the slot of a request. Versions, flags and files: engines.toml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longitude.errors import UsageError
from longitude.positions.config_keys import ORIGINAL, WINDOWED
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.serving import config as rules
from longitude.serving.config import BASE, LENGTH, ROPE, Config, NotKnown, Overrides, Parameters, Served, Stops, rope
from longitude.serving.gguf import BETAS, FACTORS, GGUF, HALVES, LISTS, NEIGHBOURS
from longitude.serving.line import FACTS, Line

ENGINE = FACTS["llama.cpp"]
SCALE, INVERSE, YARN_FACTOR = "--rope-scale", "--rope-freq-scale", "rope.scaling.attn_factor"
KEYS, METADATA = ENGINE.stands_for, ENGINE.metadata
LOGGED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "ministral3", "deepseek2", "mistral3")
"""Model types whose mscale the converter writes as yarn_log_multiplier, which they read (src/llama-model.cpp:1406-1432)."""


def parse(line: Line) -> Overrides:
    """The flags of a line; those about rotation also as the keys of config.json that they stand for."""
    asked = rules.parse(line)
    flags = asked.flags
    if flags.get("--rope-scaling", "none") not in ("none", "linear", "yarn"):
        raise UsageError("--rope-scaling", "none, linear or yarn", flags["--rope-scaling"][:40])
    for flag in (SCALE, INVERSE, "--rope-freq-base"):
        if flags.get(flag, 1) <= 0:
            raise UsageError(flag, "a number above 0", flags[flag])
    if INVERSE in flags and [flag for flag in flags if flag in (SCALE, INVERSE)][-1] == INVERSE:  # the last one wins
        flags[SCALE] = 1 / flags[INVERSE]
    asked.file = dict(_overridden(flags.pop("--override-kv", "")))
    if unsplit := next((word for word in line.options if re.match(r"--[\w-]+=", word)), None):
        what = f"{unsplit.partition('=')[0]}=...: invalid argument, the value is a word of its own"
        asked.stops.append(Stops(what, ENGINE.sources["split"]))
    scheme = {key: flags[flag] for flag, key in KEYS.items() if flags.get(flag, "none") != "none"}
    asked.keys = {ROPE: scheme} if scheme else {}
    asked.draft = {} if re.search(r"--spec-type|--model-draft|-md\b", " ".join(line.options)) else None
    return asked


def _overridden(text: str) -> Iterator[tuple[str, Any]]:
    """(key after the architecture, value) of --override-kv KEY=TYPE:VALUE[,...] (common/arg.cpp:2935)."""
    for entry in filter(None, text.split(",")):
        value = r"(?:(int):(-?\d+)|(float):(-?[\d.]+(?:e-?\d+)?)|(?:bool|str):(.*))"
        if (parts := re.fullmatch(rf"[\w-]+\.([\w.]+)={value}", entry)) is None:
            raise UsageError("--override-kv", "ARCHITECTURE.KEY=TYPE:VALUE", entry[:60])
        yield parts[1], int(parts[3]) if parts[2] else float(parts[5]) if parts[4] else parts[6]


def apply(config: Config, asked: Overrides) -> Config:
    """src/llama-model.cpp:1321,1406-1432 and src/llama-context.cpp:112-214: flags, else the file, else defaults.

    A config.json is taken as the converter writes it (conversion/base.py:1462-1510): attention_factor is lost, and betas are for
    Grok and Mistral 3 alone.
    """
    after = config.copy()
    after.text[LENGTH] = train = asked.file.get("context_length", config.declared)
    by_flags = asked.keys.get(ROPE, {})
    by_file = {key: asked.file[name] for name, key in METADATA.items() if asked.file.get(name)}
    for label, parameters in after.by_type.items():
        if label in WINDOWED:
            continue  # flags do not reach windowed layers (src/llama-model.cpp:2329)
        if config.kind in LOGGED and parameters.get("rope_type") in ("yarn", "deepseek_yarn"):
            if asked.schemes:
                raise NotKnown("what flags do beside the file's yarn_log_multiplier was not followed")
            continue
        if parameters.get("rope_type", "default") == "default":
            parameters["rope_type"] = "linear"  # of factor 1
        if config.kind not in BETAS:  # which two architectures alone have in their files
            parameters |= dict.fromkeys(("beta_fast", "beta_slow"))
        parameters |= by_file | by_flags
        if asked.flags.get("--rope-scaling") == "none":
            parameters["rope_type"] = "none"
        kind, factor = parameters["rope_type"], parameters.get("factor") or 1.0
        if kind == "none" or (factor == 1 and kind in ("linear", "yarn")):
            kind = "default"
        parameters["rope_type"] = kind
        if kind in ("default", "linear", "yarn"):
            parameters |= dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "type"))
            parameters["factor"] = None if kind == "default" else factor
        elif by_flags:
            raise NotKnown(f"what flags do beside a file with {kind} was not followed")
        if kind == "yarn":
            grown = YaRN(max(1.0, factor), 2).factors()[0] * asked.file.get(YARN_FACTOR, 1.0)
            parameters |= {ORIGINAL: parameters.get(ORIGINAL) or train, "attention_factor": grown}
    return after


def rotation(parameters: Parameters, config: Config, length: int | None) -> RopeConfig:
    """A rotation of llama.cpp; `apply` has put the numbers in."""
    if (factor := parameters.get("factor")) is not None and factor < 1:
        faster = f"a scale of {factor:g} makes frequencies {1 / factor:g} times as fast, and the context shorter"
        raise Stops(faster, ENGINE.sources["type"])
    if parameters.get("rope_type") == "dynamic":
        raise NotKnown("dynamic is not written into files by every converter")
    return rope(parameters, config.declared)


def served(config: Config, asked: Overrides) -> Served:
    """The slot of a request: tools/server/server-context.cpp:4008 cuts it to the training length, which YaRN's flags raise."""
    flags, flat = asked.flags, config.flat
    limit: float = config.lengths((LENGTH,))[0]
    if flags.get("--rope-scaling") == flat.get("rope_type") == "yarn" and SCALE in flags:  # llama.cpp#28030
        limit = round(flat[ORIGINAL] * flat["factor"])
    context, slots = asked.length or int(limit), flags.get("--parallel", -1)
    per_slot = context if flags.get("--kv-unified") or slots < 1 else context // slots
    per_slot = min(per_slot, flags.get("--kv-unified-per-slot") or per_slot)
    return Served(int(min(per_slot, limit)), limit=limit, wanted=per_slot)


def line(config: Config, parameters: Parameters, length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens of a file of the original weights. Stops if none do."""
    kind, kind_of_file = parameters.get("rope_type"), config.flat.get("rope_type")
    if kind is None or any(parameters.get(key) for key in ("mscale", "mscale_all_dim")) or "deepseek" in config.kind:
        why = "its file has more about positions than flags; convert the new folder"
        raise Stops(why, "src/llama-model.cpp:1406,2329")
    if (kind not in ("default", "linear", "yarn") or parameters.get("truncate") is False) or kind_of_file != "default":
        raise Stops(f"no flags turn {kind_of_file} into {kind}; convert the new folder", "common/arg.cpp:2334")
    plain = {name.replace("-", "").replace("_", ""): name for name in (*NEIGHBOURS, *HALVES)}
    name = ENGINE.architectures.get(config.kind) or plain.get(config.kind.replace("-", "").replace("_", "")) or "ARCH"
    flags, overridden = {"-c": str(length)}, f"{name}.context_length=int:{length}"
    if kind == "default":
        return flags | {"--rope-freq-base": f"{parameters[BASE]:.17g}", "--override-kv": overridden}
    flags |= {"--rope-scaling": kind, SCALE: f"{parameters['factor']:.12g}"}
    if kind == "linear":
        return flags | {"--override-kv": overridden}
    flags["--yarn-orig-ctx"] = str(parameters[ORIGINAL])  # YaRN raises the length itself
    for flag, key, usual in (("--yarn-beta-fast", "beta_fast", 32), ("--yarn-beta-slow", "beta_slow", 1)):
        if (parameters.get(key) or usual) != usual:
            flags[flag] = f"{parameters[key]:g}"
    missing = (parameters.get("attention_factor") or 0) / YaRN(float(parameters["factor"]), 2).factors()[0]
    return flags | ({} if missing in (0, 1) else {"--override-kv": f"{name}.{YARN_FACTOR}=float:{missing:.10g}"})


def config_of(path: Path) -> Config:
    """A GGUF file's keys as those of a config.json. ValueError for a scaling that is a tensor of factors."""
    file = GGUF(path)
    facts = file.facts()
    if any(tensor.name in (FACTORS, *LISTS.values()) for tensor in file.reader.tensors):
        compared = "which `longitude check FOLDER --against FILE` compares"
        raise ValueError(f"{path}: its scaling is a tensor of factors, {compared}")
    kind, declared = facts["scaling"], facts["declared length"]
    parameters: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": facts["base"]}
    if facts["rotated dimensions"] and facts["head_dim"]:
        parameters["partial_rotary_factor"] = facts["rotated dimensions"] / facts["head_dim"]
    if kind in ("linear", "yarn"):
        parameters |= {"factor": facts["factor"] or 1.0, ORIGINAL: facts["original length"] or declared}
    text = {"model_type": file.architecture, LENGTH: declared, "head_dim": facts["head_dim"], ROPE: parameters}
    return Config(text, text)
