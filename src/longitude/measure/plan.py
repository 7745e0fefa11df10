"""Plan of a measurement: models with their lengths and texts, as a sequence of units, checked before anything runs."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from longitude import plugins
from longitude.checkpoints import load as checkpoints
from longitude.checkpoints.declared import raw_config, rope_types, trained_length
from longitude.checkpoints.lint import contradictions
from longitude.checkpoints.positions import has_alibi, last_position
from longitude.errors import UsageError
from longitude.hf.stock import KEY
from longitude.measure import retrieval
from longitude.measure.config import (
    PERPLEXITY,
    SAME_TARGETS,
    MeasureConfig,
    check_each_once,
    listed,
    require_consistent,
    with_trained,
)
from longitude.measure.documents import Documents, bos_of, documents_of
from longitude.measure.endpoint import Endpoint, ServerTokenizer
from longitude.measure.sources import Text, read_text
from longitude.measure.text import targets_of
from longitude.measure.transport import address
from longitude.measure.windows import follows_length, memory_to_read, plan_windows
from longitude.runs.costs import H100, WIDEST, Cost, Memory, flops_per_second, forward_flops
from longitude.runs.machine import available_memory, device_of, require_memory
from longitude.runs.store import Unit


class Part(NamedTuple):
    """Part of a model's measurement that is a unit. way: the method of windows, or the depth of a needle, or ""."""

    task: str
    length: int
    way: str


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure.

    Attributes:
        model: Folder or name of the checkpoint.
        label: A short name.
        trained: The length it was trained at, from config.json.
        last: Last position of its table of positions; None without a table.
        positions: Short description of its encoding.
        content: Hash of its files.
        bos: The token that begins its windows of text; None: none does.
        documents: Documents in its tokens.
        needs: Memory that it needs.
    """

    model: str
    label: str
    trained: int | None
    last: int | None
    positions: str
    content: str
    bos: int | None
    documents: Documents | None
    needs: Memory

    def as_json(self) -> dict[str, Any]:
        """Facts of the subject for the run directory."""
        kept = {name: getattr(self, name) for name in ("label", "positions", "trained", "content")}
        return kept | {
            "unit": self.documents.unit if self.documents else None,
            "documents": len(self.documents.ids) if self.documents else None,
        }


CONTENT = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
"""Suffixes of files of a checkpoint that decide its outputs."""


@dataclass(frozen=True)
class MeasurePlan:
    """A measurement that passed every check; nothing is written yet."""

    config: MeasureConfig
    subjects: list[Subject]
    lengths: tuple[int, ...]
    text: Text | None
    device: str
    server: Endpoint | None = None
    tokenizer: Any = None
    """That of a server's model; None for checkpoints."""

    def units(self, subject: Subject) -> dict[Part, Unit]:
        """Every part of a model's measurement, with its unit in the run directory."""
        parts = [
            Part(task, length, way)
            for task in self.config.tasks
            for length in self.lengths
            for way in self._ways(task, length, subject)
        ]
        return {part: self._unit(subject, part) for part in parts}

    def _unit(self, subject: Subject, part: Part) -> Unit:
        config = self.config
        inputs = part._asdict() | {"model": subject.content, "device": self.device}
        inputs |= {name: getattr(config, name) for name in ("dtype", "chunk", "seed")}
        inputs["plugins"] = [plugin.record["sha256"] for plugin in plugins.loaded()]
        if part.task == PERPLEXITY:
            assert subject.documents is not None
            inputs |= {"documents": subject.documents.digest, "bos": subject.bos}
            inputs |= {"batch": config.batch, "by_position": self.by_position(part.length, subject)}
            inputs |= {"stride": config.stride} if part.way == "sliding" else {}
            inputs |= {"targets": self.targets} if part.way == SAME_TARGETS else {}
        else:
            inputs |= {"trials": config.trials, "chat": config.chat, "bos": config.bos}
            inputs |= {"thinking": config.thinking} if self.server else {}
        return Unit(part.task, "-".join(map(str, filter(None, (subject.label, part.length, part.way)))), inputs)

    @property
    def targets(self) -> int:
        """Tokens at the end of each document that same-targets scores, at every length."""
        return self.config.targets or targets_of(self.lengths)

    def _ways(self, task: str, length: int, subject: Subject) -> list[str]:
        if task != PERPLEXITY:
            depths = self.config.depths if retrieval.TASKS[task].depths else ()
            return [f"{depth:g}" for depth in depths] or [""]
        flat = "non-overlapping" in self.config.methods or self.by_position(length, subject)
        return ["non-overlapping"] * flat + [way for way in ("sliding", SAME_TARGETS) if way in self.config.methods]

    def by_position(self, length: int, subject: Subject) -> bool:
        """Whether losses at this length are wanted by position: at the longest that the model has positions for."""
        return "per-position" in self.config.methods and length in self.within(subject)[-1:]

    def within(self, subject: Subject) -> list[int]:
        """The lengths that a model has positions for."""
        return [length for length in self.lengths if subject.last is None or length <= subject.last]


