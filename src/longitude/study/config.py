"""What a study is: its options, their defaults, and their checks. Importing this loads neither torch nor transformers."""

from collections import Counter
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from longitude.errors import unknown
from longitude.study.labels import (
    parse_encoding as parse_encoding,
    parse_label,
    parse_options as parse_options,
    safe as safe,
)
from longitude.study.tasks import GENERATED, task_of

DEVICES = ("auto", "cpu", "cuda", "mps")
POSITIONS = ("contiguous", "randomized", "skipped")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """One study: the same small model with each encoding and seed, trained on the same tokens, measured at each length.

    The defaults are the main job: about five minutes on two cores. `of_task` has those of the other tasks.
    """

    task: str = "text"
    """What the models learn: text (decoders: the next byte), masked (encoders: masked bytes), or, exactly, by an
    encoder-decoder: copy, reverse, sort (letters), add (numbers). Each has defaults of its own: --task reverse --help."""
    encodings: tuple[str, ...] = ("none", "sinusoidal", "rope", "alibi", "t5")
    """Models to compare: encodings (see `longitude list`), variants such as "rope:base=500000", compositions such as
    rope+fox, or "all" that have a meaning for the task's models; with other mixers than attention: rope+window:size=64,
    mamba, rope+attention+mamba (in turns over the layers)."""
    data: str = "stdlib"
    """Text to train on: "stdlib" (the sources of Python's standard library), a file, a folder, or "datasets:NAME" or
    "datasets:NAME:CONFIG" from the Hugging Face hub; "generated" for tasks that need none."""
    train_length: int = 256
    """Bytes per training window; of generated tasks the most symbols of a training example (digits of a number)."""
    positions: str = "contiguous"
    """Positions of a training window: contiguous, randomized (a sorted subset of a longer range) or skipped (two runs, the
    second moved on). Measuring is contiguous always."""
    position_range: int | None = None
    """Positions that randomized and skipped draw from, 0 to below it; by default the longest length of the study."""
    test_lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Lengths to measure at, ascending: of windows in bytes, of examples in symbols or digits."""
    steps: int = 260
    """Optimizer steps of every model."""
    seeds: tuple[int, ...] = (0,)
    """One model per encoding and seed; a seed decides the initial weights and the order of the text."""
    batch_size: int = 8
    """Windows or examples per step."""
    learning_rate: float = 4e-3
    """Peak of the schedule: linear warm-up, then a cosine down to zero."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """Weight decay of AdamW, of matrices only: vectors, norms, tables and rates keep their size."""
    layers: int = 4
    """Transformer blocks; an encoder-decoder has so many of each."""
    hidden: int = 128
    """Width of the model."""
    heads: int = 4
    """Attention heads; they divide the width."""
    documents: int = 20
    """Validation documents to measure on, at most; fewer documents give longer excerpts each. Of generated tasks: examples of
    each length."""
    methods: tuple[str, ...] = ("non-overlapping", "per-position")
    """Ways to measure: non-overlapping, sliding, per-position; generated tasks: greedy."""
    stride: int | None = None
    """Step of sliding windows in bytes, at most the shortest test length; by default half of each window."""
    device: str = "auto"
    """auto, cpu, cuda or mps; auto is an accelerator where there is one. Only the CPU repeats results bit by bit."""

    @property
    def longest(self) -> int:
        """The longest window or example of the study."""
        return max(self.train_length, *self.test_lengths)

    @property
    def train_positions(self) -> str:
        """The sampler of training positions in words: contiguous, or randomized(max_length=4096)."""
        return self.positions + (f"(max_length={self.position_range})" if self.position_range is not None else "")

    @property
    def training_tokens(self) -> int:
        """Targets that every model is trained on."""
        return self.steps * self.batch_size * self.train_length


def checked(config: StudyConfig) -> StudyConfig:
    """The configuration with "all" spelled out, after every check that needs neither the text nor a model.

    Raises ValueError: what was expected, what came, what to do.
    """
    task = task_of(config.task)
    for name in ("train_length", "steps", "batch_size", "layers", "hidden", "heads", "documents"):
        least = 2 if name == "train_length" else 1
        if getattr(config, name) < least:
            raise ValueError(f"{option(name)} must be at least {least}, got {getattr(config, name)}")
    if config.hidden % config.heads:
        raise ValueError(f"--heads must divide --hidden, got {config.heads} heads for a width of {config.hidden}")
    lengths = config.test_lengths
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--test-lengths must be positive numbers of {task.unit}, got {_words(lengths)}")
    if any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"--test-lengths must ascend without repeats, got {_words(lengths)}; sort them")
    if not config.seeds or min(config.seeds) < 0 or max(config.seeds) >= 2**32:
        raise ValueError(f"--seeds must be numbers from 0 to 2^32 - 1, got {_words(config.seeds)}")
    _once("--seeds", config.seeds)
    if not 0 < config.learning_rate < float("inf"):
        raise ValueError(f"--learning-rate must be above 0, got {config.learning_rate}")
    if not 0 <= config.warmup < 1:
        raise ValueError(f"--warmup must be a share of the steps from 0 to below 1, got {config.warmup}")
    if not 0 <= config.weight_decay < float("inf"):
        raise ValueError(f"--weight-decay must be 0 or more, got {config.weight_decay}")
    if not config.methods:
        raise ValueError(f"--methods must name at least one of {_words(task.methods)}")
    for method in config.methods:
        if method not in task.methods:
            raise unknown("method", method, task.methods, "`longitude study --help` explains them.")
    _once("--methods", config.methods)
    if config.stride is not None:
        if "sliding" not in config.methods:
            raise ValueError("--stride is of sliding windows; add sliding to --methods, or leave --stride out")
        if not 1 <= config.stride <= lengths[0]:
            raise ValueError(f"--stride must be 1 to the shortest test length {lengths[0]}, got {config.stride}")
    if task.generated != (config.data == GENERATED):
        expected = "generated" if task.generated else "a text"
        raise ValueError(f"--data of --task {task.name} must be {expected}, got {config.data}; leave it out")
    config = _with_range(config)
    if config.device not in DEVICES:
        raise ValueError(
            f"--device must be one of {_words(DEVICES)}, got {config.device}; where there are several GPUs, "
            f"CUDA_VISIBLE_DEVICES chooses one"
        )
    return _with_encodings(config)


def _with_range(config: StudyConfig) -> StudyConfig:
    """The range of positions spelled out, where a sampler draws from one."""
    if config.positions not in POSITIONS:
        raise unknown("sampler of --positions", config.positions, POSITIONS, "`longitude list` explains them.")
    if config.positions == "contiguous":
        if config.position_range is not None:
            raise ValueError(
                "--position-range is what randomized and skipped draw from, and --positions is contiguous; leave it out"
            )
        return config
    task = task_of(config.task)
    if config.position_range is None:
        return replaced(config, position_range=task.positions(config.longest))
    if config.position_range < (needed := task.positions(config.train_length)):
        positions = "" if needed == config.train_length else f" with its {needed} positions"
        raise ValueError(
            f"--position-range must be at least the training length {config.train_length}{positions}, got "
            f"{config.position_range}"
        )
    return config


def _with_encodings(config: StudyConfig) -> StudyConfig:
    if not config.encodings:
        raise ValueError("--encodings must name at least one encoding; `longitude list` shows them")
    if "all" in config.encodings:
        if len(config.encodings) > 1:
            raise ValueError(f"--encodings is either all or a list of names, got {_words(config.encodings)}")
        config = replaced(config, encodings=_all(bidirectional=task_of(config.task).model != "decoder"))
    for label in config.encodings:
        parse_label(label)
    _once("--encodings", config.encodings)
    _once("--encodings, as names of folders,", [safe(label).lower() for label in config.encodings])
    return config


def _all(bidirectional: bool) -> tuple[str, ...]:
    """Every registered encoding; for encoders, which hear both sides, those with a meaning for the future."""
    from longitude.positions.base import ENCODINGS, list_encodings

    able = [name for name in list_encodings() if not (bidirectional and getattr(ENCODINGS[name], "causal_only", False))]
    return tuple(able)


def of_task(name: str, **options: Any) -> StudyConfig:
    """A study of this task, with its defaults for what is not said. ValueError for an unknown task, with the nearest."""
    return StudyConfig(**{"task": name, **task_of(name).defaults, **options})


def replaced(config: StudyConfig, **changes: Any) -> StudyConfig:
    """The same study with some options changed."""
    return StudyConfig(**(as_dict(config) | changes))


def as_dict(config: StudyConfig) -> dict[str, Any]:
    """Option -> value, in the order of the fields."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def option(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def _once(what: str, values: Any) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"{what} must each be named once, got {twice[0]} twice")


def _words(values: Any) -> str:
    return " ".join(str(value) for value in values) or "none"
