"""Servers with the API of OpenAI and vLLM, healthy or with one known fault, whose answers a rule gives and not a model.

    with listening(FAULTS["modulo-4"]()) as url: ...

FAULTS names them. Log-probabilities are those of a tiny Llama, which `Served.save` writes to a folder as it would be healthy.
"""

import hashlib
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from random import Random
from threading import RLock, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.measure.retrieval.haystack import FILLER, of_python
from longitude.measure.retrieval.tasks import MANY, ONE, PASSKEY, PASSKEY_ASK, PASSKEY_OPENING
from tests.measure.conftest import byte_pairs

TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
RESET = struct.pack("ii", 1, 0)
"""Of a connection: it does not wait until what was sent is read."""
HOLE = "\ufffc"
"""Stands in a text for tokens that are not visible."""
SURE = -0.25
"""Log-probability of what is generated."""


class Reply(NamedTuple):
    """An answer by HTTP."""

    content: Any
    code: int = 200
    headers: dict[str, str] = {}


class Died(Exception):
    """The connection is reset."""


@contextmanager
def listening(model: Any) -> Iterator[str]:
    """The address of a server; threads call model.respond(route, JSON or None) -> Reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self.reply(None)

        def reply(self, content: Any) -> None:
            try:
                reply = model.respond(self.path, content)
            except Died:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.connection.close()
                return
            body = json.dumps(reply.content).encode()
            self.send_response(reply.code)
            for name, value in {**reply.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@cache
def english() -> Any:
    """A tokenizer of a token for each digit, and one to three for a word, with a chat template."""
    prose = " ".join(of_python().words[:12000])
    corpus = [FILLER, PASSKEY_OPENING, PASSKEY, PASSKEY_ASK, *ONE, *MANY, prose]
    letters = ["".join(letter for letter in text if not letter.isdigit()) for text in corpus]
    special = {"eos_token": "<|end|>", "sep_token": "<|user|>", "cls_token": "<|assistant|>"}
    tokenizer = byte_pairs(letters, 2000, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# ---- a model, and what may be wrong with it --------------------------------------------------------------------------
Sees = Callable[[Tensor, Tensor], Tensor]
"""(positions of queries, positions of keys) -> whether it sees it, of keys up to itself."""


@dataclass(kw_only=True)
class Served:
    """A model behind the routes of OpenAI's API and vLLM's own; it is healthy unless told otherwise.

    name: its id. right: the share of prompts with a right answer, chosen by a hash of the prompt.
    factor, theta, window: of the Llama's linear scaling, RoPE, and attention.
    Of faults: digit: (modulus, remainder) of lengths with a wrong last digit. sees: what is visible. limit, head, tells: prompts
    are cut to `limit` tokens after the first `head`, and whether usage tells it. thinks: (length, tokens of thinking above it,
    their field). before: what comes instead of the answer to a request, counted from 0. placed: the positions that are rotated
    by. base, computed_window: with what log-probabilities are computed, where theta and window would be right.
    asked: requests by route.
    """

    name: str = "served"
    right: float = 1.0
    max_model_len: int = 8192
    factor: float = 4.0
    theta: float = 10000.0
    window: int | None = None
    digit: tuple[int, int] = (1, 1)
    sees: Sees = lambda query, key: key <= query
    limit: int = 10**9
    head: int = 0
    tells: bool = True
    thinks: tuple[int, int, str] = (10**9, 0, "")
    before: Callable[[int], Reply | None] = lambda request: None
    placed: Callable[[Tensor], Tensor] = lambda positions: positions
    base: float | None = None
    computed_window: int | None = None
    asked: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=RLock)

    def reads(self, ids: list[int]) -> list[int]:
        """The tokens that the model computes on."""
        return ids if len(ids) <= self.limit else ids[: self.head] + ids[self.head - self.limit :]

    def unsettled(self, count: int) -> int:
        """What the answer to a prompt of `count` tokens depends on besides the prompt."""
        return 0

    # routes
    def respond(self, route: str, content: Any) -> Reply:
        if route == "/v1/models":
            return Reply({"object": "list", "data": [{"id": self.name, "max_model_len": self.max_model_len}]})
        with self.lock:
            self.asked[route] += 1
            instead = self.before(self.asked.total() - 1)
        if instead:
            return instead
        routes = {"/v1/completions": self.completion, "/v1/chat/completions": self.chat}
        if content is None or route not in routes:
            return refused(f"no route {route}", 404)
        try:
            return Reply(routes[route](content))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return refused(str(error), 400)

    def completion(self, content: Any) -> dict[str, Any]:
        """A prompt is echoed, and a token follows."""
        ids = ids_of(content["prompt"])
        logprobs = {"token_logprobs": [*self.log_probabilities(ids), SURE]}
        return self.answered({"text": "", "logprobs": logprobs}, ids, 1, 1)

    def chat(self, content: Any) -> dict[str, Any]:
        said = "".join(f"<|user|>{message['content']}<|end|>" for message in content["messages"])
        ids = ids_of(said + "<|assistant|>")
        most = content.get("max_completion_tokens") or content.get("max_tokens") or self.max_model_len - len(ids)
        thoughts = min(most, self.thinks[1] if len(ids) > self.thinks[0] else 0)
        new = ids_of(f"{self.number(ids)}.")
        kept = new[: most - thoughts]
        message: dict[str, Any] = {"role": "assistant", "content": text_of(kept)}
        if thoughts:
            message[self.thinks[2]] = " well" * thoughts
            message["content"] = text_of(kept) or (
                None if self.thinks[2] == "reasoning" else ""
            )  # as newer vLLM has it
        choice = {"message": message, "finish_reason": "length" if len(kept) < len(new) else "stop"}
        return self.answered(choice, ids, most, thoughts + len(kept))

    def answered(self, choice: dict[str, Any], ids: list[int], most: int, new: int) -> dict[str, Any]:
        if len(ids) + most > self.max_model_len:
            limit = f"This model's maximum context length is {self.max_model_len} tokens"
            raise ValueError(f"{limit}, requested were {most} in the completion and {len(ids)} in the prompt")
        count = len(self.reads(ids) if self.tells else ids)
        usage = {"prompt_tokens": count, "completion_tokens": new, "total_tokens": count + new}
        return {"model": self.name, "choices": [choice], "usage": usage}

    # answers
    def number(self, ids: list[int]) -> str:
        """The number asked for, as it is seen."""
        read = self.reads(ids)
        seen = self.visible(torch.tensor(len(read) - 1), torch.arange(len(read))).tolist()
        runs = [(shown, [*run]) for shown, run in groupby(zip(read, seen, strict=True), lambda pair: pair[1])]
        visible = "".join(lines_of([token for token, _ in run]) if shown else HOLE for shown, run in runs)
        chance = Random(hashlib.sha256(json.dumps(ids).encode()).hexdigest())
        number = stated(visible, lines_of(ids))
        if number is None or chance.random() >= self.right:
            number = wrong(number or "12345", chance)
        salt = self.unsettled(len(ids))
        number = wrong(number, Random(salt)) if salt else number
        if len(ids) % self.digit[0] == self.digit[1]:
            number = number[:-1] + str((int(number[-1]) + 3) % 10)
        return number

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & self.sees(query, key) | (key == query)

    # log-probabilities
    def built(self, theta: float) -> Any:
        """The tiny model, with the same weights in all servers."""
        kind = "mistral" if self.window else "llama"
        size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": len(english())}
        size |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.25}
        rope = {"rope_type": "linear", "factor": self.factor, "rope_theta": theta}
        more = {"max_position_embeddings": self.max_model_len, "bos_token_id": None, "rope_parameters": rope}
        more |= {"sliding_window": self.window} if self.window else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, eos_token_id=english().eos_token_id, **size, **more)
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

    @cached_property
    def model(self) -> Any:
        return self.built(self.base or self.theta)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint as it would be served without a fault: for --reference and --tokenizer."""
        self.built(self.theta).save_pretrained(folder)
        english().save_pretrained(folder)
        return folder

    def log_probabilities(self, ids: list[int]) -> list[float | None]:
        """ln p of each token given those before it, None for the first; made up where the prompt was cut, and usage tells all."""
        read = torch.tensor([Served.reads(self, ids)])  # no prefix cache has the log-probabilities of a prompt
        place = torch.arange(read.shape[1])
        distance = place[:, None] - place
        mask = self.visible(place[:, None], place) & (distance < (self.computed_window or self.window or 10**9))
        inputs = {"position_ids": self.placed(place)[None], "attention_mask": mask[None, None], "use_cache": False}
        with self.lock, torch.no_grad():
            out = self.model(read, **inputs)
        scores = out.logits[0, :-1].log_softmax(-1).gather(1, read[0, 1:, None])[:, 0]
        values = [None, *scores.tolist()]
        return values[: self.head + 1] + [-7.0] * (len(ids) - len(values)) + values[self.head + 1 :]


