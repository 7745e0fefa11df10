"""Positions of a checkpoint by its configuration, and effects of longer contexts; no weights are read."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from longitude.checkpoints.compare import Reading, frequencies_of, head_dim_of, not_rotary, read as reading, ropes
from longitude.checkpoints.config import attention_apart, positions_of_layers
from longitude.checkpoints.declared import class_of, declared_length, text_part, trained_length, unrotated
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import built_without_weights, config_of, without_class
from longitude.checkpoints.positions import alibi_of, alibi_of_class, has_alibi, table_of
from longitude.errors import UsageError
from longitude.hf.stock import heads_of
from longitude.positions.base import Encoding, encoding
from longitude.positions.bias import ALiBi
from longitude.positions.buckets import T5Bias
from longitude.positions.hugging_face import RopeConfig, not_understood
from longitude.positions.scaling import Frequencies, Scaling
from longitude.show.drawing import Dials, Drawing, Lines, number, side_by_side
from longitude.show.rotations import FACTOR, NEW, PLAIN, SHOWN, clocks as of_encoding, dials, followed, grouped, schemes
from longitude.show.shape import Shape

CLOCKS = 4
"""Length that dials are drawn for, in multiples of the training length, if a model declares no longer one."""
FACTORS = (2, 4, 8)
"""Lengths that are shown, in multiples of the training length."""
ALL = "all layers"


class Stretched(NamedTuple):
    """Effect of a length on the pairs of a rotation under a scheme.

    Attributes:
        factor: The length over the trained one.
        scheme: Name of the scheme.
        unseen: The share of the rotating pairs that reach angles never seen in training.
        slowest: The longest wavelength, in positions.
        fastest: Factor by which the fastest pair rotates more slowly, which brings adjacent tokens closer together.
        temperature: Factor of cos and sin.
    """

    factor: int
    scheme: str
    unseen: float
    slowest: float
    fastest: float
    temperature: float


class Rotation(NamedTuple):
    """The rotation of a type of layers, the length that its weights were trained at, and their window if that is shorter."""

    layers: str
    rope: RopeConfig
    head_dim: int
    trained: int
    window: int | None = None

    def frequencies(self, scaling: Scaling | None, length: int | None = None) -> Frequencies:
        return frequencies_of(self.rope._replace(scaling=scaling, sections=None), self.head_dim, length)

    @property
    def plain(self) -> Tensor:
        """Frequencies of the pairs that rotate, before any scheme."""
        theta = self.frequencies(None).inverse
        return theta[theta > 0]

    @property
    def turns(self) -> Tensor:
        """Full rotations of each pair within the offsets of training, before any scheme."""
        return (self.window or self.trained) * self.plain / (2 * math.pi)

    def stretched(self, factor: int) -> list[Stretched]:
        """Effects of every scheme defined by a factor, and of none; empty for a window, because its offsets do not grow."""
        if self.window is not None:
            return []
        before, found = self.plain, []
        for name, scheme in {PLAIN: None, **schemes(factor, self.trained)}.items():
            after, temperature, _ = self.frequencies(scheme)
            after = after[: len(before)]
            unseen = float(((self.turns < 1) & (factor * after > before * (1 + NEW))).double().mean())
            slowest, fastest = 2 * math.pi / float(after[-1]), float(before[0] / after[0])
            found.append(Stretched(factor, name, unseen, slowest, fastest, temperature))
        return found


def read(path: str) -> Any:
    """The configuration of the text model. ValueError, in one line, if it cannot be read."""
    try:
        return text_part(config_of(path))
    except ValueError as refusal:
        if (config := without_class(path)) is None:
            raise refusal
        return config


def encodings(config: Any) -> dict[str, Encoding]:
    """Our encodings for a config without rotation: ALiBi, T5's buckets, or the encodings of a Longitude model; by name."""
    if config.model_type.startswith("longitude"):
        specs = {str(spec): spec for layer in config.layer_specs() for spec in layer}
        return {spec["name"]: encoding(**spec) for spec in specs.values()}
    if has_alibi(config):
        return {"alibi": ALiBi(heads_of(config)["num_heads"], slopes=alibi_of(config))}
    if (buckets := getattr(config, "relative_attention_num_buckets", None)) is not None:
        heads = heads_of(config)["num_heads"]
        return {"t5": T5Bias(heads, buckets, getattr(config, "relative_attention_max_distance", 128))}
    return {}


def rotations(config: Any) -> list[Rotation]:
    """The rotation of each type of layers, as far as it is understood; an empty list if none rotates."""
    return _rotations(config)[0]


