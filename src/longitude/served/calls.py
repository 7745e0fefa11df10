"""Calls of a server: needles at exact places of prompts of exact lengths. A call is asked once, and kept."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from shlex import quote
from typing import Any

from longitude.errors import UsageError
from longitude.measure.endpoint import APART, Endpoint, as_documented
from longitude.measure.retrieval.haystack import of_python, word_list
from longitude.measure.retrieval.prompts import Prompt, Question, encode
from longitude.measure.retrieval.tasks import NEEDLE, ONE
from longitude.measure.transport import KEY, SUCH, Refused, Unreachable
from longitude.runs.files import write_json
from longitude.runs.store import Store, Unit, key_of

SPAN, STRIDE = 128, 53
"""Tokens of the largest block whose borders are looked for, and the step by which places go through it."""
SLACK = 16
"""Tokens by which a prompt may miss its length."""
ROUNDS = 12
"""Attempts to bring text to a number of tokens: where two parts meet, tokens may merge."""
NEW_TOKENS = 24
"""For a number of seven digits, and some words before it."""
OF_PROMPTS = (None, 400, 413, 422, 500)
"""HTTP codes, None for an answer that is not as documented, that may be of a prompt; others are of the server, for a time."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A question to a server, or a text whose log-probabilities are asked for.

    Attributes:
        law: For which it is asked.
        length: Tokens of the prompt, without those that a chat template adds.
        places: First token of each needle, ascending; none: a text.
        asked: Which needle is asked for.
        keys, values, text: Seeds of the keys, of the numbers, and of the text around them; law, length and places are others.
        skip: Tokens left out at the start of a text.
        turn: Number of this call among equal ones.
        together: Whether equal ones are asked at the same time.
    """

    law: str
    length: int
    places: tuple[int, ...] = ()
    asked: int = 0
    keys: int = 0
    values: int = 0
    text: int = 0
    skip: int = 0
    turn: int = 0
    together: bool = False

    @property
    def distance(self) -> int:
        """Tokens from the start of the needle to the end of the prompt."""
        return self.length - self.places[self.asked]


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        text: The answer without the thinking before it.
        hidden: Whether thinking or the limit of tokens left no answer.
        sent: Tokens of the prompt, by the tokenizer.
        read: Tokens that the server says it read; None: it does not count.
        nats: -ln p of the tokens of a text after the first.
        refused: Why there is no answer.
        seconds: Until the answer.
    """

    text: str = ""
    hidden: bool = False
    sent: int = 0
    read: int | None = None
    nats: list[float] = field(default_factory=list)
    refused: str = ""
    seconds: float = 0.0

    @property
    def cut(self) -> bool:
        """Whether the server says that it read fewer tokens than were sent."""
        return self.read is not None and self.read < self.sent - APART


