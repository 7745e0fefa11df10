"""Questions, and prompts made of them: filled up to a length in the model's own tokens, never cut, and checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from longitude.errors import UsageError
from longitude.measure.config import BOS
from longitude.runs.machine import memory_within, within

TEMPLATE_SECONDS, TEMPLATE_BYTES = 60, 2**30
"""What a chat template may take for one message."""
FIRST = 64
"""Units of filler that the search begins with."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question before its prompt is filled to a length.

    text: function that returns the whole prompt with `size` units of filler (letters, words, lines, ...), deterministically.
    smallest: minimum number of units. ask: end of the prompt. begin: last words of the prompt, which start the answer and
    follow the template in a chat. needles: texts that it must contain once each, from which the answers follow; without any, it
    must contain the answers. answers: texts that a right answer contains.
    whole_answer: a complete right answer, with which tokens are counted; by default the answers one after the other.
    """

    text: Callable[[int], str]
    smallest: int = 0
    ask: str
    begin: str = ""
    needles: tuple[str, ...] = ()
    answers: tuple[str, ...]
    whole_answer: str = ""

    def __post_init__(self) -> None:
        if not self.whole_answer:
            object.__setattr__(self, "whole_answer", f" {' '.join(self.answers)}")


@dataclass(frozen=True)
class Prompt:
    """A question at a length: token ids, new tokens to generate (together at most the length), tokens of its needles.

    needles: (first, last + 1), to a token, over all needles; None for a question without. text: without a chat template.
    """

    question: Question
    ids: list[int]
    new_tokens: int
    needles: tuple[int, int] | None
    text: str

    @property
    def tokens(self) -> int:
        """Tokens in all, read and generated."""
        return len(self.ids) + self.new_tokens


class DoesNotFit(ValueError):
    """A question that does not fit into a length."""


def fit(
    question: Question, tokenizer: Any, length: int, new_tokens: int, chat: bool = False, bos: BOS = "tokenizer"
) -> Prompt:
    """The prompt with as much filler as fits into `length` tokens, new ones included.

    new_tokens: tokens to generate; more, if a right answer needs more of this tokenizer's tokens. chat: write it as a user's
    message in the tokenizer's template. bos: whether the beginning-of-sequence token begins it.
    Raises DoesNotFit when the question without filler is too long; ValueError when the tokenizer cuts or loses text.
    """
    new_tokens = max(new_tokens, len(encode(tokenizer, question.whole_answer)))
    written = (lambda text: in_chat(question, text, tokenizer)) if chat else (lambda text: text)
    ids_of = partial(tokens_of_chat if chat else encode, tokenizer, bos=bos)
    size = _most(lambda size: len(ids_of(written(question.text(size)))), length - new_tokens, question.smallest)
    if size is None:
        shortest = len(ids_of(written(question.text(question.smallest)))) + new_tokens
        raise DoesNotFit(f"its shortest prompt with its answer takes {shortest} tokens")
    text = written(question.text(size))
    ids = ids_of(text)
    check(replace(question, ask=question.begin) if chat else question, text, tokenizer.decode(ids))
    return Prompt(question, ids, new_tokens, _place(question, text, ids_of), question.text(size))


def in_chat(question: Question, text: str, tokenizer: Any) -> str:
    """A user's message in the tokenizer's chat template, followed by the start of the answer."""
    message = {"role": "user", "content": text.removesuffix(question.begin).rstrip()}
    render = partial(tokenizer.apply_chat_template, [message], add_generation_prompt=True, tokenize=False)
    try:  # the template is a program of the checkpoint: in a sandbox, which limits neither its time nor its memory
        with memory_within(TEMPLATE_BYTES):
            rendered = within(TEMPLATE_SECONDS, render)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            reason = f"it takes more than {TEMPLATE_BYTES / 1e9:.1f} GB of memory"
        if isinstance(error, TimeoutError):
            reason = f"it takes more than {TEMPLATE_SECONDS} s"
        expected = "one that renders a message"
        raise UsageError("the tokenizer's chat template", expected, reason, "ask with --no-chat") from None
    return rendered + question.begin.strip()


def tokens_of_chat(tokenizer: Any, text: str, bos: BOS = "tokenizer") -> list[int]:
    """Token ids of a rendered conversation, which has its special tokens as text."""
    ids = list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
    return begun(ids, tokenizer, bos)


def encode(tokenizer: Any, text: str, bos: BOS = "tokenizer") -> list[int]:
    """Token ids as the tokenizer makes them for a model: with its beginning-of-sequence token, never with an end."""
    ids = list(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    ids = ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    return begun(ids, tokenizer, bos)


def begun(ids: list[int], tokenizer: Any, bos: BOS) -> list[int]:
    """The ids with the beginning-of-sequence token at their start, without it, or unchanged."""
    if bos == "tokenizer" or (token := tokenizer.bos_token_id) is None:
        return ids
    rest = ids[1:] if ids[:1] == [token] else ids
    return [token, *rest] if bos == "always" else rest


def check(question: Question, text: str, read: str) -> None:
    """ValueError unless the prompt is whole: `text` as built, `read` as the tokenizer gives it back."""
    for what, got in (("was built", text), ("the tokenizer gives back", read)):
        plain = _plain(got)
        lost = [part for part in question.needles or question.answers if _plain(part) not in plain]
        lost += [needle for needle in question.needles if plain.count(_plain(needle)) > 1]
        lost += [] if plain.endswith(_plain(question.ask)) else [question.ask]
        if lost:
            raise ValueError(
                f"the prompt that {what} does not contain {lost[0]!r} as it must: it is cut, or the tokenizer cannot write "
                f"this text; measure retrieval with a tokenizer that reads English and numbers"
            )


def _plain(text: str) -> str:
    """The text without white space and case, which some tokenizers do not keep."""
    return "".join(text.split()).lower()


def _most(count: Callable[[int], int], budget: int, smallest: int) -> int | None:
    """The size from `smallest` up with the most tokens within the budget; None when no size fits. count grows (almost)."""
    count = cache(count)
    low, high = smallest, smallest + FIRST
    if count(low) > budget:
        return None
    while count(high) <= budget:  # up, by the slope of the last step and some more
        if count(high) <= count(low):
            raise ValueError(
                f"the tokenizer gives {count(high)} tokens for text of any length: it cuts what it reads; load it without a "
                f"limit (model_max_length, truncation)"
            )
        per_token = (high - low) / (count(high) - count(low))
        low, high = high, high + max(FIRST, math.ceil(1.05 * per_token * (budget - count(high))))
    while high - low > 1 and count(low) < budget:  # between, by linear interpolation
        guess = low + (budget - count(low)) * (high - low) // max(1, count(high) - count(low))
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if count(guess) <= budget else (low, guess)
    return low


def _place(question: Question, text: str, ids_of: Callable[[str], list[int]]) -> tuple[int, int] | None:
    if not question.needles:
        return None
    first = min(text.index(needle) for needle in question.needles)
    last = max(text.index(needle) + len(needle) for needle in question.needles)
    return len(ids_of(text[:first])), len(ids_of(text[:last]))
