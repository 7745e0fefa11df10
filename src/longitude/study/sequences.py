"""Tasks of whole answers: an encoder-decoder reads one sequence of symbols and writes another, right or wrong.

An example of length n, its letters or digits independent and equally likely:

* copy, reverse, sort: a word of n letters a to z -> the same word, the word from its end, its letters in the order of the
  alphabet, each as often as in the word.
* add: two numbers of n digits, leading zeros included, a digit of each in turn -> their sum in n + 1 digits. All are written
  from the least digit on, so that a carry comes from what is already written (Lee et al. 2023 find this easier to learn than
  the plain order, by far), and the digits of a place stand together, wherever the numbers end.

A source ends with END, an answer is written after START and ends with END. The examples of a training step have one length,
so nothing is padded; lengths are equally likely from 1 to a limit that grows to the training length over the first half of
the steps. Everything is drawn from the seed and held in memory alone; test examples are the same for all models.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from longitude.measure import Row
from longitude.measure.retrieval import scoring
from longitude.measure.windows import evaluating
from longitude.models.seq2seq import LongitudeForSeq2SeqLM
from longitude.positions.samplers import Sampler
from longitude.study.config import StudyConfig
from longitude.study.work import BYTES, Examples, StudyData, TaskRunner, sampled, sampler_of

PADDING, START, END = BYTES, BYTES + 1, BYTES + 2
TEST_SEED = 2**32
"""Above every seed of a study: no model is trained on examples drawn from it."""
AT_ONCE = 100
"""Answers generated at once."""

Draws = np.ndarray
"""[examples, symbols drawn], int64 below the size of the alphabet."""


class Sequences(TaskRunner):
    """Accuracy of whole answers by greedy generation."""

    model = LongitudeForSeq2SeqLM
    alphabet: ClassVar[bytes] = b"abcdefghijklmnopqrstuvwxyz"
    words: ClassVar[str]
    drawn: ClassVar[int] = 1
    """Symbols drawn for each unit of length."""

    @abstractmethod
    def answer(self, draws: Draws, length: int) -> Draws:
        """Draws [examples, drawn * length] -> the symbols of the answers."""

    def letters(self, draws: Draws) -> np.ndarray:
        """Of the alphabet, as bytes."""
        return np.frombuffer(self.alphabet, np.uint8)[draws].astype(np.int64)

    def draw(self, random: np.random.Generator, examples: int, length: int) -> Draws:
        return random.integers(0, len(self.alphabet), (examples, self.drawn * length))

    def pairs(self, draws: Draws, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws -> sources and answers, END included, [examples, symbols] each."""

        def ended(symbols: np.ndarray) -> np.ndarray:
            return np.pad(symbols, ((0, 0), (0, 1)), constant_values=END)

        return ended(self.letters(draws)), ended(self.letters(self.answer(draws, length)))

    def tests(self, length: int, examples: int) -> tuple[Tensor, Tensor]:
        """Sources and answers of one length, END included, int64 [examples, symbols]: the same in every study."""
        random = np.random.default_rng([TEST_SEED, length])
        source, answer = self.pairs(self.draw(random, examples, length), length)
        return torch.from_numpy(source), torch.from_numpy(answer)

    # ---- a task of a study ----

    def prepare(self, config: StudyConfig) -> StudyData:
        digest = hashlib.sha256()
        for length in config.test_lengths:
            for part in self.tests(length, config.documents):
                digest.update(part.numpy().tobytes())
        description = {
            "source": f"generated: {self.words}",
            "sha256": digest.hexdigest(),
            "training_lengths": f"1 to {config.train_length}, from 1 on over the first half of the steps",
            "test_examples_of_each_length": config.documents,
        }
        return StudyData([], [], description)

    def shape(self, config: StudyConfig) -> dict[str, Any]:
        return {
            "vocab_size": BYTES + 3,
            "pad_token_id": PADDING,
            "bos_token_id": START,
            "eos_token_id": END,
            "decoder_start_token_id": START,
        }

    def try_out(self, model: Any, config: StudyConfig) -> None:
        source, answer = self.tests(1, 1)
        model(input_ids=source, labels=answer)

    def examples(self, config: StudyConfig, data: StudyData, seed: int) -> Examples:
        count = config.steps * config.batch_size
        return Pairs(self, config.train_length, count, config.batch_size, seed, sampler_of(config))

    def measure(
        self,
        model: Any,
        config: StudyConfig,
        data: StudyData,
        lengths: Sequence[int],
        labels: dict[str, Any],
        heard: Callable[[int, int], None],
    ) -> tuple[list[Row], pd.DataFrame]:
        rows, tables = [], []
        for i, length in enumerate(lengths):
            source, answer = self.tests(length, config.documents)
            said = torch.cat([answers(model, some, answer.shape[1]) for some in source.split(AT_ONCE)])
            right = said == answer
            exact, symbols = right.all(1).long(), right[:, :-1].sum(1)  # END, too; without END
            examples, written = len(answer), answer.shape[1] - 1
            protocol = {
                "length": length,
                "tokens": written * examples,
                "dtype": str(model.dtype).removeprefix("torch."),
            }
            rows += [
                row("exact_match", exact.tolist(), count=examples, **protocol, **labels),
                row("symbol_accuracy", (symbols / written).tolist(), count=written * examples, **protocol, **labels),
            ]
            shared = {"label": labels["label"], "seed": labels["seed"], "method": "greedy", "length": length}
            table = {"document": range(examples), "exact": exact, "right": symbols, "symbols": written}
            tables.append(pd.DataFrame({**shared, **table}))
            heard(sum(lengths[: i + 1]), sum(lengths))
        columns = ["label", "seed", "method", "length", "document", "exact", "right", "symbols"]
        return rows, pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def row(metric: str, scores: list[float], **columns: Any) -> Row:
    """The mean of the examples' scores, with Wilson's interval."""
    value, low, high = scoring.mean(scores)
    return Row(
        **columns,
        metric=metric,
        method="greedy",
        weighting="example",
        truncation="none",
        documents=len(scores),
        value=value,
        low=low,
        high=high,
    )