def _rotations(config: Any) -> tuple[list[Rotation], dict[str, str]]:
    """(what is understood, what is not: type of layers -> why)."""
    if not_rotary(config) or config.model_type.startswith("longitude"):
        return [], {}
    length = trained_length(config)
    if length is None:
        why = f"expected a length that the model was trained at, got a {config.model_type} config without one"
        return [], {ALL: why}
    found, layers = [], kinds_of(config)
    try:
        understood = {name: (rope, head_dim_of(config, name)) for name, rope in ropes(config).items()}
    except ValueError as error:
        return [], {ALL: str(error)}
    for name, (rope, head_dim) in understood.items():
        which = (name or ALL) if rope.rotates is None else "layers that rotate"
        rotating = [True] * len(layers) if rope.rotates is None else rope.rotates
        own = {window for (kind, window), yes in zip(layers, rotating) if yes and name in (None, kind)}
        longest = max((window or length for window in own), default=length)
        found.append(Rotation(which, rope, head_dim, length, longest if longest < length else None))
    return found, {}


# ---- words -----------------------------------------------------------------------------------------------------------
def facts(path: str, config: Any, raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Facts of a checkpoint as plain data: kind, lengths, layers, and the pairs of each rotation in longer contexts.

    raw: config.json as it is written; its contradictions are noted.
    """
    (rotating, unknown), (theirs, why) = _rotations(config), _understood(config)
    kinds = [*encodings(config)] or ["rotary"] * bool(rotating)
    if not kinds and not unknown:
        try:
            has_table = table_of(built_without_weights(path, AutoModel.from_config, config)) is not None
            kinds = ["learned"] * has_table
        except ValueError as error:
            unknown |= {ALL: str(error)}
    if not kinds and (unknown or hasattr(config, "num_attention_heads")):
        kinds = ["unknown" if unknown or theirs is None or theirs.problems() else "none"]
    if kinds == ["unknown"] and theirs is None and not unknown:
        unknown = {ALL: why}
    kinds = kinds or ["none, without attention"]
    notes = [*_of_class(config)]
    if theirs is not None and (rotating or kinds == ["unknown"]):
        notes += theirs.notes + theirs.problems()
    if config.model_type not in CONFIG_MAPPING:
        notes += [f"not understood: {', '.join(unread)}"] if (unread := not_understood(config)) else []
    elif raw is not None:
        notes += [*contradictions(raw, config), *remarks(raw, config)]
    return {
        "label": path,
        "model_type": config.model_type,
        "kind": kinds,
        "trained": trained_length(config),
        "declared": declared_length(config),
        "layers": layers_of(config),
        "rotations": [_of_rotation(each, getattr(config, "qk_nope_head_dim", None) is not None) for each in rotating],
        "unrotated": sorted({layer for each in rotating for layer in unrotated(each.rope)}),
        "temperature": [spec for each in rotating for spec in _temperatures(each.rope)],
        "unknown": unknown,
        "notes": [note for note in dict.fromkeys(notes) if not any(note in why for why in unknown.values())],
    }


def _temperatures(rope: RopeConfig) -> list[Any]:
    return [spec for spec in (rope.temperature, rope.unrotated_temperature) if spec is not None]


def _understood(config: Any) -> tuple[Reading | None, str]:
    """Reading of a config, confirmed by its class; or None, and the reason why it is not known."""
    if config.model_type.startswith("longitude"):
        return None, "its encodings are its own"
    try:
        return reading(config), ""
    except ValueError as error:
        return None, str(error)


def _of_class(config: Any) -> Iterator[str]:
    """Difference between a config and what its class does: with the slopes of ALiBi, and with windows."""
    if has_alibi(config) and (own := alibi_of_class(config)) and not np.allclose(own, alibi_of(config), rtol=1e-6):
        theirs = f"its first slope is {own[0]:.4g}, not {alibi_of(config)[0]:.4g}"
        yield f"transformers' class of {config.model_type} does not read alibi_bias_max: {theirs}"
    if (known := class_of(config)) is None:
        return
    with suppress(ValueError):
        layers = positions_of_layers(config, "half")
        if any(one.window or one.chunk for one in layers):
            yield from (words for words in attention_apart(known, layers) if "attends to" in words)


def _of_rotation(rotation: Rotation, partly: bool) -> dict[str, Any]:
    """partly: whether only a part of each score is rotated, which is then multiplied by softmax_factor too (DeepSeek)."""
    turns, own = rotation.turns, rotation.frequencies(rotation.rope.scaling)
    return {
        "layers": rotation.layers,
        "base": rotation.rope.base,
        "head_dim": rotation.head_dim,
        "window": rotation.window,
        "pairs": len(turns),
        "scheme": None if rotation.rope.scaling is None else rotation.rope.scaling.as_dict(),
        "turns": turns.tolist(),
        "turned": int((turns >= 1).sum()),
        "attention_factor": own.attention_factor,
        "softmax_factor": own.softmax_factor if partly else 1.0,
        "longer": [each._asdict() for factor in FACTORS for each in rotation.stretched(factor)],
    }


def kinds_of(config: Any) -> list[tuple[str, int | None]]:
    """(type, window or None) of each layer."""
    window = None if getattr(config, "use_sliding_window", True) is False else getattr(config, "sliding_window", None)
    windows = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    plain = "full_attention" if hasattr(config, "num_attention_heads") else "recurrence"
    alike = ["sliding_attention" if window else plain] * (getattr(config, "num_hidden_layers", None) or 0)
    return [(kind, windows.get(kind)) for kind in getattr(config, "layer_types", None) or alike]


def layers_of(config: Any) -> dict[str, dict[str, Any]]:
    """Type of layers -> how many, and its window if it has one."""
    numbers = Counter(kinds_of(config)).items()
    return {kind: {"layers": n} | ({"window": window} if window else {}) for (kind, window), n in numbers}


def words(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers."""
    trained: Any = about["trained"]
    declared = about["declared"]
    length = "unknown" if trained is None else f"{trained} tokens"
    more = f"; {declared} are declared" if declared not in (None, trained) else ""
    yield "model", f"{about['model_type']}, positions: {', '.join(about['kind'])}"
    yield "trained at", length + more
    over = {kind: f" over {n['window']} tokens" if "window" in n else "" for kind, n in about["layers"].items()}
    each = (f"{n['layers']} of {kind}{over[kind]}" for kind, n in about["layers"].items())
    yield "layers", ", ".join(each) or "unknown"
    if about["unrotated"]:
        yield "without rotation", f"layers {', '.join(map(str, about['unrotated']))}, counted from 0"
    for spec in about["temperature"]:
        options = " ".join(f"{k}={v}" for k, v in spec.items() if k != "name")
        yield "queries", f"multiplied by {spec['name']}, {options}"
    for layers, why in about["unknown"].items():
        yield layers, f"not known: {why}"
    for note in about["notes"]:
        yield "note", note
    for rotation in about["rotations"]:
        yield from _rotation_in_words(rotation, about["trained"])
    if about["kind"] == ["learned"]:
        end = f"from {declared} on" if declared else "past the end of its table"
        yield "beyond", f"positions {end} do not exist; `longitude extend --method linear` stretches the table"
    if about["kind"] == ["alibi"]:
        yield "beyond", "the bias goes on falling at every distance: nothing needs to be scaled"


def _rotation_in_words(rotation: dict[str, Any], trained: Any) -> Iterator[tuple[str, str]]:
    turns, turned, pairs = rotation["turns"], rotation["turned"], rotation["pairs"]
    scheme = rotation["scheme"]
    options = {} if scheme is None else {k: v for k, v in scheme.items() if not isinstance(v, list)}
    how = ", ".join(f"{k}={v}" if k != "name" else v for k, v in options.items()) or "no scaling"
    yield rotation["layers"], f"base {rotation['base']:g}, {pairs} pairs of {rotation['head_dim']} dimensions, {how}"
    window = rotation["window"]
    within = f"{trained} tokens" if window is None else f"the window of {window} tokens"
    fastest = f"{number(turns[0])} full rotations of the fastest pair within {within}"
    yield "turns", f"{fastest}, {turns[-1]:.3g} of the slowest"
    border = f"pairs {turned} to {pairs - 1} never finished one: {(pairs - turned) / pairs:.0%} of them"
    yield "border", border if turned < pairs else "every pair finished one: no angle is new at any length"
    factor = rotation["attention_factor"]
    if factor != 1 or rotation["softmax_factor"] != 1:
        scores = factor**2 * rotation["softmax_factor"]
        yield "temperature", f"cos and sin times {factor:.4g}, so scores times {scores:.4g}"
    if window is not None:
        yield "longer", "its offsets stay within the window at any length: no angle is new"
    elif rotation["longer"]:
        new = "the share of pairs at angles that training never met"
        yield "longer", f"{new}, and what scaling methods change, at the longest length"
        yield "", "\n".join(_longer(rotation["longer"], trained))


def _longer(rows: list[dict[str, Any]], trained: int) -> Iterator[str]:
    """A table: a line for each scaling method."""
    heads = "".join(f"{factor * trained:>9}" for factor in FACTORS)
    yield f"  {'':{16 + len(heads)}}{'longest':>12}{'adjacent':>11}{'scaling of':>12}"
    yield f"  {'':16}{heads}{'wave':>12}{'positions':>11}{'cos and sin':>12}"
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = [row for row in rows if row["scheme"] == scheme]
        shares, last = "".join(f"{row['unseen']:>9.0%}" for row in own), own[-1]
        closer = f"1/{last['fastest']:.3g}"
        yield f"  {scheme:16}{shares}{last['slowest']:>12,.0f}{closer:>11}{last['temperature']:>12.4g}"


# ---- drawings --------------------------------------------------------------------------------------------------------
def drawings(config: Any) -> list[Drawing]:
    """Drawings of each rotation: its turns and border, and effects of longer contexts. Without one, those of the encodings."""
    from longitude.show import encodings as drawn

    rotating, length = rotations(config), trained_length(config) or 1024
    if rotating:
        free = [one for one in rotating if one.window is None]
        return [_turns(rotating), *map(_wavelengths, free)]
    if not (own := encodings(config)):
        return []
    heads = heads_of(config)
    shape = Shape(length=min(length, 4096), heads=heads["num_heads"], head_dim=heads["head_dim"])
    return side_by_side({name: drawn.drawings(each.double().eval(), shape) for name, each in own.items()})


def clocks(config: Any, length: int | None) -> Iterator[Dials]:
    """The dials of each rotation, without a scheme, and with its own or, if it has none, `SHOWN`.

    length: Tokens that are asked for; None: those that the model declares, or four times the training length.

    Raises:
        UsageError: No layer rotates by offsets that grow with the length.
    """
    if config.model_type.startswith("longitude"):
        layers = zip(config.layer_specs(), config.layer_mixers(), strict=True)
        free = [own for own, mixer in layers if "size" not in mixer.get("attention", mixer)]
        specs = {str(spec): spec for own in free for spec in own}
        shape = Shape(length=trained_length(config) or Shape.length)
        if own := [dial for spec in specs.values() for dial in of_encoding(encoding(**spec), shape, length)]:
            yield from own
            return
    free = [one for one in rotations(config) if one.window is None]
    if not free:
        expected = "a model with rotary layers that see the whole text"
        raise UsageError("--clocks", expected, config.model_type, "leave it out")
    for one in free:
        declared = declared_length(config) or 0
        asked = length or (declared if declared > one.trained else CLOCKS * one.trained)
        own = one.rope.scaling
        scheme = schemes(max(1.0, asked / one.trained), one.trained)[SHOWN] if own is None else own
        name, note = SHOWN, ""
        if own is not None:
            name = f"its own {own.name}"
            note = " A model that was trained further with this scheme has seen angles that are new here."
        after = one.frequencies(scheme, followed(scheme, asked)).inverse[: len(one.plain)]
        which = "" if one.layers == ALL else one.layers
        yield from dials(one.plain, {PLAIN: one.plain, name: after}, one.trained, asked, which, note)


def _turns(rotating: list[Rotation]) -> Lines:
    return Lines(
        name="turns",
        title=f"Full rotations of each pair within the training length of {rotating[0].trained}, or its window",
        caption="Below 1 a pair never finished one: it saw a part of its circle, and a longer context takes it to angles that "
        "are new.",
        x="rotary pair",
        y="full rotations",
        lines={one.layers: (np.arange(len(one.turns)), one.turns.numpy()) for one in rotating},
        log_y=True,
        levels={"border: one full rotation": 1.0},
    )


def _name(rotation: Rotation, name: str) -> str:
    return name if rotation.layers == ALL else f"{name}-{rotation.layers}"


def _wavelengths(rotation: Rotation) -> Lines:
    pairs = np.arange(len(rotation.plain))
    own = {} if rotation.rope.scaling is None else {f"its own {rotation.rope.scaling.name}": rotation.rope.scaling}
    every: dict[str, Scaling | None] = {PLAIN: None, **own, **schemes(FACTOR, rotation.trained)}
    after = {name: rotation.frequencies(scheme).inverse[: len(pairs)] for name, scheme in every.items()}
    lines = {name: (pairs, (rotation.plain / theta).numpy()) for name, theta in after.items()}
    return Lines(
        name=_name(rotation, "slowed"),
        title=f"How many times slower each pair rotates at {FACTOR} times the length, by scheme ({rotation.layers})",
        caption=f"Frequencies before any scheme over those after it, at {FACTOR * rotation.trained} tokens.",
        x="rotary pair",
        y="times slower",
        lines=grouped(lines),
        marks={"border": int((rotation.turns >= 1).sum())},
    )