@dataclass(frozen=True)
class Trial:
    """A call with its answer, and whether that has the right number."""

    call: Call
    answer: Answer
    right: bool

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, as the server counts them if it does."""
        return self.answer.read or self.answer.sent


Groups = Sequence[Sequence[Call]]
"""The calls of a group are asked together, the groups one after the other."""


@dataclass
class Served:
    """A model on a server, and what laws ask of it.

    Attributes:
        server: The server.
        tokenizer: In whose tokens lengths are.
        longest: The most tokens of a prompt.
        beyond: Tokens of prompts that the server should refuse; None: it does not say how many it takes.
        added: Tokens that a chat template adds to a prompt.
        echoes: Whether completions give log-probabilities of a prompt.
        store: Where calls are kept.
        trials: Calls of a cell, over the fewest.
        seed: Of texts and numbers.
        reference: Token ids -> -ln p of those after the first, by another program; None: there is none.
        answered: The trials by law.
        confirmed: Trials of calls that were asked again, by law and name of their pattern.
        numbers: The numbers of all prompts.
        evidence: The trial that shows a fault, by law.
        sent: Calls that were asked now, and not kept before.
    """

    server: Endpoint
    tokenizer: Any
    longest: int
    beyond: int | None
    added: int
    echoes: bool
    store: Store
    trials: int = 1
    seed: int = 0
    reference: Callable[[Sequence[int]], list[float]] | None = None
    answered: dict[str, list[Trial]] = field(default_factory=dict)
    confirmed: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    evidence: dict[str, Trial] = field(default_factory=dict)
    sent: list[Call] = field(default_factory=list)

    # ---- prompts ------------------------------------------------------------------------------------------------
    @cached_property
    def haystack(self) -> list[int]:
        """Token ids of running text."""
        return encode(self.tokenizer, " ".join(of_python().words), "never")

    @cached_property
    def vocabulary(self) -> str:
        """A hash of the tokens of that text: prompts of another tokenizer are others."""
        return key_of(self.haystack)

    def filler(self, start: int, count: int) -> str:
        """Text of about `count` tokens, from token `start` of the haystack on, which repeats."""
        start %= len(self.haystack)
        laps = math.ceil((start + count) / len(self.haystack))
        return self.tokenizer.decode((self.haystack * laps)[start : start + count]) if count > 0 else ""

    def start_of(self, call: Call) -> int:
        return Random(f"{self.seed} text {call.text}").randrange(len(self.haystack))

    def pairs_of(self, call: Call) -> list[tuple[str, str]]:
        """(key, number) of each needle of a call."""
        # No two patterns share a key or a number, since some are harder to read or to copy than others.
        where = f"{self.seed} {call.law} {call.length} {call.places} {call.keys}"
        keys, numbers = Random(f"{where} keys"), Random(f"{where} {call.values} {call.text}")
        names = keys.sample(word_list(), 2 * len(call.places))
        return [(f"{a}-{b}", str(numbers.randint(10**6, 10**7 - 1))) for a, b in zip(names[::2], names[1::2])]

    def prompt_of(self, call: Call) -> Prompt:
        """The needles of a call in running text, then its question."""
        pairs = self.pairs_of(call)
        needles = tuple(NEEDLE.format(key=key, value=value) for key, value in pairs)
        key, number = pairs[call.asked]
        opening, asking = ONE
        text, after = opening.split("{context}")
        ask, start = after + asking.format(query=key), self.start_of(call)
        for place, needle in zip(call.places, needles):
            text += self._fitted(text, "", place, start) + f" {needle} "
            start += place
        text += self._fitted(text, ask, call.length, start) + ask
        question = Question(text=lambda _: text, ask=ask, needles=needles, answers=(number,))
        return Prompt(question, encode(self.tokenizer, text), NEW_TOKENS, None, text)

    def _fitted(self, before: str, after: str, end: int, start: int) -> str:
        """Filler between two texts, with which all three have `end` tokens, or nearly."""
        count = size = end - len(encode(self.tokenizer, before + after))
        near = (math.inf, "")
        for _ in range(ROUNDS):
            filler = self.filler(start, count)
            missing = end - len(encode(self.tokenizer, before + filler + after))
            near = min(near, (abs(missing), filler))
            if not missing or size <= 0:
                break
            count = max(0, count + missing)
        return near[1]

    @cached_property
    def edges(self) -> tuple[int, int]:
        """Tokens before the first place, and from the last place to the end: opening; needle and question."""
        prompt = self.prompt_of(Call(law="", length=0, places=(0,)))
        first = len(encode(self.tokenizer, ONE[0].split("{context}")[0]))
        return first, len(prompt.ids) - first

    def place(self, length: int, depth: float, i: int = 0) -> int:
        """The first token of needle `i` at about a depth from 0 to 1: over all `i` it is as often at every place of a block."""
        first, last = self.edges
        return first + round(depth * (length - first - last - SPAN)) + STRIDE * i % SPAN

    def is_stale(self, trial: Trial) -> bool:
        """Whether a wrong answer has the number of another prompt."""
        numbers = {number for _, number in self.pairs_of(trial.call)}
        return not trial.right and any(
            number in self.numbers - numbers for number in re.findall(r"\d+", trial.answer.text)
        )

    def ids_of(self, call: Call) -> list[int]:
        """Token ids of a text."""
        return encode(self.tokenizer, self.filler(self.start_of(call), call.length))[call.skip : call.length]

    # ---- calls --------------------------------------------------------------------------------------------------
    def unit(self, call: Call) -> Unit:
        """A call with all that determines its answer."""
        server = {name: getattr(self.server, name) for name in ("url", "model", "thinking", "chat", "text")}
        prompts = {"seed": self.seed, "tokenizer": self.vocabulary}
        content = {**asdict(call), "places": [*call.places]}
        return Unit("call", f"{call.law} {call.length}", {**server, **prompts, **content})

    def ask(self, groups: Groups, on_call: Callable[[], object] = lambda: None) -> list[Trial]:
        """The calls with their answers; those that are kept are not asked. UsageError if the server does not answer."""

        def trial(call: Call) -> Trial:
            [answer] = self.store.results([self.unit(call)], lambda i, folder: self._asked(call), Answer)
            on_call()
            numbers = [number for _, number in self.pairs_of(call)]
            self.numbers.update(numbers)
            return Trial(call, answer, bool(numbers) and numbers[call.asked] in answer.text)

        trials = []
        for group in groups:
            with ThreadPoolExecutor(self.server.concurrency) as pool:
                trials += pool.map(trial, group)
        return trials

    def _asked(self, call: Call) -> Answer:
        self.sent.append(call)
        before = time.monotonic()
        try:
            answer = self._answered(call)
        except (Refused, Unreachable) as error:
            if not isinstance(error, Refused) or error.code not in OF_PROMPTS:
                remedy = "the same command continues; no call is sent twice"
                raise UsageError("the server", SUCH, str(error), remedy) from None
            answer = Answer(refused=str(error), sent=call.length)
        return replace(answer, seconds=time.monotonic() - before)

    def _answered(self, call: Call) -> Answer:
        if not call.places:
            ids = self.ids_of(call)
            nats = self.server.nats(ids, self.tokenizer, self.tokenizer.bos_token_id)
            if not all(map(math.isfinite, nats)):
                raise Refused("completions with echo give no number as the log-probability of some tokens")
            return Answer(nats=nats, sent=len(ids))
        prompt = self.prompt_of(call)
        route, content = self.server.question(self.tokenizer, prompt)
        choice, read = self.server.counted(route, **content)
        with as_documented(route):
            text, at_limit = self.server.text_of(choice)
        return Answer(text, not text.strip() and (at_limit or self.server.chat), len(prompt.ids), read)

    def command(self, trial: Trial, path: Path) -> str:
        """Write the request of a trial to a file; returns the command that sends it."""
        if trial.call.places:
            route, content = self.server.question(self.tokenizer, self.prompt_of(trial.call))
        else:
            route, content = "completions", self.server.echoed(self.ids_of(trial.call), self.tokenizer)
        write_json(path, {"model": self.server.model, "temperature": 0, **content})
        key = f' -H "Authorization: Bearer ${KEY}"' if KEY in os.environ else ""
        return f"curl {self.server.url}/{route} -H 'Content-Type: application/json'{key} -d @{quote(str(path))}"
