"""Positions of a checkpoint by its configuration, and effects of longer contexts; no weights are read."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import repeat
from typing import Any
from warnings import catch_warnings

from longitude.checkpoints.compare import Reading, head_dim_of, not_rotary, read as reading, ropes
from longitude.checkpoints.config import attention_apart, positions_of_layers
from longitude.checkpoints.declared import class_of, declared_length, text_part, trained_length
from longitude.checkpoints.lint import contradictions, remarks
from longitude.checkpoints.load import built_without_weights, config_of
from longitude.checkpoints.positions import alibi_of, has_alibi, table_of
from longitude.checkpoints.unread import unread_sentence
from longitude.drawings.build import Shape
from longitude.drawings.drawing import Drawing, side_by_side
from longitude.drawings.rotations import ALL, Rotation, wavelengths
from longitude.hf.stock import heads_of
from longitude.positions.base import Encoding, encoding
from longitude.positions.bias import ALiBi, T5Bias
from longitude.positions.config_keys import LENGTHS, WINDOWED
from longitude.positions.layers import LayerPositions
from longitude.report.table import plain
from longitude.report.wording import brief

FACTORS = (2, 4, 8)
"""Lengths that are shown, in multiples of the training length."""


def read(path: str) -> Any:
    """The configuration of the text model. ValueError, in one line, if it cannot be read."""
    return text_part(config_of(path))


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


def rotations(config: Any) -> tuple[list[Rotation], dict[str, str]]:
    """(the rotation of each type of layers as far as it is understood, what is not: type of layers -> why)."""
    if not_rotary(config) or config.model_type.startswith("longitude"):
        return [], {}
    length = trained_length(config)
    if length is None:
        why = f"expected a length that the model was trained at, got a {config.model_type} config without one"
        return [], {ALL: why}
    rotating_types = []
    try:
        layers = enumerate(reading(config).layers or ())
        labels = {n: layer.label for n, layer in layers if layer is not None}
        turning = {*labels.values()}
        understood = {
            name: (rope, head_dim_of(config, name))
            for name, rope in ropes(config).items()
            if None in turning or not turning or name in turning  # DeepSeek V4 declares one that no layer has
        }
    except ValueError as error:
        return [], {ALL: str(error)}
    kinds = kinds_of(config)
    for name, (rope, head_dim) in understood.items():
        types: dict[int | None, str] = {}  # of its layers, by their windows
        for n, ((kind, window), rotates) in enumerate(zip(kinds, rope.rotates or repeat(True))):
            if rotates and name in (None, labels.get(n) or kind):
                types.setdefault(window, kind)
        which = (name or ALL) if rope.rotates is None else "layers that rotate"
        for window, kind in (types or {None: which}).items():
            rotating_types.append(Rotation(kind if len(types) > 1 else which, rope, head_dim, length, window))
    return rotating_types, {}


# ---- words -----------------------------------------------------------------------------------------------------------
def facts(path: str, config: Any, raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Facts of a checkpoint as plain data: kind, lengths, layers, and the pairs of each rotation in longer contexts.

    raw: config.json as it is written; its contradictions are noted.
    """
    (rotating, unknown), (theirs, why) = rotations(config), _understood(config)
    kinds = [*encodings(config)] or ["rotary"] * bool(rotating)
    sinks = 0
    try:
        model = built_without_weights(path, config)
        sinks = sum(name.endswith(".sinks") for name, _ in model.named_parameters())
        kinds = kinds or ["learned"] * (not unknown and table_of(model) is not None)
    except ValueError as error:
        if kinds or not unknown:
            unknown |= {"sinks" if kinds else ALL: str(error)}
    if not kinds and (unknown or hasattr(config, "num_attention_heads")):
        kinds = ["unknown" if unknown or theirs is None or theirs.problems() else "none"]
    if kinds == ["unknown"] and theirs is None and not unknown:
        unknown = {ALL: why}
    kinds = kinds or ["none, without attention"]
    notes = [*_of_class(config)]
    if theirs is not None and (rotating or kinds == ["unknown"]):
        notes += theirs.notes + theirs.problems()
    if raw is not None:
        notes += [*contradictions(raw, config), *remarks(raw, config), *filter(None, [unread_sentence(raw, config)])]
    turning = {id(rotation.rope): rotation.rope for rotation in rotating}.values()  # windows split layers of one
    lengths = {*LENGTHS, config.attribute_map.get(LENGTHS[0])}
    declared, partly = declared_length(config), getattr(config, "qk_nope_head_dim", None) is not None
    return {
        "label": path,
        "model_type": config.model_type,
        "kind": kinds,
        "trained": trained_length(config),
        "declared": declared,
        "default_length": raw is not None and lengths.isdisjoint(text_part(raw)),
        "layers": layers_of(config),
        "rotations": [_of_rotation(rotation, partly, declared, theirs) for rotation in rotating],
        "unrotated": sorted({n for rope in turning for n, rotates in enumerate(rope.rotates or ()) if not rotates}),
        "temperature": [rope.temperature for rope in turning if rope.temperature],
        "unrotated_temperature": [rope.unrotated_temperature for rope in turning if rope.unrotated_temperature],
        "sinks": sinks,
        "unknown": unknown,
        "notes": [note for note in dict.fromkeys(notes) if not any(note in why for why in unknown.values())],
    }


