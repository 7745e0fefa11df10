"""A server with the API of OpenAI instead of a checkpoint: losses from completions that echo, answers from chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from longitude.errors import UsageError
from longitude.measure.retrieval.prompts import Prompt, encode
from longitude.measure.transport import KEY, SUCH, Refused, Unreachable, in_one_line, post
from longitude.measure.windows import Reader

TIMEOUT, FIRST_TIMEOUT = 1800.0, 300.0
"""Seconds for an answer, which a server with a queue may need; and for the first, for which it may load the model."""
THOUGHTS = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")
"""Marks around thinking: of most models, of Mistral's, of Seed-OSS."""
APART = 8
"""Tokens that a text may have fewer inside a template, or beside a beginning of sequence."""
ABOVE = 1e-3
"""Rounding by which a server's log-probability may be above 0."""
FORCING, SAME = 100, 0.1
"""Bias of a logit that makes a token the next one; and the most nats by which a log-probability may differ from itself."""


@dataclass(frozen=True)
class Endpoint:
    """A model on a server.

    Attributes:
        url: Address up to /v1.
        model: The server's name of the model.
        concurrency: Requests at a time.
        thinking: Tokens for thinking before an answer.
        chat: Whether questions are messages of a chat.
        text: Whether prompts are sent as text; else as token ids.
        forced: Whether each token has a request with a bias that makes it the next one, since completions do not echo.
        timeout: Seconds for an answer.
    """

    url: str
    model: str
    concurrency: int = 4
    thinking: int = 0
    chat: bool = True
    text: bool = False
    forced: bool = False
    timeout: float = TIMEOUT

    @property
    def described(self) -> str:
        """For the column `method` of a row."""
        thinking = f", {self.thinking} tokens to think" if self.thinking else ""
        return f", as a chat message{thinking}" if self.chat else ""

    def post(self, where: str, **content: Any) -> Any:
        """The server's answer. Refused or Unreachable if there is none after several attempts."""
        return post(where, {"model": self.model, **content}, self.timeout)

    def choice(self, route: str, sent: Callable[[], int], **content: Any) -> Any:
        """The first of the server's choices. sent: the tokens of the prompt; Refused if the server read fewer of them."""
        choice, read = self.counted(route, **content)
        if read is not None and read < (count := sent()):
            remedy = "it cuts prompts: start it with a longer context, or ask for shorter --lengths"
            raise Refused(f"{self.url}/{route}: the server read {read} of {count} tokens of a prompt; {remedy}")
        return choice

    def counted(self, route: str, **content: Any) -> tuple[Any, int | None]:
        """(the first of the server's choices, tokens of the prompt that it says it read; None if it does not count)."""
        answer = self.post(f"{self.url}/{route}", temperature=0, **content)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        try:
            return answer["choices"][0], int(read) if isinstance(read, int | float) and read > 0 else None
        except (KeyError, IndexError, OverflowError, TypeError, ValueError):
            got = in_one_line(json.dumps(answer).encode())
            raise Refused(f"{self.url}/{route}: expected choices, got {got}") from None

    # ---- losses -----------------------------------------------------------------------------------------------------
    def nats(self, ids: Sequence[int], tokenizer: Any, bos: int | None = None, skip: int = 0) -> list[float]:
        """-ln p of the tokens after the first and `skip` more, each given those before it."""
        if self.forced:  # in order, so that the server computes one token for each
            return [-self.next_token(ids[:at], ids[at])[1] for at in range(skip + 1, len(ids))]
        with as_documented("completions"):
            choice = self.choice("completions", self._sent(ids), **self.echoed(ids, tokenizer, bos))
            numbers = (choice.get("logprobs") or {}).get("token_logprobs")
            if not numbers or len(numbers) < 2:
                raise Refused("completions with echo and logprobs give no log-probabilities of a prompt")
            # The generated token may be included. If text was sent without its BOS, it must be: otherwise a server that adds no
            # BOS, but includes that token, would give as many numbers, each of them its neighbor's.
            least = len(ids) + (self.text and bos is not None and ids[0] == bos)
            if not least <= len(numbers) <= len(ids) + 1:
                raise Refused(f"a prompt of {len(ids)} tokens of --tokenizer has {len(numbers)} of the server's")
            return [float("nan") if number is None else -logarithm(number) for number in numbers[skip + 1 : len(ids)]]

    def echoed(self, ids: Sequence[int], tokenizer: Any, bos: int | None = None) -> dict[str, Any]:
        """Content of the request for the log-probabilities of a prompt."""
        return {"prompt": self._prompt(ids, tokenizer, bos), "max_tokens": 1, "echo": True, "logprobs": 1}

    def next_token(self, ids: Sequence[int], forced: int | None = None) -> tuple[int, float]:
        """(the next token, its log-probability without any bias): the most likely one, or the one that is forced."""
        bias = {} if forced is None else {"logit_bias": {str(forced): FORCING}}
        with as_documented("completions"):
            choice = self.choice("completions", self._sent(ids), prompt=[*ids], max_tokens=1, logprobs=1, **bias)
            [generated] = (choice["logprobs"] or {})["content"]
            token, log_probability = int(generated["id"]), logarithm(generated["logprob"])
        if forced not in (None, token):
            raise Refused(f"completions gave token {token} where logit_bias asked for {forced}")
        return token, log_probability

    def require_raw(self, ids: Sequence[int]) -> None:
        """Raise Refused if a bias changes the log-probability of the token that is likeliest without it."""
        for at in range(1, len(ids)):
            token, free = self.next_token(ids[:at])
            if abs(self.next_token(ids[:at], token)[1] - free) > SAME:
                raise Refused("completions with logit_bias give log-probabilities with that bias")

    def _sent(self, ids: Sequence[int]) -> Callable[[], int]:
        """The fewest tokens that a server counts in a prompt: as text, some at its ends may become one."""
        return lambda: len(ids) - APART * self.text

    def _prompt(self, ids: Sequence[int], tokenizer: Any, bos: int | None) -> Any:
        """Token ids, or text that a server reads as these tokens."""
        if not self.text:
            return [*ids]
        ids = [*ids[1:]] if bos is not None and ids[0] == bos else [*ids]
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise Refused("the server reads text alone, and text does not give these tokens back: a window cuts a word")
        return text

    # ---- answers ----------------------------------------------------------------------------------------------------
    def answers(self, prompts: Sequence[Prompt], tokenizer: Any) -> Iterator[tuple[str, bool]]:
        """Answers in the order of the prompts; several are asked at a time."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            yield from pool.map(partial(self.answer, tokenizer), prompts)

    def answer(self, tokenizer: Any, prompt: Prompt) -> tuple[str, bool]:
        """The greedy answer to a prompt, without the thinking before it, and whether it ended at the limit of its tokens.

        A plain completion goes on to its limit, so only a chat tells that an answer was cut.
        """
        route, content = self.question(tokenizer, prompt)
        sent = partial(self._sent_as_message, tokenizer, prompt.text) if self.chat else self._sent(prompt.ids)
        with as_documented(route):
            text, at_limit = self.text_of(self.choice(route, sent, **content))
        if self.thinking:
            ids = encode(tokenizer, text.lstrip(), "never")[: prompt.new_tokens]
            text = tokenizer.decode(ids, skip_special_tokens=True)
        return text, at_limit

    def question(self, tokenizer: Any, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """Route and content of the request for an answer to a prompt."""
        if self.chat:
            messages = [{"role": "user", "content": prompt.text}]
            return "chat/completions", {"messages": messages, "max_tokens": prompt.new_tokens + self.thinking}
        ids = self._prompt(prompt.ids, tokenizer, tokenizer.bos_token_id)
        return "completions", {"prompt": ids, "max_tokens": prompt.new_tokens}

    def text_of(self, choice: Any) -> tuple[str, bool]:
        """The text of a choice without the thinking before it, and whether it ended at the limit of its tokens."""
        if not self.chat:
            return "" + choice["text"], False  # a text of another type raises TypeError
        text = without_thinking((choice.get("message") or {}).get("content") or "")
        return text, choice.get("finish_reason") == "length"

    def _sent_as_message(self, tokenizer: Any, text: str) -> int:
        """The fewest tokens that a server counts in a message: its template adds some, of which some merge with the text."""
        return len(encode(tokenizer, text, "never")) - APART

    # ---- before anything is measured --------------------------------------------------------------------------------
    def checked(self, ids: Sequence[int] | None, bos: int | None, tokenizer: Any, asks: bool) -> Endpoint:
        """The server with the first form of prompts that works: token ids, text, or a request per token if it echoes neither.

        UsageError unless it gives losses of `ids`, if there are any, and answers a question, if `asks`.
        """
        expected = SUCH + ", whose completions with echo give log-probabilities of a prompt" * (ids is not None)
        hello: Any = SimpleNamespace(ids=encode(tokenizer, "Hello"), text="Hello", new_tokens=1)
        problem = ""
        for server in (self, replace(self, text=True), *([replace(self, forced=True)] if ids is not None else [])):
            first = replace(server, timeout=FIRST_TIMEOUT)
            try:
                if asks and not first.forced:
                    first.answer(tokenizer, hello)
                if ids is not None and first.forced:
                    first.require_raw(ids)
                if ids is not None:
                    first.nats(ids, tokenizer, bos)
                return server
            except Unreachable as error:
                raise UsageError("--endpoint", SUCH, str(error)) from None
            except Refused as error:
                problem = problem if server.forced else str(error)
                if remedy := self.remedy(error):  # prompts as text have the same answer
                    raise UsageError("--endpoint", SUCH, problem, remedy) from None
        others = "--tasks other than perplexity do without log-probabilities" if ids is not None else ""
        raise UsageError("--endpoint", expected, problem, others)

    def remedy(self, refused: Refused) -> str:
        """Advice on a key or the name of a model that the server refuses; empty for other reasons."""
        if refused.code in (401, 403):
            return f"set {KEY} to a key of this server"
        named = re.search(rf"(?<!\w){re.escape(self.model)}(?!\w)", str(refused).partition(": HTTP ")[2])
        if refused.code == 404 and named:  # else the server has no such route
            return f"give --model a name that {self.url}/models lists"
        return ""


@contextmanager
def as_documented(route: str) -> Iterator[None]:
    """Raise Refused for an answer that lacks a field, or has one of another type."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{route}: the answer is not as OpenAI documents it ({error})") from error


