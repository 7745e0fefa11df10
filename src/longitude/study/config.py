"""The options of a study and their defaults. Importing this loads neither torch nor transformers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from longitude.errors import UsageError, Within, check_bounds, unknown
from longitude.measure.config import check_ascending, check_each_once, listed
from longitude.runs.machine import Device

Positions = Literal["contiguous", "randomized", "skipped", "shifted", "mixed"]
RANGED = ("randomized", "skipped", "shifted")
"""Positions that are drawn from a range."""
Precision = Literal["float32", "bfloat16"]
GENERATED = "generated"
"""--data of tasks with drawn examples."""
BYTE = "byte"
"""--tokenizer of models that read bytes."""
SIZES = ("layers", "hidden")
"""Options that older studies have as a list of one number."""
NEWER = ("precision",)
"""Options that kept studies may lack, because they are older; their defaults are what these studies did."""
FORMER = {
    "split_length": None, "accumulation": None, "train_lengths": None, "match": ("steps",), "block": ("default",),
}  # fmt: skip
"""Options of older studies that are gone, with the values that this version can read; None: any."""


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
        positions: Positions of a training window: contiguous, randomized (a sorted subset of a longer range), skipped
            (two runs, with a gap before the second) or shifted (all by one offset). With mixed, of --task text, each window is
            cut into 1, 2, 4 or 8 documents. Measuring always uses contiguous positions.
        position_range: Number of positions, from 0, that randomized, skipped and shifted draw from; by default the longest
            length of the study.
        start: Trained models to start from, with the same seeds: RUN, or RUN:LABEL if that study has several labels. RUN is a
            folder with a study, or the name of one next to this study's folder. The learning rate starts again with a
            warm-up.
        test_lengths: Lengths to measure at, ascending: of windows in bytes, of examples in symbols or digits.
        steps: Optimizer steps of every model.
        seeds: One model per encoding and seed; a seed decides the initial weights and the order of the text.
        batch_size: Windows or examples per step.
        precision: Data type of training: float32, or on a GPU bfloat16 for matrix products. Weights stay float32, and so does
            measuring.
        learning_rates: Peak of the schedule: linear warm-up, then a cosine down to zero. With several, each label uses the one
            with the lowest loss of its first seed at the training length, on text held out for this choice alone. The other
            seeds are trained at that rate.
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: Weight decay of AdamW, for matrices only: vectors, norms, tables and rates do not decay.
        layers: Transformer blocks.
        hidden: Width of the model.
        heads: Attention heads; the width must be a multiple of them.
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
    positions: Positions = "contiguous"
    position_range: int | None = None
    start: str | None = None
    test_lengths: tuple[int, ...] = (64, 256, 1024)
    steps: Annotated[int, Within(1)] = 800
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: Annotated[int, Within(1)] = 8
    precision: Precision = "float32"
    learning_rates: tuple[float, ...] = (5e-3,)
    warmup: float = 0.1
    weight_decay: Annotated[float, Within(0)] = 0.1
    layers: Annotated[int, Within(1)] = 2
    hidden: Annotated[int, Within(1)] = 128
    heads: Annotated[int, Within(1)] = 4
    documents: Annotated[int, Within(1)] = 24
    methods: tuple[str, ...] = ("non-overlapping", "per-position")
    stride: int | None = None
    device: Device = "auto"
    threads: Annotated[int, Within(1)] = 1

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "StudyConfig":
        """The configuration in a question.json; options of `NEWER` that are not in it have their defaults.

        Raises:
            ValueError: An option that no release had, that is gone, or that is missing; a value of another type or out of its
                range; several sizes or training lengths, which older releases had in one study.
        """
        import msgspec  # this module is loaded for every help text

        if saved.get("train_lengths"):
            raise UsageError("train_lengths", "a study of one training length", listed(saved["train_lengths"]))
        for name, known in FORMER.items():
            if known is not None and saved.get(name, known[0]) not in known:
                raise UsageError(
                    name, f"{known[0]} of a kept study", saved[name], "this version can neither read nor run it"
                )
        saved = {name: value for name, value in saved.items() if name not in FORMER}
        saved |= {name: saved[name][0] for name in SIZES if isinstance(saved.get(name), list) and len(saved[name]) == 1}
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
    check_ascending("--test-lengths", config.test_lengths, 1)
    for name in ("seeds", "learning_rates", "methods", "encodings", "data"):
        check_each_once(option(name), getattr(config, name))


def with_all(labels: tuple[str, ...], every: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """The encodings that --encodings names, "all" resolved."""
    return tuple(name for label in labels for name in (every() if label == "all" else (label,)))
