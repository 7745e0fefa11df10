"""What a study can train its models to do: the tasks by name, with their own defaults, and words for their numbers.

Importing this loads neither torch nor numpy; what a task does is in the module that `Task.work` names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from longitude.errors import unknown

if TYPE_CHECKING:
    from longitude.study.config import StudyConfig
    from longitude.study.work import TaskRunner

GENERATED = "generated"
"""--data of tasks whose examples are drawn, not read."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a study.

    kind: "losses", less is better, or "answers", right or wrong; it chooses statistics, figures and the words of the page.
    metric: of the rows that a conclusion is drawn from, in `words` for readers. unit: of lengths; loss_unit: of a target,
    for training losses. positions: of a length, how many a model needs. methods: ways to measure. model: what is trained,
    in words. source: where the task's `Work` is, module and class. defaults: options whose default is not that of text.
    """

    name: str
    summary: str
    kind: str
    metric: str
    words: str
    unit: str
    loss_unit: str
    methods: tuple[str, ...]
    model: str
    source: str
    positions: Callable[[int], int] = lambda length: length
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generated(self) -> bool:
        """Whether its examples are drawn from a seed; else it reads --data."""
        return self.defaults.get("data") == GENERATED

    @property
    def work(self) -> "TaskRunner":
        """What it does."""
        module, _, name = self.source.partition(":")
        return getattr(import_module(f"longitude.study.{module}"), name)(self)

    def measured_tokens(self, config: "StudyConfig") -> int:
        """Work of measuring a model, in tokens read."""
        if self.kind == "answers":  # each token of an answer is a pass of its own
            return DECODING * config.documents * sum(config.test_lengths)
        return config.documents * config.longest * len(config.test_lengths) * (3 if "sliding" in config.methods else 1)


DECODING = 6
"""Work of a generated token, in tokens read at once."""

SEQUENCES: dict[str, Any] = {
    "data": GENERATED,
    "encodings": ("sinusoidal", "rope", "alibi:future=one-sided"),
    "train_length": 16,
    "test_lengths": (8, 16, 18, 20, 24, 32),
    "methods": ("greedy",),
    "batch_size": 64,
    "layers": 2,
    "hidden": 64,
    "documents": 200,
    "steps": 1500,
    "learning_rate": 4e-3,
}


def _sequences(
    name: str,
    summary: str,
    unit: str = "symbols",
    positions: Callable[[int], int] = lambda length: length + 1,  # and the end
    **defaults: Any,
) -> Task:
    return Task(
        name=name,
        summary=summary,
        kind="answers",
        metric="exact_match",
        words="exact answers",
        unit=unit,
        loss_unit="symbol",
        methods=("greedy",),
        model="encoder-decoder",
        source=f"sequences:{name.title()}",
        positions=positions,
        defaults=SEQUENCES | defaults,
    )


_ALL = (
    Task(
        name="text",
        summary="the next byte of a text, from those before it",
        kind="losses",
        metric="bits_per_byte",
        words="bits per byte",
        unit="bytes",
        loss_unit="byte",
        methods=("non-overlapping", "sliding", "per-position"),
        model="decoder",
        source="text:Text",
    ),
    Task(
        name="masked",
        summary="bytes of a text that are masked, from those on both sides",
        kind="losses",
        metric="bits_per_masked_byte",
        words="bits per masked byte",
        unit="bytes",
        loss_unit="masked byte",
        methods=("non-overlapping",),
        model="encoder",
        source="masked:Masked",
        defaults={
            "methods": ("non-overlapping",),
            "encodings": ("sinusoidal", "rope", "alibi", "t5"),
            "train_length": 128,
            "test_lengths": (128, 256, 512, 1024),
            "batch_size": 16,
            "layers": 2,
            "steps": 800,
        },
    ),
    _sequences("copy", "a word of letters, said again"),
    _sequences("reverse", "a word of letters, said from its end"),
    _sequences("sort", "the letters of a word in the order of the alphabet"),
    _sequences(
        "add",
        "the sum of two numbers, least digit first",
        unit="digits",
        positions=lambda length: 2 * length + 1,  # two numbers, and the end
        train_length=6,
        test_lengths=(3, 6, 7, 8, 9, 12),
        steps=2000,
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def task_of(name: str) -> Task:
    """ValueError with the nearest name for one that nobody knows."""
    if name not in TASKS:
        raise unknown("task of --task", name, TASKS, "`longitude study --help` explains them.")
    return TASKS[name]