def plan(config: MeasureConfig, models: tuple[str, ...]) -> MeasurePlan:
    """Every check that needs no weights: options, folders, tokenizers, text, memory. ValueError for the user."""
    require_consistent(config)
    at_a_depth = [name for name, task in retrieval.TASKS.items() if task.depths]
    if config.depths != MeasureConfig.depths and not {*config.tasks} & {*at_a_depth}:
        raise UsageError("--depths", f"one of {listed(at_a_depth)} among --tasks", listed(config.tasks), "leave it out")
    if config.endpoint is not None:
        return _served(config, models)
    # one spelling of a folder: "models/llama/" is "models/llama"
    models = tuple(str(Path(model)) if model and Path(model).expanduser().is_dir() else model for model in models)
    check_each_once("the models", models)
    device, text = device_of(config.device).type, _text(config)
    read: dict[str, Documents] = {}
    labels = _labels(models)
    subjects = [_subject(config, model, labels[model], text, device, read) for model in models]
    lengths = _lengths(config, [subject.trained for subject in subjects])
    return MeasurePlan(config, subjects, lengths, text, device)


def _lengths(config: MeasureConfig, trained: list[int | None]) -> tuple[int, ...]:
    """All lengths to measure. UsageError for one that is shorter than the targets that every length scores."""
    lengths = tuple(with_trained(config.lengths, trained if config.trained else []))
    if config.targets is not None and config.targets > lengths[0]:
        expected = f"at most {lengths[0]}, the length that a model was trained at"
        raise UsageError("--targets", expected, config.targets, "add --no-trained to leave that length out")
    return lengths


def _text(config: MeasureConfig) -> Text | None:
    """The text for perplexity, if that is measured."""
    text = read_text(config.text, "--text") if PERPLEXITY in config.tasks else None
    if text is not None and not any(content for _, content in text.documents):
        raise ValueError(f"--text {config.text}: the text is empty; give a text with something to read")
    return text


def _served(config: MeasureConfig, models: tuple[str, ...]) -> MeasurePlan:
    """The plan for a model on a server, which is asked once. UsageError if it cannot be measured."""
    assert config.endpoint is not None and config.model is not None
    if models:
        raise UsageError("--endpoint", "--model NAME alone, which the server has", f"MODEL {models[0]}", "leave it out")
    server = Endpoint(address(config.endpoint), config.model, config.concurrency, config.thinking, config.chat)
    text, trained, asks = _text(config), None, {*config.tasks} != {PERPLEXITY}
    if config.tokenizer is None and text is not None:
        remedy = "name the folder of the model or of its tokenizer, or other --tasks than perplexity"
        raise UsageError("--endpoint", "--tokenizer FOLDER, to cut text into the model's tokens", "none", remedy)
    tokenizer, trained = tokenizer_for(server, config.tokenizer)
    bos = bos_of(tokenizer, config.bos)
    _require_prompts(config, tokenizer, None)
    documents = None if text is None else _documents(config, tokenizer, text, {})
    server = server.checked(documents and documents.ids[0][:8].tolist(), bos, tokenizer, asks)
    content = hashlib.sha256(f"{server.url} {server.model}".encode()).hexdigest()
    label = Path(config.model).name or config.model
    subject = Subject(config.model, label, trained, None, "on a server", content, bos, documents, Memory(0, 0, 0, 0))
    return MeasurePlan(config, [subject], _lengths(config, [trained]), text, "server", server, tokenizer)


