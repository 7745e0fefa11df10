"""The options of a study and their defaults. Importing this loads neither torch nor transformers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

from longitude.errors import UsageError, Within, check_bounds, unknown
from longitude.measure.config import check_ascending, check_each_once
from longitude.runs.device import Device

Positions = Literal["contiguous", "randomized", "skipped", "mixed"]
RANGED = ("randomized", "skipped")
"""Positions that are drawn from a range."""
Match = Literal["steps", "compute"]
Block = Literal["default", "llama", "qwen3", "gemma3", "inkling", "deepseek"]
Precision = Literal["float32", "bfloat16"]
GENERATED = "generated"
"""--data of tasks with drawn examples."""
BYTE = "byte"
"""--tokenizer of models that read bytes."""
SIZES = ("layers", "hidden")
"""Options that also accept one number for a list of one."""
NEWER = ("block", "precision", "train_lengths")
"""Options that kept studies may lack, because they are older; their defaults are what these studies did."""
FORMER = ("split_length", "accumulation")
"""Options of older studies, which changed no result that is kept; ignored when a question.json is read."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """One study: the same small model with each encoding and seed, trained on the same tokens, measured at each length.

    The defaults are those of --task text: about five minutes on two cores. `of_task` in study/tasks has those of other tasks.
    The base of rope fits the training length: about as many pairs as in Llama 2 never complete a turn within it.

    Args:
        task: What the models learn: text (the next byte), or an exact answer: addition-reversed, copy-decoder, flip-flop,
            lookback, parity, passkey, recall. Each has other defaults: --task recall --help. More are in examples/tasks.py,
            for --plugin.
        encodings: Models to compare. Encodings (see `longitude list`), variants such as "rope:base=500000", compositions
            such as rope+fox, or "all" that are defined for the task's models. With other mixers than attention:
            rope+window:size=64, mamba, rope+attention+mamba (alternating layers). With a short causal convolution: nope+conv.
            For losses, add a blind control, such as alibi+window:size=16: an encoding with a window of at most a quarter of
            --train-length. Verdicts need it.
        data: Text to train on, one or several files or folders. "stdlib" is the sources of Python's standard library, and
            "package:NAME" those of an installed package, such as package:torch. "datasets:NAME" and "datasets:NAME:CONFIG" are
            from the Hugging Face hub. Tasks that need no text have "generated".
        tokenizer: With --task text: byte, a tokenizer.json, a folder with a tokenizer, or a name on the hub. Lengths are
            then in tokens; the metric stays bits per byte.
        train_length: Bytes (or tokens) of a training window; for generated tasks the maximum symbols of an example (digits of
            a number).
        train_lengths: Train every model at each of these lengths, on equally many tokens and steps. The first replaces
            --train-length. The others must be test lengths; they show what training at the tested length reaches.
        positions: Positions of a training window: contiguous, randomized (a sorted subset of a longer range) or skipped
            (two runs, with a gap before the second). With mixed, of --task text, each window is cut into 1, 2, 4 or 8
            documents. Measuring always uses contiguous positions.
        position_range: Number of positions, from 0, that randomized and skipped draw from; by default the longest length of
            the study.
        start: Trained models to start from, with the same seeds: RUN, or RUN:LABEL if that study has several labels. RUN is a
            folder with a study, or the name of one next to this study's folder. The learning rate starts again with a
            warm-up.
        test_lengths: Lengths to measure at, ascending: of windows in bytes, of examples in symbols or digits.
        steps: Optimizer steps of every model; with --match compute those of attention without an encoding.
        match: What is equal for all models: steps, or compute (training FLOPs). With compute, each model takes as many steps
            as cost the FLOPs of --steps steps of attention without an encoding, at the first size and training length.
        seeds: One model per encoding and seed; a seed decides the initial weights and the order of the text.
        batch_size: Windows or examples per step, at the first training length; at another one as many as give equal tokens.
        precision: Data type of training: float32, or on a GPU bfloat16 for matrix products. Weights stay float32, and so does
            measuring.
        learning_rates: Peak of the schedule: linear warm-up, then a cosine down to zero. With several, each label uses the one
            with the lowest loss of its first seed at the training length, on text held out for this choice alone. The other
            seeds are trained at that rate.
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: Weight decay of AdamW, for matrices only: vectors, norms, tables and rates do not decay.
        layers: Transformer blocks. Several numbers train every model with each of them.
        hidden: Width of the model. Several numbers train every model at each of them, with --layers at every pair.
        heads: Attention heads at the first width, which must be a multiple of them; at another width heads have the same size.
        block: Block of every model: Longitude's (default), or that of a family, with its norms, activation, grouped heads,
            QK-norm, convolutions or latent attention. Set windows and layers without rotation in --encodings.
        documents: Held-out documents to measure on, each in about four of the longest windows; fewer if the text has fewer.
            For generated tasks: examples of each length.
        methods: Ways to measure, those of the task. For text: non-overlapping, sliding, per-position. Also copies: losses on
            bytes that a copy within the training length predicts, and on bytes that a farther copy predicts. Also
            linear, ntk, ntk-by-parts, dynamic, llama3, yarn, longrope, and schemes of plugins: they extend the trained models
            to each longer length.
            `longitude study --task NAME --help` has those of other tasks.
        stride: Step of sliding windows in bytes, at most the shortest test length; by default half of each window.
        device: auto, cpu, cuda or mps; auto uses a GPU if there is one. Only the CPU repeats results bit by bit.
        threads: CPU threads of each model. Results depend on this number, but not on how many models run in parallel.
    """

    task: str = "text"
    encodings: tuple[str, ...] = (
        "sinusoidal",
        "rope:base=27",
        "rope:base=27+attention:qk_norm=true",
        "alibi",
        "t5:max_distance=32",
        "alibi+window:size=16",
    )
    data: tuple[str, ...] = ("stdlib",)
    tokenizer: str = BYTE
    train_length: Annotated[int, Within(2)] = 64
    train_lengths: tuple[int, ...] = ()
    positions: Positions = "contiguous"
    position_range: int | None = None
    start: str | None = None
    test_lengths: tuple[int, ...] = (64, 256, 1024)
    steps: Annotated[int, Within(1)] = 800
    match: Match = "steps"
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: Annotated[int, Within(1)] = 8
    precision: Precision = "float32"
    learning_rates: tuple[float, ...] = (5e-3,)
    warmup: float = 0.1
    weight_decay: Annotated[float, Within(0)] = 0.1
    layers: tuple[int, ...] = (2,)
    hidden: tuple[int, ...] = (128,)
    heads: Annotated[int, Within(1)] = 4
    block: Block = "default"
    documents: Annotated[int, Within(1)] = 24
    methods: tuple[str, ...] = ("non-overlapping", "per-position")
    stride: int | None = None
    device: Device = "auto"
    threads: Annotated[int, Within(1)] = 1

    def __post_init__(self):
        for name in SIZES:
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, (value,))

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "StudyConfig":
        """The configuration in a question.json; options of `NEWER` that are not in it have their defaults.

        Raises:
            ValueError: An option that no release had, or that is missing; a value of another type or out of its range.
        """
        import msgspec  # this module is loaded for every help text

        saved = {name: value for name, value in saved.items() if name not in FORMER}
        saved |= {name: [saved[name]] for name in SIZES if type(saved.get(name)) is int}
        if lacks := [name for name in cls.__dataclass_fields__ if name not in saved and name not in NEWER]:
            raise UsageError("the configuration", "every option of a study", f"none for {lacks[0]}")
        if foreign := [name for name in saved if name not in cls.__dataclass_fields__]:
            raise unknown("option", foreign[0], cls.__dataclass_fields__, "they are those of `longitude study --help`.")
        try:
            config = msgspec.convert(saved, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"the configuration, as $: {error}") from None
        require_numbers(config)
        return config

    @property
    def width(self) -> int:
        """The first width."""
        return self.hidden[0]

    @property
    def depth(self) -> int:
        """The first number of layers."""
        return self.layers[0]

    @property
    def size(self) -> str:
        """Width and layers in words: 64 x 2."""
        return f"{self.width} x {self.depth}"

    @property
    def parts(self) -> list["StudyConfig"]:
        """One study per size and training length, the first of both first. All have equally many tokens per step."""
        return [
            replace(
                self, layers=(layers,), hidden=(hidden,), heads=self.heads * hidden // self.width, train_length=length,
                train_lengths=(), batch_size=self.batch_size * self.train_length // length,
            )
            for layers, hidden in product(self.layers, self.hidden)
            for length in self.train_lengths or (self.train_length,)
        ]  # fmt: skip

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
        """Targets that a model of `steps` steps is trained on."""
        return self.steps * self.batch_size * self.train_length


# ---- checks of options -----------------------------------------------------------------------------------------------
def option(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def require_numbers(config: StudyConfig) -> None:
    """ValueError for a number or a list out of range, whatever the task is."""
    check_bounds(config)
    for name in (*SIZES, *(["train_lengths"] if config.train_lengths else []), "test_lengths"):
        check_ascending(option(name), getattr(config, name), 1)
    for name in ("seeds", "learning_rates", "methods", "encodings", "data"):
        check_each_once(option(name), getattr(config, name))


def with_all(labels: tuple[str, ...], every: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """The encodings that --encodings names, "all" resolved."""
    return tuple(name for label in labels for name in (every() if label == "all" else (label,)))