def ids_of(prompt: str | list[int]) -> list[int]:
    plain = english().backend_tokenizer
    return plain.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else [*map(int, prompt)]


def text_of(ids: list[int]) -> str:
    return english().backend_tokenizer.decode(ids, skip_special_tokens=False)


def lines_of(ids: list[int]) -> str:
    """Text with a line for each message."""
    return re.sub(r"<\|\w+\|>", "\n", text_of(ids))


def refused(message: str, code: int, **headers: str) -> Reply:
    return Reply({"error": {"message": message, "code": code}}, code, headers)


def stated(visible: str, whole: str) -> str | None:
    """The number that the visible text has for what the last question asks; one that lost a digit is none."""
    keys = re.findall(r"number for (\S+) mentioned", whole)
    numbers = re.findall(rf"{keys[-1]}\D{{1,9}}(\d{{7}})\b", visible) if keys else []
    return numbers[-1] if numbers else None


def wrong(number: str, chance: Random) -> str:
    """Another number of as many digits."""
    first = chance.choice([digit for digit in "123456789" if digit != number[0]])
    return first + "".join(str(chance.randrange(10)) if digit.isdigit() else digit for digit in number[1:])


@dataclass(kw_only=True)
class Stale(Served):
    """Prompts with the same key share what stands in the whole blocks of the first.

    key: (tokens, tokens in whole blocks) -> their name in a cache. slots: where prefixes are written in turn, while the index
    keeps what was overwritten; None: nothing is.
    """

    block: int
    key: Callable[[list[int], int], Any]
    slots: int | None = None
    tells: bool = False
    index: dict[Any, int] = field(default_factory=dict)
    memory: dict[int, list[int]] = field(default_factory=dict)

    def reads(self, ids: list[int]) -> list[int]:
        size = (len(ids) - 1) // self.block * self.block
        with self.lock:
            key = self.key(ids, size)
            if key not in self.index:
                self.index[key] = len(self.index) % (self.slots or 10**9)
                self.memory[self.index[key]] = ids[:size]
            return self.memory[self.index[key]][:size] + ids[size:]