def tokenizer_for(server: Endpoint, name: str | None) -> tuple[Any, int | None]:
    """(the tokenizer of a folder or a hub name, its model's training length if known); None: the server's own routes."""
    if name is None:
        return ServerTokenizer(server), None
    folder = Path(name).expanduser()
    alone = folder.is_dir() and not (folder / "config.json").is_file()
    about = PreTrainedConfig() if alone else checkpoints.config_of(name)
    return checkpoints.tokenizer_of(name, about), trained_length(about)


def _require_prompts(options: MeasureConfig, tokenizer: Any, last: int | None) -> None:
    """ValueError unless each task of retrieval has a prompt at some length."""
    how: dict[str, Any] = {name: getattr(options, name) for name in ("lengths", "trials", "seed", "chat", "bos")}
    for task in options.tasks:
        if task != PERPLEXITY:
            depths = options.depths if retrieval.TASKS[task].depths else None
            retrieval.plan(task, depths=depths, **how).require_prompt(tokenizer, last)


def _subject(
    options: MeasureConfig, model: str, label: str, text: Text | None, device: str, read: dict[str, Documents]
) -> Subject:
    config, folder = checkpoints.config_of(model), checkpoints.local_folder(model)
    if folder is not None:
        checkpoints.require_shards(folder)
    tokenizer = checkpoints.tokenizer_of(model, config)
    outline = outline_of(model, config)
    needs, what = memory_of(options, outline), f"{model}: --lengths {options.lengths[-1]} takes"
    smaller = "take shorter --lengths, a smaller --chunk or --batch, or --dtype bfloat16"
    require_memory(needs.total, available_memory(device), what, smaller)
    if folder is not None and all(getattr(config, key, None) is None for key in (KEY, "quantization_config")):
        checkpoints.held_against(model, *checkpoints.loaded_on_meta(str(folder), outline))
    last = last_position(outline)
    try:
        bos = bos_of(tokenizer, options.bos)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    _require_prompts(options, tokenizer, last)
    documents = None if text is None else _documents(options, tokenizer, text, read)
    highest = max(int(ids.max()) for ids in documents.ids) if documents else 0
    if highest >= (size := config.get_text_config().vocab_size):
        raise ValueError(
            f"{model}: its tokenizer gives token {highest}, and the model has {size}; they are not of the same checkpoint"
        )
    return Subject(
        model,
        label,
        trained=trained_length(config),
        last=last,
        positions=_positions(config, last),
        content=_content(model),
        bos=bos,
        documents=documents,
        needs=needs,
    )


def _documents(options: MeasureConfig, tokenizer: Any, text: Text, read: dict[str, Documents]) -> Documents:
    """The text in a tokenizer's tokens; read: documents that are known already, by tokenizer."""
    alphabet = json.dumps([tokenizer.get_vocab(), str(type(tokenizer)), getattr(tokenizer, "name_or_path", "")])
    if alphabet not in read:
        read[alphabet] = documents_of(text, tokenizer, options.lengths[-1], options.documents)
    return read[alphabet]


def outline_of(model: str, config: Any) -> Any:
    """The model without weights. ValueError unless it is causal, and for contradictions or wrong keys in config.json."""
    checkpoints.require_causal(model, config)
    folder = Path(model).expanduser()
    if folder.is_dir() and getattr(config, KEY, None) is None:  # else its rotary parameters are a mark, no values
        raw = raw_config(folder)
        one_schema = not (raw.get("rope_parameters") and raw.get("rope_scaling"))
        for contradiction in contradictions(raw, config):
            # A base that only the model's class has, or a key that it never had: published files have them.
            published = (one_schema and contradiction.startswith("expected rope_theta")) or (
                contradiction.startswith("unknown key") and "did you mean" not in contradiction
            )
            if not published:
                raise ValueError(f"{model}: config.json: {contradiction}")
    return checkpoints.built_without_weights(model, config)


def memory_of(config: MeasureConfig, outline: Any) -> Memory:
    """Memory that a model needs at the longest length."""
    longest = config.lengths[-1]
    chunk = longest if follows_length(outline) is not None else config.chunk
    return memory_to_read(outline, dtype_of(config, outline), longest, config.batch, chunk)