class Copy(Sequences):
    words = "words of letters a to z, and the same words"

    def answer(self, draws: Draws, length: int) -> Draws:
        return draws


class Reverse(Sequences):
    words = "words of letters a to z, and the words from their ends"

    def answer(self, draws: Draws, length: int) -> Draws:
        return draws[:, ::-1]


class Sort(Sequences):
    words = "words of letters a to z, and their letters in the order of the alphabet"

    def answer(self, draws: Draws, length: int) -> Draws:
        return np.sort(draws, axis=1)


class Add(Sequences):
    words = "two numbers of so many digits, a digit of each in turn, and their sum, all from the least digit on"
    alphabet = b"0123456789"
    drawn = 2

    def answer(self, draws: Draws, length: int) -> Draws:
        one, other = draws[:, ::2], draws[:, 1::2]
        digits, carry = [], np.zeros(len(draws), dtype=np.int64)
        for place in range(length):
            carry, digit = np.divmod(one[:, place] + other[:, place] + carry, 10)
            digits.append(digit)
        return np.stack([*digits, carry], axis=1)


def answers(model: Any, source: Tensor, length: int) -> Tensor:
    """Greedy answers to sources [B, S] -> [B, length], END included, and padding after it."""
    source = source.to(model.device)
    with evaluating(model):
        said = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
        )
    said = said[:, 1:].cpu()  # without START
    return torch.nn.functional.pad(said, (0, length - said.shape[1]), value=PADDING)


class Pairs(Examples):
    """`count` training examples, `batch` after each other of one length: {"input_ids": [S], "labels": [T]}, int64.

    Lengths are 1 to a limit that grows evenly to `longest` over the first half, and stays (Zaremba and Sutskever 2014). With a
    sampler also "position_ids" [S] and "decoder_position_ids" [T], each drawn by itself.
    """

    def __init__(
        self, task: Sequences, longest: int, count: int, batch: int, seed: int, positions: Sampler | None = None
    ):
        lengths, symbols = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        self.task, self.seed, self.positions = task, seed, positions
        steps = np.arange(-(-count // batch))
        longest_yet = np.minimum(longest, 1 + 2 * longest * steps // len(steps))
        self.lengths = lengths.integers(1, longest_yet + 1).repeat(batch)[:count]
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
        """END is one of them."""
        answer = self.task.pairs(np.zeros((1, self.task.drawn), dtype=np.int64), 1)[1].shape[1]
        return int(self.lengths[:examples].sum()) + (answer - 1) * examples
