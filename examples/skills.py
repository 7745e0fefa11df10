"""What `train_tiny_checkpoint.py --skills` adds: a Llama that finds what is in its context, and answers.

    python examples/train_tiny_checkpoint.py --skills --out models/skilled

Text alone teaches a model of a million parameters no retrieval in minutes; a course of lessons does. First random tokens are
said twice, and the model comes to copy what followed the last time. Then many small questions stand close together: numbers
by their keys, variables along a chain. Then come the questions of `longitude measure --tasks` themselves, in half the window
and in the whole one. A fifth of all rows is text. Matrices are trained by Muon (Jordan et al. 2024), with which copying
takes some 500 steps; with AdamW it took 3,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import IterableDataset
from train_tiny_checkpoint import always, stream_of, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from longitude.measure.retrieval.haystack import LINES, Haystack, of_python, word_list
from longitude.measure.retrieval.prompts import Question
from longitude.measure.retrieval.tasks import NEEDLE, TASKS, Task

WORDS = 1024
"""Of the tokenizer, bytes and special tokens included."""
TOKENS = 4096
"""Of a training batch, at most."""
TEXT = 0.2
"""Of all rows."""
COPIES = (8, 21)
"""Random tokens that are said twice, fewest and most."""
PAIRS = (2, 5)
"""Keys with numbers that are given and then asked for, fewest and most."""
UNITS = {"passkey": 4.0, "needle-filler": 0.04, "variable-tracking": 0.04}
"""Filler of a task for one token: letters, lines, lines."""
WORDS_A_TOKEN = 0.5
"""Of running text, elsewhere."""
LEARNED = (
    "passkey",
    "needle-filler",
    "needle-single",
    "needle-multi-key",
    "needle-multi-value",
    "needle-city",
    "needle-country",
    "variable-tracking",
)
"""The tasks whose questions are asked in training."""
HARD = ("needle-multi-key", "needle-multi-value", "variable-tracking")
"""Those of them that are asked three times as often."""
MISSES = 8
"""Exercises that are too long for what is left of a window, until one is cut."""
NOT_LEARNED = -100
COLUMNS = {"input_ids": "ids", "labels": "labels"}
AGAIN = " The special magic number for {query} mentioned in the provided text is"
BEHIND_EXAMPLE = "\n\n\n\n"
"""What ends the solved example of variable tracking."""


def trainer_of(options: argparse.Namespace, texts: list[str], folder: Path) -> tuple[PreTrainedTokenizerFast, Trainer]:
    """Of a Llama that learns its skills."""
    tokenizer = tokenizer_of(texts, options.length)
    config = tiny("llama", tokenizer, options.length, options.layers, options.width)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    initialize(model)
    course = Course(tokenizer, stream_of(texts, tokenizer), options.length, options.steps, options.seed)
    optimizer = MuonAndAdamW(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / course.steps))
    arguments = TrainingArguments(max_steps=course.steps, per_device_train_batch_size=1, **always(options.seed, folder))
    return tokenizer, Trainer(
        model,
        arguments,
        train_dataset=course,
        data_collator=lambda batches: batches[0],  # a lesson is a batch already
        optimizers=(optimizer, schedule),
        compute_loss_func=loss_of_windows,
    )


# ---- what is read ----------------------------------------------------------------------------------------------------
def tokenizer_of(texts: list[str], length: int) -> PreTrainedTokenizerFast:
    """Byte pairs of the texts and of questions; a token never has more than two digits, and a word begins with its space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE())
    words = Regex(r"\d{1,2}| ?[A-Z]?[a-z]+| ?[A-Z]|\s+(?=\S)| ?[^\sA-Za-z\d]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=WORDS - 2, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(learned_words(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
        model_max_length=length,
    )


def learned_words(texts: list[str]) -> Iterator[str]:
    """Every eighth text, questions and every pair of digits: of questions enough to make their words whole."""
    yield from texts[::8]
    random = Random("words")
    for _ in range(300):
        for drawn in (drawn_from(TASKS[name], random) for name in LEARNED):
            yield drawn.text(drawn.smallest + 20) + drawn.whole_answer
    pairs = " ".join(f"{i:02d}" for i in range(100))
    yield from (pairs for _ in range(2000))


def drawn_from(task: Task, random: Random) -> Question:
    """A question of a task, in running text or in lines of filler."""
    return task.draw(random, 0, None, passage(random) if task.text else LINES)


def passage(random: Random, words: int = 2000) -> Haystack:
    """Running text from a place of its own in the prose that measuring hides its needles in."""
    prose = of_python().words
    first = random.randrange(len(prose) - words)
    return Haystack(prose[first : first + words], "a passage of it")


# ---- what is learned of it -------------------------------------------------------------------------------------------
class Row(NamedTuple):
    """Tokens and labels; a label is NOT_LEARNED where what is read does not say the next token."""

    ids: list[int]
    labels: list[int]

    def __add__(self, other: Row) -> Row:  # a named tuple would become longer
        return Row(self.ids + other.ids, self.labels + other.labels)


def answered(asked: list[int], answer: list[int]) -> Row:
    """A question and its answer, which alone is learned."""
    return Row(asked + answer, [NOT_LEARNED] * len(asked) + answer)


class Lesson(NamedTuple):
    """A stage of the course: its exercises, made to fit into some tokens; tokens of a window; optimizer steps."""

    exercise: Callable[[int, Random], Row]
    length: int
    steps: int