def dtype_of(config: MeasureConfig, outline: Any) -> torch.dtype:
    """The dtype that a model is loaded in."""
    return getattr(torch, config.dtype) if config.dtype else outline.config.dtype or torch.float32


def _positions(config: Any, last: int | None) -> str:
    """The position encoding in a few words, from the configuration."""
    if config.model_type == "longitude" or hasattr(config, KEY):
        saved = getattr(config, KEY, None)
        layers = saved["layers"] if isinstance(saved, dict) else config.layer_specs() if saved is None else [saved]
        parts = [layer if isinstance(layer, list) else [layer] for layer in layers]
        names = ["+".join(str(part["name"] if isinstance(part, dict) else part) for part in layer) for layer in parts]
        return "/".join(dict.fromkeys(names))
    if kinds := dict.fromkeys(rope_types(config)):
        return "rope" + "".join(f" {kind}" for kind in kinds if kind != "default")
    return "learned" if last is not None else "alibi" if has_alibi(config) else config.model_type


def _labels(models: tuple[str, ...]) -> dict[str, str]:
    """A short name for each: the last part of its path, and more of it if two would be called the same."""
    for parts in range(1, 9):
        labels = {model: "/".join(Path(model).parts[-parts:]) for model in models}
        if len(set(labels.values())) == len(models):
            return labels
    return {model: model for model in models}


def _content(model: str) -> str:
    """A hash of all files of a checkpoint; of a name on the hub, of the name."""
    digest, folder = hashlib.sha256(model.encode()), Path(model).expanduser()
    if folder.is_dir():
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in CONTENT:
                with open(path, "rb") as file:
                    digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# ---- what it takes ---------------------------------------------------------------------------------------------------
def costs(
    config: MeasureConfig, models: tuple[str, ...], on_progress: Callable[[str, float, float], object] = lambda *_: None
) -> list[Cost]:
    """The cost of every model at every length. Needs only config.json: no weights, tokenizer or text.

    Args:
        config: The measurement; perplexity counts the maximum number of documents, retrieval its prompts.
        models: Folders or names.
        on_progress: Called before each timing with a description, the number of finished models, and the number of models.

    Raises:
        ValueError: For options or a config.json for which `measure` also raises it, and for a class whose FLOPs cannot be
            counted.
    """
    require_consistent(config)
    estimates = []
    outlines = {model: outline_of(model, checkpoints.config_of(model)) for model in models}
    trained = [trained_length(outline.config) for outline in outlines.values() if config.trained]
    lengths = with_trained(config.lengths, trained)
    for i, (model, outline) in enumerate(outlines.items()):
        flops, memory, rate, reason = forward_flops(outline), memory_of(config, outline), None, ""
        rows = max(1, config.batch // lengths[-1])
        width = min(lengths[-1], WIDEST, last_position(outline) or WIDEST)
        on_progress(f"timing a few layers of {model}, {rows} windows of {width} tokens", i, len(models))
        try:  # once for all lengths, so that noise makes no shorter one slower
            rate = flops_per_second(outline, width, rows, dtype_of(config, outline))
        except ValueError as error:
            reason = str(error)
        for length in lengths:
            windows = _windows(config, length)
            work = windows * flops.of(length)
            estimates.append(
                Cost(
                    model=model,
                    part="measuring",
                    length=length,
                    tokens=round(windows * length),
                    flops=work,
                    memory=memory,
                    seconds=None if rate is None else work / rate,
                    h100_seconds=work / H100,
                    reason=reason,
                )
            )
    return estimates


def _windows(config: MeasureConfig, length: int) -> float:
    """Number of windows of a length for perplexity, plus the number of prompts of all other tasks."""
    prompts = [len(config.depths) if retrieval.TASKS[task].depths else 1 for task in config.tasks if task != PERPLEXITY]
    windows = float(config.trials * sum(prompts))
    if PERPLEXITY in config.tasks:
        longest, documents = config.lengths[-1], config.documents
        if "sliding" in config.methods:
            planned = plan_windows([longest] * documents, length, config.stride or max(1, length // 2))
            windows += sum(map(len, planned.values()))
        if {"non-overlapping", "per-position"} & {*config.methods}:
            windows += documents * longest / length
        windows += documents * (SAME_TARGETS in config.methods)
    return windows
