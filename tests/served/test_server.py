"""The healthy server is right, and each fault is where its description says, and not beside it."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from longitude.checkpoints.load import Checkpoint
from longitude.measure.endpoint import Endpoint, stand_in
from longitude.measure.retrieval import run
from longitude.measure.retrieval.haystack import FILLER
from tests.served import reader
from tests.served.server import FAULTS, Served, english, served

STATED, ASKED = " The number for amber-falcon is {}.", " What is the number for amber-falcon? It is"
NUMBER, OTHER = "48213", "90557"

PLACES = {
    "modulo-4": ((400, 50), (403, 50)), "modulo-16": ((400, 50), (405, 50)),
    "border-64": ((600, 256), (600, 250)), "border-128": ((600, 257), (600, 252)),
    "ring-256": ((700, 445), (700, 440)), "ring-96": ((700, 605), (700, 600)),
    "window-1024": ((2600, 1580), (2600, 1560)), "window-700": ((1600, 905), (1600, 890)),
    "cut-start": ((2148, 101), (2148, 98)), "cut-start-silent": ((1600, 101), (1600, 98)),
    "cut-middle": ((2500, 1301), (2500, 1290)), "cut-middle-silent": ((1600, 501), (1600, 490)),
}  # fmt: skip
"""(tokens of the prompt, place of the statement) of a right answer and a wrong one."""
STALE = "stale-length", "stale-blocks", "stale-slots"
UNSTEADY = {"unsteady-1500": 1500, "unsteady-600": 600, "batch-1000": 1000, "batch-300": 300}
DIFFERS = {
    "factor-twice": 1, "factor-twice-2": 1, "factor-long": 513, "factor-long-2": 1001, "base": 1, "base-2": 1,
    "window-added": 256, "window-added-2": 700, "window-lost": 256, "window-wider": 300,
}  # fmt: skip
"""The first position whose next token has another log-probability."""
HIDDEN = {"hidden-1000": 1000, "hidden-500": 500}
CODES = {
    "dies-20": [200] * 20 + [0] * 2, "dies-45": [200] * 45 + [0] * 2,
    "busy-429": [200] * 10 + [429] * 3 + [200], "busy-503": [200] * 25 + [503] * 4 + [200],
}  # fmt: skip


def test_all_faults_are_tested() -> None:
    assert {*FAULTS} == {*PLACES, *STALE, *UNSTEADY, *DIFFERS, *HIDDEN, *CODES}


@cache
def ids_of(text: str) -> list[int]:
    return english()(text)["input_ids"]


def prompt(length: int, at: int, number: str = NUMBER) -> list[int]:
    """Token ids: filler, with the statement from token `at` on, and the question at the end."""
    filler, stated, asked = ids_of(FILLER) * (length // 20), ids_of(STATED.format(number)), ids_of(ASKED)
    return [*filler[:at], *stated, *filler[: length - at - len(stated) - len(asked)], *asked]


def answer(model: Served, ids: list[int]) -> str:
    content = model.respond("/v1/completions", {"prompt": ids, "max_tokens": 12}).content
    return content["choices"][0]["text"].split(".")[0].strip()


@pytest.mark.parametrize("name", PLACES)
def test_what_is_lost(name: str) -> None:
    right, wrong = PLACES[name]
    model = FAULTS[name].build()
    assert answer(model, prompt(*right)) == NUMBER != answer(model, prompt(*wrong))
    usage = model.respond("/v1/completions", {"prompt": prompt(*right)}).content["usage"]
    assert usage["prompt_tokens"] == (min(model.limit, right[0]) if model.tells else right[0])


@pytest.mark.parametrize("name", STALE)
def test_what_belongs_to_another_prompt(name: str) -> None:
    model: Any = FAULTS[name].build()
    assert answer(model, prompt(400, 40)) == NUMBER
    assert {answer(model, prompt(400, 41 + more, OTHER)) for more in range(model.slots or 0)} <= {OTHER}
    last = (NUMBER, OTHER) if model.slots else (OTHER, NUMBER)
    assert answer(model, prompt(400, 40, last[0])) == last[1]
    assert answer(model, prompt(432, 40, "77777")) == "77777"


@pytest.mark.parametrize("name", UNSTEADY)
def test_what_is_not_the_same_twice(name: str) -> None:
    model: Any = FAULTS[name].build(gathers=0.003)
    below, above = (prompt(UNSTEADY[name] + more, 50) for more in (0, 1))
    alone = {answer(model, above) for _ in range(9)}
    with ThreadPoolExecutor(4) as pool:
        together, short = ({*pool.map(lambda ids: answer(model, ids), [ids] * 12)} for ids in (above, below))
    assert short == {NUMBER} < together and (alone == short) == model.batch


def log_probabilities(model: Served) -> list[float]:
    asked = {"prompt": prompt(1100, 50), "max_tokens": 1, "echo": True, "logprobs": 1}
    return model.respond("/v1/completions", asked).content["choices"][0]["logprobs"]["token_logprobs"][1:-1]


@cache
def healthy(**options: Any) -> list[float]:
    return log_probabilities(Served(**options))


@pytest.mark.parametrize("name", DIFFERS)
def test_where_log_probabilities_differ(name: str) -> None:
    model = FAULTS[name].build()
    right = healthy(factor=model.factor, theta=model.theta, window=model.window)
    differences = [abs(a - b) for a, b in zip(log_probabilities(model), right, strict=True)]
    first = next(at for at, difference in enumerate(differences) if difference > 1e-3)
    assert DIFFERS[name] <= first < DIFFERS[name] + 3 and sum(differences[first:]) > 0.4 * len(differences[first:])


@pytest.mark.parametrize("name", HIDDEN)
def test_an_answer_behind_thinking(name: str) -> None:
    def chat(length: int, **limit: int) -> tuple[str, bool, bool]:
        message = {"role": "user", "content": english().decode(prompt(length, 50))}
        choice = model.respond("/v1/chat/completions", {"messages": [message], **limit}).content["choices"][0]
        text, cut = choice["message"]["content"], choice["finish_reason"] == "length"
        return (text or "").rstrip("."), model.thinks[2] in choice["message"], cut

    model, length = FAULTS[name].build(), HIDDEN[name]
    assert chat(length + 20, max_tokens=100) == ("", True, True)
    assert chat(length + 20) == (NUMBER, True, False) and chat(length - 20, max_tokens=100) == (NUMBER, False, False)


@pytest.mark.parametrize("name", CODES)
def test_codes_of_requests_in_turn(name: str) -> None:
    def code() -> int:
        try:
            with urlopen(Request(f"{url}/tokenize", json.dumps({"prompt": "a"}).encode()), timeout=9) as reply:
                return reply.status
        except HTTPError as error:
            with error:
                return error.code if error.headers["Retry-After"] == "1" else -1
        except OSError:
            return 0

    with served(name) as url:
        assert [code() for _ in CODES[name]] == CODES[name]


@pytest.mark.parametrize("chat", [True, False])
def test_the_healthy_server_is_right(chat: bool) -> None:
    nothing: Any = None
    checkpoint = Checkpoint(stand_in(), english(), nothing, "")
    with served() as url:
        server = Endpoint(f"{url}/v1", "served", chat=chat)
        for task in ("passkey", "needle-single"):
            rows = run(checkpoint, task, lengths=[520, 1100], trials=2, chat=chat, server=server)
            assert [row.value for row in rows] == [1.0, 1.0]


def test_the_share_of_right_answers_is_that_asked_for() -> None:
    first, second = ([answer(Served(right=0.8), prompt(n, 50)) == NUMBER for n in range(150, 230)] for _ in range(2))
    assert first == second and 50 < sum(first) < 78


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        ("The code of A-1 is 1234. The code of B-2 is 5678. What is the code of A-1?", "1234"),
        ("5678 is Ann's number, and 1234 is Ben's number. Tell me Ben's number", "1234"),
        ("ann: 1234\nben: 5678\nann:", "1234"),
        ("What has row 250? Row 250 has 1234; row 251 has 5678. What has row 251? Row 251 has", "5678"),
        ("The codes of A are 1234 and 5678. The code of B is 9012. List all codes of A.", "1234, 5678"),
        ("The code of A is 12\ufffc4. What is the code of A?", None),
        ("The code\ufffcA is 1234. What is the code of A?", None),
    ],
)
def test_the_last_question_is_answered(visible: str, number: str | None) -> None:
    assert reader.read(visible, visible.replace("12\ufffc4", "1234").replace("\ufffc", " of ")) == number
