"""Tasks of whole answers: an encoder-decoder reads one sequence of symbols and writes another, right or wrong.

An example of length n of `copy` is a word of n letters a to z, independent and equally likely, and the same word.
A source ends with END, an answer is written after START and ends with END. The examples of a training step have one length,
so nothing is padded; lengths are equally likely from 1 to a limit that grows to the training length over the first half of
the steps. Everything is drawn from the seed and held in memory alone; test examples are the same for all models.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from longitude.measure import Row
from longitude.measure.windows import evaluating
from longitude.positions.samplers import Sampler
from longitude.study.config import GENERATED, StudyConfig
from longitude.study.data import Examples, Fixed, StudyData, sampled
from longitude.study.tasks.base import (
    BYTES,
    SELECTION_SEED,
    TEST_SEED,
    Generated,
    Measuring,
    growing,
    register_task,
    sampler_of,
    scored,
)

PADDING, START, END = BYTES, BYTES + 1, BYTES + 2
DECODING = 6
"""Work of a generated token relative to a prompt token: each generated token is a separate pass."""
AT_ONCE = 100
"""Answers generated at once."""

Draws = np.ndarray
"""[examples, symbols drawn], int64 below the size of the alphabet."""


class Sequences(Generated):
    """Accuracy of whole answers by greedy generation. A subclass draws sources and makes their answers.

    Attributes:
        alphabet: The symbols drawn, as bytes.
        drawn: Symbols drawn for each unit of length.
    """

    metric, words = "exact_match", "exact answers"
    methods = ("greedy",)
    stack, model_class = "encoder-decoder", "LongitudeForSeq2SeqLM"
    tokens = {
        "vocab_size": BYTES + 3,
        "pad_token_id": PADDING,
        "bos_token_id": START,
        "eos_token_id": END,
        "decoder_start_token_id": START,
    }
    defaults = {
        "data": (GENERATED,),
        "encodings": ("sinusoidal", "rope", "alibi:future=one-sided"),
        "train_length": 16,
        "test_lengths": (8, 16, 18, 20, 24, 32),
        "methods": ("greedy",),
        "batch_size": 64,
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "documents": 200,
        "steps": 1500,
        "learning_rates": (4e-3,),
    }
    alphabet: ClassVar[bytes] = b"abcdefghijklmnopqrstuvwxyz"
    drawn: ClassVar[int] = 1

    @abstractmethod
    def answer(self, draws: Draws, length: int) -> Draws:
        """Draws [examples, drawn * length] -> the symbols of the answers."""

    def floor(self, length: int) -> float:
        return 0.0  # in the digits that are shown

    def letters(self, draws: Draws) -> np.ndarray:
        """Letters of the alphabet as byte values, by index."""
        return np.frombuffer(self.alphabet, np.uint8)[draws].astype(np.int64)

    def draw(self, random: np.random.Generator, examples: int, length: int) -> Draws:
        return random.integers(0, len(self.alphabet), (examples, self.drawn * length))

    def pairs(self, draws: Draws, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws -> sources and answers, END included, [examples, symbols] each."""

        def ended(symbols: np.ndarray) -> np.ndarray:
            return np.pad(symbols, ((0, 0), (0, 1)), constant_values=END)

        return ended(self.letters(draws)), ended(self.letters(self.answer(draws, length)))

    def tests(self, length: int, examples: int, seed: int = TEST_SEED) -> tuple[Tensor, Tensor]:
        """Sources and answers of one length, END included, int64 [examples, symbols]: the same in every study."""
        random = np.random.default_rng([seed, length])
        source, answer = self.pairs(self.draw(random, examples, length), length)
        return torch.from_numpy(source), torch.from_numpy(answer)

    def positions(self, length: int) -> int:
        return self.drawn * length + 1  # and the end

    def drawn_tests(self, config: StudyConfig) -> Iterator[np.ndarray]:
        for length in config.test_lengths:
            for part in self.tests(length, config.documents):
                yield part.numpy()

    def try_out(self, model: Any, config: StudyConfig) -> None:
        source, answer = self.tests(1, 1)
        model(input_ids=source, labels=answer)

    def measured_tokens(self, config: StudyConfig) -> int:
        return DECODING * config.documents * sum(config.test_lengths)

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        count = config.steps * config.batch_size
        return Pairs(self, config.train_length, count, config.batch_size, seed, sampler_of(config))

    def selection(self, config: StudyConfig, data: StudyData) -> Examples:
        source, answer = self.tests(config.train_length, config.documents, SELECTION_SEED)
        return Fixed(input_ids=source, labels=answer)

    def measure(self, of: Measuring) -> tuple[list[Row], list[pd.DataFrame]]:
        rows, tables = [], []
        for i, length in enumerate(of.lengths):
            source, answer = self.tests(length, of.config.documents)
            written = torch.cat([answers(of.model, some, answer.shape[1]) for some in source.split(AT_ONCE)])
            right, symbols = written == answer, answer.shape[1] - 1  # without END
            exact, each, every = right.all(1).long(), right[:, :-1].sum(1), len(answer) * symbols
            at = {"method": "greedy", "length": length}
            rows.append(scored(of, exact, metric="exact_match", **at, tokens=every, count=len(answer)))
            rows.append(scored(of, each / symbols, metric="symbol_accuracy", **at, tokens=every, count=every))
            for place in range(symbols):
                where = {"metric": "symbol_accuracy", "position_from": place, "position_to": place + 1}
                rows.append(scored(of, right[:, place], **at, **where, tokens=len(answer)))
            tables.append(of.per_document("greedy", length, exact=exact, right=each, symbols=symbols))
            of.on_progress(sum(of.lengths[: i + 1]), sum(of.lengths))
        return rows, tables


