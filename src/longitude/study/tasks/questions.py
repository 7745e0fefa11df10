"""Tasks of questions: a decoder reads one sequence of symbols, and answers some of them with a symbol, right or wrong.

Examples are exact, need no file, and are the same on every machine: training examples depend on the seed and the step, test
examples on the length alone. An answer is scored given the right symbols before it, in one pass. If a whole answer is right in
this way, greedy decoding gives the same answer.
"""

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from longitude.measure.rows import Row
from longitude.measure.windows import evaluating
from longitude.positions.samplers import Sampler
from longitude.statistics import proportions
from longitude.study.config import GENERATED, StudyConfig
from longitude.study.data import Examples, Fixed, StudyData, sampled
from longitude.study.tasks.base import Measuring, Task, sampler_of

TEST_SEED, SELECTION_SEED = 2**32, 2**32 + 1
"""Above every seed of a study: no model is trained on examples drawn from them."""
NOT_ASKED = -100
"""Label of a symbol after which nothing is asked."""
BY_DISTANCE = "by-distance"
"""Method of documents.parquet: answers by the distance of the symbol that decides them."""
TOKENS_AT_ONCE = 2**15
"""Tokens per forward pass when measuring."""


class Sample(NamedTuple):
    """Examples of one length, int64 [examples, tokens] each.

    Attributes:
        tokens: Input tokens.
        labels: The answer after each token; `NOT_ASKED` if nothing is asked.
        distances: Distance in tokens from each label back to the symbol that decides it (the farthest of several).
    """

    tokens: np.ndarray
    labels: np.ndarray
    distances: np.ndarray


class Questions(Task):
    """Accuracy of symbols. A subclass draws the examples, and the first line of its docstring says what is drawn.

    Attributes:
        version: Version of the generated data; another version makes another study.
        grows: Whether training examples have all lengths from 1 to the training length, or that length alone.
        whole: Whether an example counts only if all its answers are right; else the share of right answers counts.
    """

    kind, unit, loss_unit = "answers", "symbols", "symbol"
    methods = ("forward",)
    version: ClassVar[int] = 1
    grows: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "data": (GENERATED,),
        "encodings": ("nope", "sinusoidal", "rope", "alibi", "t5:max_distance=32"),
        "train_length": 64,
        "test_lengths": (64, 128, 256, 1024),
        "methods": ("forward",),
        "batch_size": 32,
        "hidden": 64,
        "heads": 4,
        "documents": 200,
        "steps": 2000,
        "learning_rates": (2e-3,),
    }

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.metric, cls.words = ("exact_match", "exact answers") if cls.whole else ("accuracy", "right symbols")

    @abstractmethod
    def sample(self, random: np.random.Generator, examples: int, length: int, method: str = "forward") -> Sample:
        """Draw examples of a length; method: one of `methods`, which may draw different examples."""

    def tests(self, length: int, examples: int, method: str = "forward", seed: int = TEST_SEED) -> Sample:
        """Test examples of a length, the same in every study."""
        return self.sample(np.random.default_rng([seed, length]), examples, length, method)

    @abstractmethod
    def floor(self, length: int) -> float:
        """The share of right answers of the best rule that does not know where the tokens are."""

    def require_length(self, length: int) -> None:
        self.sample(np.random.default_rng(0), 1, length)

    def prepare(self, config: StudyConfig) -> StudyData:
        digest = hashlib.sha256()
        for length in config.test_lengths:
            for method in config.methods:
                for part in self.tests(length, config.documents, method)[:2]:
                    digest.update(part.astype("<i8").tobytes())
        drawn, _, _ = (inspect.getdoc(type(self)) or "").partition("\n")
        lengths = f"1 to {config.train_length}, from 1 on over the first half of the steps"
        description = {
            "source": f"generated: {drawn.rstrip('.')}",
            "version": self.version,
            "sha256": digest.hexdigest(),
            "training_sha256": None,
            "training_lengths": lengths if self.grows else f"{config.train_length}",
            "test_examples_of_each_length": config.documents,
            "floor": {str(length): self.floor(length) for length in config.test_lengths},
            "ceiling": self.ceiling,
        }
        return StudyData([], [], description)

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        return Drawn(self, config.train_length, config.steps, config.batch_size, seed, sampler_of(config))

    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        tokens, labels, _ = self.tests(config.train_length, config.documents, seed=SELECTION_SEED)
        return Fixed(input_ids=torch.from_numpy(tokens), shift_labels=torch.from_numpy(labels))

    def measured_tokens(self, config: StudyConfig) -> int:
        return config.documents * sum(map(self.positions, config.test_lengths)) * len(config.methods)

    def measure(self, of: Measuring) -> tuple[list[Row], list[pd.DataFrame]]:
        rows, tables, done = [], [], 0
        total = sum(of.lengths) * len(of.config.methods)
        same = of.labels | {"truncation": "none", "dtype": str(of.model.dtype).removeprefix("torch.")}
        for method in of.config.methods:
            for length in of.lengths:
                tokens, labels, distances = map(torch.from_numpy, self.tests(length, of.config.documents, method))
                asked = labels != NOT_ASKED
                right = answers(of.model, tokens) == labels
                scores = {"accuracy": right.sum(1) / asked.sum(1), "exact_match": right.eq(asked).all(1).float()}
                at = same | {"method": method, "length": length, "tokens": int(asked.sum())}
                rows += [scored(score.tolist(), metric=metric, **at) for metric, score in scores.items()]
                exact = scores[self.metric].numpy()
                tables.append(of.per_document(method, length, exact=exact, right=right.sum(1), symbols=asked.sum(1)))
                if method == of.config.methods[0]:
                    tables.append(
                        of.per_document(BY_DISTANCE, length, **by_distance(right, asked, distances, self.whole))
                    )
                done += length
                of.on_progress(done, total)
        rows += [row for table in tables for row in rows_by_distance(table, self.metric, of.labels)]
        return rows, tables


