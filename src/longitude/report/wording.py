"""Numbers and names in sentences."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any
from zlib import crc32

from longitude.labels import LAYERS, Part, layers_in

PAPERS = {
    "nope": "NoPE",
    "learned": "learned table",
    "abacus": "Abacus",
    "coupled": "position coupling",
    "rope": "RoPE",
    "xpos": "xPos",
    "axial_rope": "axial RoPE",
    "mrope": "M-RoPE",
    "pope": "PoPE",
    "fope": "FoPE",
    "rerope": "ReRoPE",
    "leaky_rerope": "Leaky ReRoPE",
    "self_extend": "Self-Extend",
    "dual_chunk": "dual chunk",
    "alibi": "ALiBi",
    "t5": "T5 bias",
    "clipped": "clipped bias",
    "kerple_log": "KERPLE-log",
    "kerple_power": "KERPLE-power",
    "sandwich": "Sandwich",
    "fire": "FIRE",
    "shaw": "Shaw",
    "transformer_xl": "Transformer-XL",
    "inkling": "Inkling",
    "cope": "CoPE",
    "fox": "FoX",
    "path": "PaTH",
    "path_fox": "PaTH-FoX",
    "ssmax": "SSMax",
    "log_n": "log n",
    "llama4_temperature": "Llama 4 temperature",
    "ministral3_temperature": "Ministral 3 temperature",
    "log_affine": "log-affine temperature",
    "beam_temperature": "Beam temperature",
    "sink": "learned sink",
    "latent": "MLA",
    "indexed": "DSA",
    "indexed_latent": "DSA over MLA",
    "repo": "RePo",
    "stick_breaking": "stick-breaking attention",
    "parallel": "parallel heads",
    "chunks": "chunked attention",
    "window": "sliding window",
    "hierarchical": "hierarchical attention",
    "performer": "Performer",
    "retention": "RetNet",
    "gated_deltanet": "Gated DeltaNet",
    "kda": "KDA",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "mamba3": "Mamba-3",
    "rwkv4": "RWKV-4",
    "rwkv6": "RWKV-6",
    "rwkv7": "RWKV-7",
    "s4d": "S4D",
    "lstm": "LSTM",
    "gru": "GRU",
}
"""Names in papers, by registered name; other names stay unchanged."""
QK_NORM = Part("attention", ("qk_norm=true",))
"""A part that names what it adds to an encoding: RoPE, QK-norm."""
ROPE_BASE = 10_000
"""The base of `rope` without options."""


def paper(label: str, options: bool = True) -> str:
    """The paper's name for a label: rope:base=500+fox -> RoPE (base=500) + FoX; options: with or without them."""

    def named(part: Part) -> str:
        return PAPERS.get(part.name, part.name) + (f" ({','.join(part.options)})" if options and part.options else "")

    def of_layer(parts: list[Part]) -> str:
        names = " + ".join(named(part) for part in parts if part != QK_NORM)
        return names + ", QK-norm" * (QK_NORM in parts)

    return label if "/" in label else by_layer(label, of_layer)


def as_written(parts: Sequence[Part]) -> str:
    """The label of a layer of these parts."""
    return "+".join(map(str, parts))


def by_layer(label: str, write: Callable[[list[Part]], str] = as_written) -> str:
    """A label with equal layers in a row counted: rope..rope..rope..nope -> 3 × rope / nope; write: how each is written."""
    rows = [(layer, len([*same])) for layer, same in groupby(layers_in(label))]
    return " / ".join((f"{count} × " if count > 1 else "") + write(layer) for layer, count in rows)


def with_parts(label: str, change: Callable[[Part], Part]) -> str:
    """A label with each of its parts changed."""
    return LAYERS.join(as_written([*map(change, parts)]) for parts in layers_in(label))


def with_base(label: str) -> str:
    """A label whose rope says its base: rope+fox -> rope:base=10000+fox."""

    def based(part: Part) -> Part:
        if part.name != "rope" or any(option.startswith("base=") for option in part.options):
            return part
        return part._replace(options=(f"base={ROPE_BASE}", *part.options))

    return with_parts(label, based)


HUES = ("nope", "sinusoidal", "rope", "alibi", "t5", "fire", "learned")
"""Encodings with a color of their own, in the order of the colors; others share these seven."""


def hue_of(label: str) -> int:
    """The number of an encoding's color, the same in every figure and terminal; options and what is added do not change it."""
    name = layers_in(label)[0][0].name
    return HUES.index(name) if name in HUES else crc32(name.encode()) % len(HUES)


def papers(labels: Sequence[str]) -> dict[str, str]:
    """Label -> the paper's name, with its options only where two labels would have one name, or for RoPE, with its base."""
    often = Counter(paper(label, options=False) for label in labels)

    def name(label: str) -> str:
        rotates = any(part.name == "rope" for parts in layers_in(label) for part in parts)
        return paper(with_base(label), options=rotates or often[paper(label, options=False)] > 1)

    return {label: name(label) for label in labels}


def named(label: str) -> str:
    """A label inside a sentence. `nope` is NoPE, as papers call it."""
    return "NoPE" if label == "nope" else by_layer(label)


def capital(text: str, names: Sequence[str] = ()) -> str:
    """With a capital letter at the start, unless a name stands there."""
    return text if any(map(text.startswith, names)) else text[:1].upper() + text[1:]


def and_(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def percent(ratio: float | None, unit: str = "%") -> str:
    """0.421 -> +42%, -0.0123 -> −1.2%: signed, one digit after the point where it matters; empty for None."""
    if ratio is None:
        return ""
    number = 100 * ratio
    text = f"{number:+.1f}" if abs(number) < 9.95 else f"{number:+.0f}"
    return text.replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0") + unit


NOT_FINITE = "not finite"
"""The cell of a number that is not finite."""
NONE = "–"
"""The cell of what was not measured."""


def fixed(value: float | None, spec: str) -> str:
    """A number as a format has it, such as "+.2f"; from a million on as 1.2e+07, since a diverged perplexity has 100 digits."""
    if value is None:
        return NOT_FINITE
    return format(value, spec if abs(value) < 1e6 else f"{spec[: spec.index('.')]}.1e")


def brief(value: float | None) -> str:
    """A number in a few digits: 1024, 0.25, 3.1e-05; a dash for None."""
    if value is None:
        return NONE
    value = float(value) + 0.0  # no -0
    whole = value == int(value) if abs(value) < 1e9 else False
    return f"{value:.0f}" if whole or 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def count(number: int, thing: str) -> str:
    """1 seed, 2 seeds."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def far(longest: int, train_length: int) -> str:
    """How a length compares with the training length."""
    if longest <= train_length:
        return f"after training on {train_length}"
    times, rest = divmod(longest, train_length)
    return f"after training on {train_length}" if rest else f"{times} times the training length"


def legible(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A protocol for readers: {"batch_size": 8, "seeds": [0, 1]} -> [("batch size", "8"), ("seeds", "0, 1")]."""

    def in_words(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        if isinstance(value, Mapping):
            return ", ".join(f"{name}: {part}" for name, part in value.items())
        return "none" if value is None else f"{value:,}" if type(value) is int and value >= 10_000 else str(value)

    return [(name.replace("_", " "), in_words(value)) for name, value in values.items()]