@register_task("copy")
class Copy(Sequences):
    """A word of letters, written again."""

    ceiling = "rope"

    def answer(self, draws: Draws, length: int) -> Draws:
        return draws


def answers(model: Any, source: Tensor, length: int) -> Tensor:
    """Greedy answers to sources [B, S] -> [B, length], END included, and padding after it."""
    source = source.to(model.device)
    with evaluating(model):
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
        written = model.generate(**inputs, max_new_tokens=length, do_sample=False, num_beams=1)
    written = written[:, 1:].cpu()  # without START
    return torch.nn.functional.pad(written, (0, length - written.shape[1]), value=PADDING)


class Pairs(Examples):
    """`count` training examples, each `batch` in a row of one length: {"input_ids": [S], "labels": [T]}, int64.

    Lengths are drawn from 1 to the limit of `growing`. With a sampler also "position_ids" [S] and "decoder_position_ids" [T],
    drawn independently.
    """

    def __init__(
        self, task: Sequences, longest: int, count: int, batch: int, seed: int, positions: Sampler | None = None
    ):
        lengths, symbols = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        self.task, self.seed, self.positions = task, seed, positions
        limits = growing(longest, -(-count // batch))
        self.lengths = lengths.integers(1, limits + 1).repeat(batch)[:count]
        self.draws = task.draw(symbols, count, longest).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        draws = self.draws[index : index + 1, : self.task.drawn * length].astype(np.int64)
        source, answer = (torch.from_numpy(part[0]) for part in self.task.pairs(draws, length))
        item = {"input_ids": source, "labels": answer}
        if self.positions is not None:
            for stream, (name, part) in enumerate([("position_ids", source), ("decoder_position_ids", answer)]):
                item[name] = sampled(self.positions, len(part), self.seed, index, stream)
        return item

    def targets(self, examples: int) -> int:
        """Symbols of the answers, END included."""
        answer = self.task.pairs(np.zeros((1, self.task.drawn), dtype=np.int64), 1)[1].shape[1]
        return int(self.lengths[:examples].sum()) + (answer - 1) * examples

    def read(self, examples: int) -> int:
        """Number of tokens in source and answer."""
        return int(self.lengths[:examples].sum()) * self.task.drawn + examples + self.targets(examples)