def _understood(config: Any) -> tuple[Reading | None, str]:
    """Reading of a config, confirmed by its class; or None, and the reason why it is not known."""
    if config.model_type.startswith("longitude"):
        return None, "its encodings are its own"
    try:
        return reading(config), ""
    except ValueError as error:
        return None, str(error)


def _of_class(config: Any) -> Iterator[str]:
    """Difference between the windows of a config and those of its class."""
    known, layers = class_of(config), positions_of(config)
    if known is not None and any(layer.window or layer.chunk for layer in layers):
        with suppress(ValueError):
            yield from (note for note in attention_apart(known, layers) if "attends to" in note)


def _of_rotation(rotation: Rotation, partly: bool, declared: int | None, theirs: Reading | None) -> dict[str, Any]:
    """partly: whether only a part of each score is rotated, which is then multiplied by softmax_factor too (DeepSeek)."""
    turns, frequencies = rotation.turns, rotation.frequencies(rotation.rope.scaling)
    factors = (*FACTORS[:-1], max(FACTORS[-1], (declared or 0) // rotation.trained))
    known = theirs is not None and not theirs.notes  # else its class rotates otherwise in longer texts
    return {
        "layers": rotation.layers,
        "trained": rotation.trained,
        "base": rotation.rope.base,
        "head_dim": rotation.head_dim,
        "window": rotation.window if rotation.bounded else None,
        "pairs": len(turns),
        "scheme": None if rotation.rope.scaling is None else rotation.rope.scaling.as_dict(),
        "turns": turns.tolist(),
        "turned": int((turns >= 1).sum()),
        "attention_factor": frequencies.attention_factor,
        "softmax_factor": frequencies.softmax_factor if partly else 1.0,
        "partial": partly or 2 * len(turns) < rotation.head_dim,
        "longer": [effect._asdict() for factor in factors for effect in rotation.stretched(factor)] if known else [],
    }


def positions_of(config: Any) -> list[LayerPositions]:
    """Positions of each layer of a stock model; an empty list where they are not understood."""
    if not config.model_type.startswith("longitude"):
        with suppress(ValueError), catch_warnings(action="ignore"):  # remarks on keys are notes of their own
            return positions_of_layers(config, "half")
    return []


def kinds_of(config: Any) -> list[tuple[str, int | None]]:
    """(type, window or None) of each layer; no window where positions are not understood."""
    windows = [layer.window or layer.chunk for layer in positions_of(config)]
    windows = windows or [None] * (getattr(config, "num_hidden_layers", None) or 0)
    plain = "full_attention" if hasattr(config, "num_attention_heads") else "recurrence"
    types = getattr(config, "layer_types", None) or [WINDOWED[0] if window else plain for window in windows]
    # Other types have keys beyond a window, such as compressed ones.
    return [(kind, window if kind in WINDOWED else None) for kind, window in zip(types, windows, strict=False)]


def layers_of(config: Any) -> dict[str, dict[str, Any]]:
    """Type of layers -> how many, and its window if it has one."""
    numbers = Counter(kinds_of(config)).items()
    return {kind: {"layers": n} | ({"window": window} if window else {}) for (kind, window), n in numbers}


def length_of(about: dict[str, Any]) -> str:
    """Its declared length, and that before its scaling."""
    trained, declared = about["trained"], about["declared"]
    by = "by the default of its class" if about["default_length"] else "declared"
    before = f", {trained:,} before scaling" if trained not in (None, declared) else ""
    return "not known: the file declares none" if declared is None else f"{declared:,} tokens {by}{before}"


def words(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(head, text) of each fact, for readers."""
    yield "model", f"{about['model_type']}, positions: {', '.join(about['kind'])}"
    yield "length", length_of(about)
    over = {kind: f" over {n['window']} tokens" if "window" in n else "" for kind, n in about["layers"].items()}
    counts = (f"{n['layers']} of {kind}{over[kind]}" for kind, n in about["layers"].items())
    yield "layers", ", ".join(counts) or "unknown"
    if about["unrotated"]:
        yield "without rotation", f"layers {', '.join(map(str, about['unrotated']))}, counted from 0"
    for key, where in (("temperature", ""), ("unrotated_temperature", " in layers without rotation")):
        for spec in about[key]:
            options = " ".join(f"{k}={v}" for k, v in spec.items() if k != "name")
            yield "queries", f"multiplied by {spec['name']}, {options}{where}"
    if about["sinks"]:
        yield "sinks", f"learned, in {about['sinks']} layers"
    for layers, why in about["unknown"].items():
        yield layers, f"not known: {why}"
    for note in about["notes"]:
        yield "note", note
    for rotation in about["rotations"]:
        yield from _rotation_in_words(rotation, about["trained"])
    if about["kind"] == ["learned"]:
        end = f"from {about['declared']} on" if about["declared"] else "past the end of its table"
        yield "beyond", f"positions {end} do not exist"


def _rotation_in_words(rotation: dict[str, Any], trained: Any) -> Iterator[tuple[str, str]]:
    turns, turned, pairs = rotation["turns"], rotation["turned"], rotation["pairs"]
    options = {name: value for name, value in (rotation["scheme"] or {}).items() if not isinstance(value, list)}
    how = ", ".join(value if name == "name" else f"{name}={value}" for name, value in options.items()) or "no scaling"
    yield rotation["layers"], f"base {rotation['base']:g}, {pairs} pairs of {rotation['head_dim']} dimensions, {how}"
    window = rotation["window"]
    within = f"{trained} tokens" if window is None else f"the window of {window} tokens"
    fastest = f"{brief(turns[0])} full rotations of the fastest pair within {within}"
    yield "turns", f"{fastest}, {turns[-1]:.3g} of the slowest"
    border = f"pairs {turned} to {pairs - 1} never finished one: {(pairs - turned) / pairs:.0%} of them"
    yield "border", border if turned < pairs else "every pair finished one: no angle is new at any length"
    factor = rotation["attention_factor"]
    if factor != 1 or rotation["softmax_factor"] != 1:
        scores = factor**2 * rotation["softmax_factor"]
        part = "the rotated part of scores" if rotation["partial"] and factor != 1 else "scores"
        yield "temperature", f"cos and sin times {factor:.4g}, so {part} times {scores:.4g}"
    if window is not None:
        yield "longer", "its offsets stay within the window at any length: no angle is new"
    elif rotation["longer"]:
        new = "the share of pairs at angles that training never met"
        yield "longer", f"{new}, and what scaling methods change, at the longest length"
        yield "", "\n".join(_longer(rotation["longer"], trained))


def _longer(rows: list[dict[str, Any]], trained: int) -> Iterator[str]:
    """A table: a line for each scaling method."""
    lengths = [str(factor * trained) for factor in dict.fromkeys(row["factor"] for row in rows)]
    lines = [["", *("" for _ in lengths), "longest", "adjacent", "scaling of"]]
    lines += [["", *lengths, "wave", "positions", "cos and sin"]]
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        *_, last = effects = [row for row in rows if row["scheme"] == scheme]
        shares = [f"{row['unseen']:.0%}" for row in effects]
        closer = f"1/{last['fastest']:.3g}"
        lines.append([scheme, *shares, f"{last['slowest']:,.0f}", closer, f"{last['temperature']:.4g}"])
    yield from (f"  {line}" for line in plain(lines))


# ---- drawings --------------------------------------------------------------------------------------------------------
def drawings(config: Any) -> list[Drawing]:
    """The wavelengths of all rotations. Without one, the drawings of the encodings."""
    from longitude.drawings import encodings as drawn

    (rotating, _), length = rotations(config), trained_length(config) or 1024
    if rotating:
        return [wavelengths(rotating)]
    if not (modules := encodings(config)):
        return []
    heads = heads_of(config)
    shape = Shape(length=min(length, 4096), heads=heads["num_heads"], head_dim=heads["head_dim"])
    every = {name: drawn.drawings(module.double().eval(), shape) for name, module in modules.items()}
    # Weights are not read, and the learned numbers that a label is drawn with are those of another model.
    return side_by_side(
        {name: [d for d in pictures if not d.title.endswith(drawn.AFTER)] for name, pictures in every.items()}
    )