def logarithm(number: Any) -> float:
    """A log-probability. Refused if it is none: a perplexity from it would be below 1."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not number <= ABOVE:
        raise Refused(f"completions gave {number!r} as a log-probability, which is 0 or less")
    return min(0.0, float(number))


def without_thinking(text: str) -> str:
    """The text after the thinking; empty if the thinking did not end."""
    for begin, end in THOUGHTS:
        _, mark, rest = text.rpartition(end)
        if mark or text.lstrip().startswith(begin):
            return rest if mark else ""
    return text


class ServerReader(Reader):
    """Reader of windows on a server, several at a time."""

    def __init__(self, server: Endpoint, tokenizer: Any, bos: int | None):
        super().__init__(stand_in(), bos)
        self.server, self.tokenizer = server, tokenizer

    def losses(self, tokens: Tensor, skip: int) -> Tensor:
        """Tokens [B, T + 1] -> -ln p of tokens skip + 1..T, [B, T - skip], in float64."""
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            read = partial(self.server.nats, tokenizer=self.tokenizer, bos=self.bos, skip=skip)
            return torch.tensor([*pool.map(read, tokens.tolist())], dtype=torch.float64)


def stand_in() -> Any:
    """A model without weights, whose rows say that it is on a server."""
    model: Any = nn.Module()
    model.config, model.dtype = SimpleNamespace(attention_backend="server"), "unknown"
    return model


class ServerTokenizer:
    """Tokens of prompts by the routes tokenize and detokenize, which vLLM and llama.cpp have."""

    bos_token_id = eos_token_id = chat_template = None

    def __init__(self, server: Endpoint):
        self.server, self.root = server, server.url.removesuffix("/v1")

    def __call__(self, text: str, **_: Any) -> BatchEncoding:
        # vLLM calls the text prompt, llama.cpp content
        return BatchEncoding({"input_ids": self._field("tokenize", list, ("tokens",), prompt=text, content=text)})

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return self._field("detokenize", str, ("prompt", "content"), tokens=[*ids])

    def _field(self, route: str, kind: type, names: tuple[str, ...], **content: Any) -> Any:
        remedy, where = "", f"{self.root}/{route}"
        try:
            answer = self.server.post(where, **content)
            problem = f"{where}: {in_one_line(json.dumps(answer).encode())}"
        except Refused as error:
            answer, problem, remedy = None, str(error), self.server.remedy(error)
        except Unreachable as error:
            raise UsageError("--endpoint", SUCH, str(error)) from None
        values = [answer.get(name) for name in names] if isinstance(answer, dict) else []
        for value in values:
            if isinstance(value, kind) and (not isinstance(value, list) or all(type(token) is int for token in value)):
                return value
        expected = f"--tokenizer FOLDER, or a server that counts tokens ({self.root}/tokenize and detokenize)"
        remedy = remedy or "lengths are in tokens: name the model's folder with --tokenizer"
        raise UsageError("--endpoint", expected, problem, remedy)