class Course(IterableDataset):
    """Batches of tokens [rows, length] with labels, lesson after lesson; `steps` in all, or as many as it takes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: torch.Tensor, length: int, steps: int | None, seed: int
    ):
        self.tokenizer, self.text, self.seed = tokenizer, text.tolist(), seed
        lessons = [
            Lesson(self.copy, 64, 500),
            Lesson(self.pairs, 256, 700),
            Lesson(self.chain, 320, 150),
            Lesson(self.question, length // 2, 400),
            Lesson(self.question, length, 800),
        ]
        usual = sum(lesson.steps for lesson in lessons)
        self.lessons = [
            lesson._replace(steps=max(1, round(lesson.steps * (steps or usual) / usual))) for lesson in lessons
        ]
        self.steps = sum(lesson.steps for lesson in self.lessons)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        random = Random(f"{self.seed} lessons")
        for lesson in self.lessons:
            for _ in range(lesson.steps):
                rows = [self.row(lesson, random) for _ in range(TOKENS // lesson.length)]
                yield {name: torch.tensor([getattr(row, of) for row in rows]) for name, of in COLUMNS.items()}

    def row(self, lesson: Lesson, random: Random) -> Row:
        """A window of text, all of it learned; or of exercises one behind the other, the last one cut where it must."""
        if random.random() < TEXT:
            first = random.randrange(len(self.text) - lesson.length)
            window = self.text[first : first + lesson.length]
            return Row(window, window)
        row, misses = Row([], []), 0
        while (room := lesson.length - len(row.ids)) > 0:
            exercise = lesson.exercise(room, random)
            misses += len(exercise.ids) > room
            if len(exercise.ids) <= room or misses == MISSES:
                row += exercise
        return Row(row.ids[: lesson.length], row.labels[: lesson.length])

    def copy(self, room: int, random: Random) -> Row:
        """Random tokens twice: the second time is known from its second token on."""
        once = [random.randrange(len(self.tokenizer)) for _ in range(random.randint(*COPIES))]
        return answered([*once, once[0]], once[1:])

    def pairs(self, room: int, random: Random) -> Row:
        """Needles with nothing between them, then each asked for, in another order."""
        count = random.randint(*PAIRS)
        words = random.sample(word_list(), 2 * count)
        given = {f"{a}-{b}": str(random.randint(10**6, 10**7 - 1)) for a, b in zip(words[::2], words[1::2])}
        row = answered(self.encode("".join(f" {NEEDLE.format(key=key, value=given[key])}" for key in given)), [])
        for key in random.sample(list(given), count):
            row += answered(self.encode(AGAIN.format(query=key)), self.encode(f" {given[key]}"))
        return row + answered([self.tokenizer.eos_token_id], [])

    def chain(self, room: int, random: Random) -> Row:
        """Variable tracking among few lines, without the solved example before it."""
        drawn = drawn_from(TASKS["variable-tracking"], random)
        _, asked = drawn.text(random.choice([1, 1, 1, 2, 4])).split(BEHIND_EXAMPLE)
        return self.exercise(asked, drawn.whole_answer)

    def question(self, room: int, random: Random) -> Row:
        """Of any task, hard ones more often; three of ten without filler, the others with as much as fits, or less."""
        task = TASKS[random.choice([*LEARNED, *HARD, *HARD])]
        drawn = drawn_from(task, random)
        shortest = self.exercise(drawn.text(drawn.smallest), drawn.whole_answer)
        filler = int(random.random() * (room - len(shortest.ids)) * UNITS.get(task.name, WORDS_A_TOKEN))
        if filler <= 0 or random.random() < 0.3:
            return shortest
        return self.exercise(drawn.text(drawn.smallest + filler), drawn.whole_answer)

    def exercise(self, asked: str, answer: str) -> Row:
        return answered(self.encode(asked), [*self.encode(answer), self.tokenizer.eos_token_id])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


# ---- how it is learned -----------------------------------------------------------------------------------------------
def initialize(model: PreTrainedModel) -> None:
    """Words of size 1, and nothing else in the stream yet: what attention and MLPs add begins at 0, and so do the logits."""
    nn.init.normal_(model.get_input_embeddings().weight)
    nn.init.zeros_(model.get_output_embeddings().weight)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices, AdamW for words and norms, as one optimizer. What they remember is not saved."""

    def __init__(self, model: PreTrainedModel):
        words, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        matrices = [each for each in model.model.layers.parameters() if each.ndim == 2]
        norms = [each for each in model.parameters() if each.ndim < 2]
        self.parts = (
            torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [{"params": [words], "lr": 2e-2}, {"params": [head], "lr": 1e-2}, {"params": norms, "lr": 4e-3}],
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:
        groups = iter(self.param_groups)  # accelerate has put new ones in the place of those given
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.step()


def rate(done: float) -> float:
    """Of the full rate after this share of the steps: up at the start, down to nothing in the second half."""
    return min(1.0, done / 0.02, 2 * (1 - done))


def loss_of_windows(output: object, labels: torch.Tensor, **_: object) -> torch.Tensor:
    """Mean over windows of the mean over a window's learned tokens: a short answer counts as much as a window of text."""
    logits, following = output.logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), following, ignore_index=NOT_LEARNED, reduction="none")
    return (losses.sum(1) / (following != NOT_LEARNED).sum(1).clamp(min=1)).mean()
