"""The positions that a config.json declares, as the model's class computes them: what is exported."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from longitude.checkpoints.compare import by_reason, read
from longitude.checkpoints.declared import Ropes, class_of, declared_length, text_part
from longitude.checkpoints.lint import contradictions, two_values
from longitude.checkpoints.observed import MANY, TOKENS, observe
from longitude.checkpoints.unread import unread_sentence
from longitude.errors import UsageError, check_choice
from longitude.positions.config_keys import FULL, WINDOWED, as_mapping, not_understood
from longitude.positions.hugging_face import NotUnderstood, unread_words
from longitude.positions.layers import LayerPositions, layers_of
from longitude.positions.rotation import Layout


def from_hugging_face(config: Mapping[str, Any] | Any) -> Ropes:
    """Read the rotary parameters of a Transformers config as the model's class reads them.

    A config without a model_type, or with one that the installed transformers does not have, is read only by its keys, and all
    its layers count as rotating. Defaults: the original length of yarn, longrope and llama3 is max_position_embeddings; the
    config's top-level original_max_position_embeddings takes precedence over the one in flat parameters. The factor of yarn and
    longrope is max_position_embeddings / original length. The original length of dynamic is max_position_embeddings.

    Args:
        config: a mapping, or an object with to_dict().

    Returns:
        RopeConfig, or one per layer type (None: layers without rotation); empty for a model that rotates nothing. It includes
        the rotating layers, and the temperature of queries. Warnings name keys about positions that were not understood, and
        keys that contradict each other.

    Raises:
        ValueError: a missing base (never 10000 by default), an unknown type, a misspelt key, a key of another type.
        NotUnderstood: a ValueError, if the class rotates differently from the keys that are read here.
    """
    reading = read(config)
    keys, theirs = as_mapping(text_part(config)), class_of(config)
    unread = unread_words(not_understood(keys)) if theirs is None else unread_sentence(keys, theirs)
    doubtful: Iterable[str] = ()
    if isinstance(config, Mapping):
        doubtful = two_values(text_part(config)) if reading.layers is None else contradictions(config, theirs)
    for sentence in [*doubtful, *filter(None, [unread]), *reading.notes, *reading.problems()]:
        warnings.warn(sentence, stacklevel=2)
    return reading.ropes


def layers_from_hugging_face(config: Mapping[str, Any] | Any, layout: Layout) -> list[LayerPositions]:
    """Positions of each layer of a Transformers config.

    Example: LongitudeConfig(encodings=[one.encoding for one in layers], mixers=[one.mixer for one in layers], ...).

    Args:
        config: a mapping, or an object with to_dict().
        layout: which numbers of a head make a rotary pair, "half" or "interleaved"; no config has it.

    Returns:
        LayerPositions, one per layer. Scales, caps and sinks of scores are not in it.

    Raises:
        ValueError: as from_hugging_face; no number of layers, or parameters by layer type without layer_types.
        NotUnderstood: a ValueError, if positions reach attention in a way that no key of the config explains.
        UsageError: a ValueError, if a forward pass of the class does not confirm the visible keys: keys are selected by
            content, compressed or added, or no attention is seen.
    """
    layers = positions_of_layers(config, layout)
    if (theirs := class_of(config)) is not None and (apart := attention_apart(theirs, layers)):
        raise UsageError(
            "layers_from_hugging_face",
            "layers whose queries attend to all earlier tokens, or to those of a window or a chunk",
            f"a config of model_type {theirs.model_type!r}: {'; '.join(apart)}",
            "from_hugging_face reads its rotation alone",
        )
    return layers


LONGEST = 2**20
"""Tokens of the longest sequence in which visible keys are compared."""


def attention_apart(config: Any, layers: list[LayerPositions]) -> list[str]:
    """Differences between these layers and attention in a pass of the config's class, a line for each distinct difference."""
    declared = declared_length(config) or MANY
    seen = observe(config, max(TOKENS + 1, min(MANY, declared))).layers
    longest = [min(LONGEST, max(declared, 2 * (layer.window or layer.chunk or 0))) for layer in layers]
    reasons = [observed.not_as(layer, length) for observed, layer, length in zip(seen, layers, longest, strict=True)]
    return by_reason({n: why for n, why in enumerate(reasons) if why}, len(layers))


def positions_of_layers(config: Mapping[str, Any] | Any, layout: Layout) -> list[LayerPositions]:
    """`layers_from_hugging_face` without its check of visible keys: attention may select among them, or add some."""
    check_choice("layers_from_hugging_face", Layout, layout=layout)
    reading = read(config)
    keys = as_mapping(text_part(config) if reading.layers is None else class_of(config))
    if problems := reading.problems():
        raise NotUnderstood("; ".join(problems), not_understood(keys) or ["model_type"])
    for sentence in reading.notes:
        warnings.warn(sentence, stacklevel=2)
    if reading.layers is None:
        return layers_of(keys, layout, reading.ropes)
    rotations = [None if layer is None else layer[:2] for layer in reading.layers]
    layers = layers_of(keys, layout, reading.ropes, rotations, reading.attends)
    if isinstance(size := keys.get("sliding_window"), int):  # of layers whose type is unknown here, its class decides
        known = (FULL, *WINDOWED)
        for n, kind in enumerate(keys.get("layer_types") or ()):
            if kind not in known and layers[n].attends:
                layers[n] = layers[n]._replace(window=observe(class_of(config)).layers[n].window(2 * size))
    return layers