@dataclass(kw_only=True)
class Unsteady(Served):
    """About every third answer to prompts above a length is another; `batch`: if others are asked at the same time.

    gathers: seconds in which requests become a batch.
    """

    beyond: int
    batch: bool = False
    gathers: float = 0.02
    begun: int = 0
    active: int = 0

    def unsettled(self, count: int) -> int:
        with self.lock:
            self.begun, self.active = self.begun + 1, self.active + 1
            order, beside = self.begun, self.active > 1
        time.sleep(self.gathers * (self.batch and count > self.beyond))
        with self.lock:
            self.active -= 1
            beside |= self.begun > order
        other = count > self.beyond and (beside or not self.batch) and Random(order).random() < 1 / 3
        return order * other


# ---- faults by name --------------------------------------------------------------------------------------------------
def border(block: int, lost: int) -> Sees:
    """One key of each block is lost, except for queries in this block."""
    return lambda query, key: (key % block != lost) | (key // block == query // block)


def ring(slots: int) -> Sees:
    return lambda query, key: (query - key) % slots != slots - 1


def ends(beyond: int, first: int, last: int) -> Sees:
    """Queries from a position on see the first and the last keys."""
    return lambda query, key: (query < beyond) | (key < first) | (query - key < last)


def divided(beyond: int, factor: float) -> Callable[[Tensor], Tensor]:
    return lambda place: torch.where(place < beyond, place.double(), beyond + (place - beyond) / factor)


def dies(after: int) -> Callable[[int], Reply | None]:
    def before(request: int) -> None:
        if request >= after:
            raise Died

    return before


def busy(code: int, first: int, count: int) -> Callable[[int], Reply | None]:
    return lambda n: refused("busy", code, **{"Retry-After": "1"}) if first <= n < first + count else None


FAULTS: dict[str, Callable[..., Served]] = {
    "modulo-4": partial(Served, digit=(4, 3)),  # a wrong last digit at lengths of 3 modulo 4
    "modulo-16": partial(Served, digit=(16, 5)),
    "border-64": partial(Served, sees=border(64, 63)),  # the last key of each block is lost
    "border-128": partial(Served, sees=border(128, 0)),  # the first key of each block
    "ring-256": partial(Served, sees=ring(256)),  # each 256th key back from the end
    "ring-96": partial(Served, sees=ring(96)),
    # prompts of a length and last block share a prefix; those that share each fourth block do; after 8 others it is another's
    "stale-length": partial(Stale, block=16, key=lambda ids, size: (len(ids), *ids[size - 16 : size])),
    "stale-blocks": partial(
        Stale, block=32, key=lambda ids, size: (size, *(tuple(ids[at : at + 32]) for at in range(0, size, 128)))
    ),
    "stale-slots": partial(Stale, block=16, slots=8, key=lambda ids, size: (*ids[:size],)),
    "window-1024": partial(Served, sees=ends(2048, 64, 1024)),
    "window-700": partial(Served, sees=ends(1500, 16, 700)),
    "cut-start": partial(Served, limit=2048),  # the last 2,048 are read, as usage tells
    "cut-start-silent": partial(Served, limit=1500, tells=False),
    "cut-middle": partial(Served, limit=2400, head=1200),
    "cut-middle-silent": partial(Served, limit=1500, head=400, tells=False),
    "unsteady-600": partial(Unsteady, beyond=600),
    "unsteady-1500": partial(Unsteady, beyond=1500),
    "batch-1000": partial(Unsteady, beyond=1000, batch=True),
    "batch-300": partial(Unsteady, beyond=300, batch=True),
    "factor-twice": partial(Served, placed=divided(0, 4.0)),
    "factor-twice-2": partial(Served, placed=divided(0, 2.0), factor=2.0),
    "factor-long": partial(Served, placed=divided(512, 4.0)),  # positions from 512 on are divided once more
    "factor-long-2": partial(Served, placed=divided(1000, 8.0)),
    "base": partial(Served, base=1e6),
    "base-2": partial(Served, base=1e4, theta=5e5),
    "window-added": partial(Served, computed_window=256),
    "window-added-2": partial(Served, computed_window=700),
    "window-lost": partial(Served, window=256, computed_window=10**9),
    "window-wider": partial(Served, window=300, computed_window=600),
    "hidden-1000": partial(Served, thinks=(1000, 400, "reasoning_content")),  # tokens of thinking above a length
    "hidden-500": partial(Served, thinks=(500, 200, "reasoning")),
}