def scored(scores: list[float], **columns: Any) -> Row:
    """The row of a mean of scores from 0 to 1, one for each example, with Wilson's interval."""
    value, low, high = proportions.mean(scores)
    counts: dict[str, Any] = {"documents": len(scores), "count": len(scores)}
    return Row(**columns, weighting="example", **counts, value=value, low=low, high=high)


def rows_by_distance(answers: pd.DataFrame, metric: str, labels: dict[str, Any]) -> Iterator[Row]:
    """The share of exact answers at each distance, of a table `Measuring.per_document`; none if it has no distances."""
    if "distance" not in answers:
        return
    groups: Any = answers.groupby(["method", "length", "distance"])["exact"]
    for (method, length, distance), exact in groups:
        place = {"method": method, "length": int(length), "distance": int(distance)}
        yield scored(exact.tolist(), **labels, metric=metric, **place)


def answers(model: Any, tokens: Tensor) -> Tensor:
    """Tokens [B, T] -> the likeliest symbol after each of them, [B, T]."""
    at_once = max(1, TOKENS_AT_ONCE // tokens.shape[1])
    with evaluating(model), torch.no_grad():
        return torch.cat([model(some.to(model.device)).logits.argmax(-1).cpu() for some in tokens.split(at_once)])


def by_distance(right: Tensor, asked: Tensor, distances: Tensor, whole: bool) -> pd.DataFrame:
    """Share of right answers of each example [B, T], at distances from each power of two to the next; whole: 1 if all are."""
    low = 2 ** distances.clamp(min=1).log2().floor().long()
    answers = {"document": asked.nonzero()[:, 0], "distance": low[asked], "exact": right[asked].float()}
    exact: Any = pd.DataFrame(answers).groupby(["distance", "document"])["exact"]
    share = exact.min() if whole else exact.mean()
    return pd.DataFrame({"exact": share.astype(float), "symbols": exact.size()}).reset_index()


def growing(longest: int, steps: int) -> np.ndarray:
    """Maximum length at each step: from 1 evenly to `longest` over the first half (Zaremba and Sutskever 2014)."""
    return np.minimum(longest, 1 + 2 * longest * np.arange(steps) // steps)


class Drawn(Examples):
    """The training examples of `steps` steps, `batch` of one length each: {"input_ids": [T], "shift_labels": [T]}, int64.

    A step's examples depend on the seed and the step alone, so nothing is stored. Lengths are `longest`, or, if the task
    `grows`, drawn from 1 to the limit of `growing`.
    """

    def __init__(
        self, task: Questions, longest: int, steps: int, batch: int, seed: int, positions: Sampler | None = None
    ):
        self.task, self.batch, self.seed, self.positions = task, batch, seed, positions
        self.lengths = np.full(steps, longest)
        if task.grows:
            self.lengths = np.random.default_rng([seed]).integers(1, growing(longest, steps) + 1)
        row = {length: task.positions(length) for length in set(self.lengths.tolist())}
        # Once: a sum at every step was two thirds of a training on short words.
        self.before = np.cumsum([0, *(row[length] for length in self.lengths.tolist())])
        self.drawn: tuple[int, Sample] | None = None

    def __len__(self) -> int:
        return len(self.lengths) * self.batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.batch)
        if self.drawn is None or self.drawn[0] != step:
            random = np.random.default_rng([self.seed, step + 1])
            self.drawn = step, self.task.sample(random, self.batch, int(self.lengths[step]))
        sample = self.drawn[1]
        item = {"input_ids": torch.from_numpy(sample.tokens[row]), "shift_labels": torch.from_numpy(sample.labels[row])}
        if self.positions is not None:
            item["position_ids"] = sampled(self.positions, len(sample.tokens[row]), self.seed, index)
        return item

    def targets(self, examples: int) -> int:
        """Tokens read, since the number of symbols that are asked for is random."""
        step, rows = divmod(examples, self.batch)
        before, after = self.before[step], self.before[min(step + 1, len(self.lengths))]
        return int(before * self.batch + (after - before) * rows)
