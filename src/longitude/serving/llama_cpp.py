"""How llama.cpp applies flags, computes rotations and decides the slot of a request. Versions and files: engines.toml."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longitude.checkpoints.gguf import BETAS, FACTORS, GGUF, HALVES, LISTS, NEIGHBOURS
from longitude.errors import UsageError
from longitude.positions.config_keys import WINDOWED
from longitude.positions.hugging_face import RopeConfig
from longitude.positions.scaling import YaRN
from longitude.serving.config import FACTS, LENGTH, ORIGINAL, ROPE, Config, NotKnown, Overrides, Served, Stops, rope
from longitude.serving.line import Line, literal, named

ENGINE = FACTS["llama.cpp"]
LENGTH_FLAG, KIND, SCALE, INVERSE, BASE = (
    "--ctx-size",
    "--rope-scaling",
    "--rope-scale",
    "--rope-freq-scale",
    "--rope-freq-base",
)
KEYS = {"--yarn-orig-ctx": ORIGINAL, "--yarn-beta-fast": "beta_fast", "--yarn-beta-slow": "beta_slow"}
REPLACED = (
    LENGTH_FLAG,
    "-c",
    KIND,
    SCALE,
    INVERSE,
    BASE,
    *KEYS,
    "--yarn-ext-factor",
    "--yarn-attn-factor",
    "--override-kv",
)
REMOVED = ("--ctx-size-draft", "-cd")
LOGGED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "ministral3", "deepseek2", "mistral3")
"""Model types whose mscale the converter writes as yarn_log_multiplier, which they read (src/llama-model.cpp:1406-1432)."""
INTS = (LENGTH_FLAG, "--yarn-orig-ctx", "--parallel", "--kv-unified-per-slot")
FLAGS = (*REPLACED, "--parallel", "--kv-unified", "--kv-unified-per-slot", *REMOVED)
ALIASES = {"-c": LENGTH_FLAG, "-np": "--parallel", "-kvu": "--kv-unified"}
RENAMED = {
    "mistral": "llama",
    "mixtral": "llama",
    "cohere": "command-r",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
"""Model type of transformers -> architecture of llama.cpp, if they differ by more than hyphens and underscores."""


def parse(line: Line) -> Overrides:
    """The flags of a line (common/arg.cpp); those about rotation also as the keys of config.json that they stand for."""
    asked, flags = Overrides(), dict[str, Any]()
    for flag, value in named(line, FLAGS, ALIASES):
        with asked.noting(ENGINE):
            if flag in REMOVED:
                asked.stops.append(
                    Stops(f"{flag} was removed: a draft has the length of its target", ENGINE.sources["parse"])
                )
            elif flag == "--kv-unified":
                flags[flag] = True
            elif flag == "--override-kv":
                flags |= dict(_overridden(literal(value, flag)))
            else:
                if flag in (SCALE, INVERSE):  # the last one wins
                    flags = {name: number for name, number in flags.items() if name not in (SCALE, INVERSE)}
                flags[flag] = _value(literal(value, flag), flag)
    if unsplit := next((word for word in line.options if re.match(r"--[\w-]+=", word)), None):
        what = f"{unsplit.partition('=')[0]}=...: invalid argument, the value is a word of its own"
        asked.stops.append(Stops(what, "common/arg.cpp:827"))
    scheme = {key: flags[flag] for flag, key in KEYS.items() if flag in flags}
    if (factor := flags.get(SCALE, 1 / flags[INVERSE] if INVERSE in flags else None)) is not None:
        scheme["factor"] = factor
    if flags.get(KIND, "none") != "none":
        scheme["rope_type"] = flags[KIND]
    if BASE in flags:
        scheme["rope_theta"] = flags[BASE]
    asked.flags, asked.length, asked.keys = flags, flags.get(LENGTH_FLAG) or None, {ROPE: scheme} if scheme else {}
    asked.draft = {} if re.search(r"--spec-type|--model-draft|-md\b", " ".join(line.options)) else None
    return asked


def _value(text: str, flag: str) -> Any:
    if flag == KIND:
        if text not in ("none", "linear", "yarn"):
            raise UsageError(flag, "none, linear or yarn", text[:40])
        return text
    try:
        number = int(text) if flag in INTS else float(text)
    except ValueError:
        raise UsageError(flag, "a whole number, such as 131072" if flag in INTS else "a number", text[:40]) from None
    if not math.isfinite(number) or (number <= 0 and flag in (SCALE, INVERSE, BASE)):
        raise UsageError(flag, "a number above 0", text[:40])
    return number


def _overridden(text: str) -> Iterator[tuple[str, Any]]:
    """(key after the architecture, value) of --override-kv KEY=TYPE:VALUE[,...] (common/arg.cpp:2935)."""
    for entry in text.split(","):
        parts = re.fullmatch(
            r"[\w-]+\.([\w.]+)=(?:(int):(-?\d+)|(float):(-?[\d.]+(?:e-?\d+)?)|(?:bool|str):(.*))", entry
        )
        if parts is None:
            raise UsageError("--override-kv", "ARCHITECTURE.KEY=TYPE:VALUE", entry[:60])
        yield parts[1], int(parts[3]) if parts[2] else float(parts[5]) if parts[4] else parts[6]


def apply(config: Config, asked: Overrides) -> Config:
    """src/llama-model.cpp:1321,1406-1432 and src/llama-context.cpp:112-214: flags, else the file, else defaults.

    A config.json is taken as the converter writes it (conversion/base.py:1462-1510): attention_factor is lost, and betas are for
    Grok and Mistral 3 alone.
    """
    after, flags = config.copy(), asked.flags
    after.text[LENGTH] = train = flags.get("context_length", config.declared)
    for label, parameters in after.by_type.items():
        if label in WINDOWED:
            continue  # flags do not reach windowed layers (src/llama-model.cpp:2329)
        of_file = dict(parameters)
        if config.kind in LOGGED and of_file.get("rope_type") in ("yarn", "deepseek_yarn"):
            if asked.schemes:
                raise NotKnown("what flags do beside the file's yarn_log_multiplier was not followed")
            continue
        kind = of_file.get("rope_type", "default")
        kind = flags.get(KIND, flags.get("rope.scaling.type", "linear" if kind == "default" else kind))
        factor = flags.get("rope.scaling.factor", of_file.get("factor") or 1.0)
        factor = flags.get(SCALE, 1 / flags[INVERSE] if INVERSE in flags else factor)
        if kind == "none" or (factor == 1 and kind in ("linear", "yarn")):
            kind = "default"
        if kind in ("default", "linear", "yarn"):
            parameters |= dict.fromkeys(
                (*KEYS.values(), "attention_factor", "mscale", "mscale_all_dim", "factor", "type")
            )
        parameters["rope_type"] = kind
        parameters["rope_theta"] = flags.get(BASE, flags.get("rope.freq_base", of_file.get("rope_theta")))
        if kind in ("linear", "yarn"):
            parameters["factor"] = factor
        if kind == "yarn":
            originals = (
                flags.get("--yarn-orig-ctx"),
                flags.get("rope.scaling.original_context_length"),
                of_file.get(ORIGINAL),
            )
            parameters[ORIGINAL] = next(filter(None, originals), train)
            for flag, key in list(KEYS.items())[1:]:  # betas of the file are for two architectures alone
                parameters[key] = flags.get(flag, of_file.get(key) if config.kind in BETAS else None)
            grown = YaRN(max(1.0, factor), 2).factors()[0]
            parameters["attention_factor"] = grown * flags.get("rope.scaling.attn_factor", 1.0)
    return after


def rotation(parameters: dict[str, Any], config: Config, length: int | None) -> RopeConfig:
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
    if flags.get(KIND) == flat.get("rope_type") == "yarn" and flags.keys() & {SCALE, INVERSE}:  # llama.cpp#28030
        limit = round(flat[ORIGINAL] * flat["factor"])
    context, slots = asked.length or int(limit), flags.get("--parallel", -1)
    per_slot = context if flags.get("--kv-unified") or slots < 1 else context // slots
    per_slot = min(per_slot, flags.get("--kv-unified-per-slot") or per_slot)
    return Served(int(min(per_slot, limit)), None, limit, wanted=per_slot)


def line(config: Config, parameters: dict[str, Any], length: int) -> dict[str, Any]:
    """Flags that serve `length` tokens of a file of the original weights. Stops if none do."""
    kind, own = parameters.get("rope_type"), config.flat
    if kind is None or any(parameters.get(key) for key in ("mscale", "mscale_all_dim")) or "deepseek" in config.kind:
        raise Stops(
            "its file has more about positions than flags; convert the new folder", "src/llama-model.cpp:1406,2329"
        )
    if (
        kind not in ("default", "linear", "yarn")
        or parameters.get("truncate") is False
        or own.get("rope_type") != "default"
    ):
        raise Stops(f"no flags turn {own.get('rope_type')} into {kind}; convert the new folder", "common/arg.cpp:2334")
    flags, overridden = {"-c": str(length)}, [f"context_length=int:{length}"]
    if kind == "default":
        flags[BASE] = f"{parameters['rope_theta']:.17g}"
    else:
        flags |= {KIND: kind, SCALE: f"{parameters['factor']:.12g}"}
    if kind == "yarn":  # which raises the length itself
        flags["--yarn-orig-ctx"], overridden = str(parameters[ORIGINAL]), []
        usual = {"beta_fast": 32, "beta_slow": 1}
        betas = {flag: parameters.get(key) or usual[key] for flag, key in list(KEYS.items())[1:]}
        flags |= {flag: f"{beta:g}" for (flag, beta), same in zip(betas.items(), usual.values()) if beta != same}
        missing = (parameters.get("attention_factor") or 0) / YaRN(float(parameters["factor"]), 2).factors()[0]
        overridden += [f"rope.scaling.attn_factor=float:{missing:.10g}"] * (missing not in (0, 1))
    plain = {name.replace("-", "").replace("_", ""): name for name in (*NEIGHBOURS, *HALVES)}
    known = RENAMED.get(config.kind) or plain.get(config.kind.replace("-", "").replace("_", "")) or "ARCH"
    return flags | ({"--override-kv": ",".join(f"{known}.{entry}" for entry in overridden)} if overridden else {})


def config_of(path: Path) -> Config:
    """A GGUF file's keys as those of a config.json. ValueError for a scaling that is a tensor of factors."""
    file = GGUF(path)
    facts = file.facts()
    if any(tensor.name in (FACTORS, *LISTS.values()) for tensor in file.reader.tensors):
        raise ValueError(
            f"{path}: its scaling is a tensor of factors, which `longitude check FOLDER --against FILE` compares"
        )
    kind, declared = facts["scaling"], facts["declared length"]
    parameters: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": facts["base"]}
    if facts["rotated dimensions"] and facts["head_dim"]:
        parameters["partial_rotary_factor"] = facts["rotated dimensions"] / facts["head_dim"]
    if kind in ("linear", "yarn"):
        parameters |= {"factor": facts["factor"] or 1.0, ORIGINAL: facts["original length"] or declared}
    text = {"model_type": file.architecture, LENGTH: declared, "head_dim": facts["head_dim"], ROPE: parameters}
    return Config(text, text)
