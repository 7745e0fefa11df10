"""`longitude measure --endpoint`: a server in this process serves a tiny checkpoint, and measuring it gives what measuring the
checkpoint itself gives."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longitude.checkpoints.load import Checkpoint, byte_tokenizer
from longitude.measure import transport
from longitude.measure.config import METHODS, MeasureConfig, require_consistent
from longitude.measure.endpoint import Endpoint, stand_in, without_thinking
from longitude.measure.retrieval import run
from longitude.measure.retrieval.prompts import Prompt
from longitude.measure.transport import Refused, address
from tests.measure.conftest import write
from tests.served.server import Reply, listening
from tests.support import refused

TASKS = ["perplexity", "passkey", "needle-single", "needle-filler"]
ROUTES = ("/completions", "/chat/completions", "/tokenize", "/detokenize")
SIZES = ["--lengths", 320, 600]


class Model:
    """A checkpoint behind the routes of OpenAI's API; what goes wrong is told to it."""

    def __init__(self, folder: Path):
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.lock, self.asked = Lock(), Counter()
        self.fails: list[int] = []
        self.echoes, self.text_alone = True, False
        self.forces: str | None = None
        self.reads, self.ends, self.above = 10**9, "stop", 0.0

    def respond(self, route: str, content: Any) -> Reply:
        with self.lock:
            self.asked[route] += 1
            if self.fails:
                return Reply({}, self.fails.pop(0))
            if route.removeprefix("/v1") not in ROUTES:
                return Reply({}, 404)
            try:
                return Reply(self.answer(route, content))
            except ValueError as error:
                return Reply({"error": {"message": str(error)}}, 400)

    def ids(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.text_alone:
            raise ValueError("prompt must be a string")
        return prompt

    def generated(self, ids: list[int], count: int) -> str:
        out = self.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)

    def answer(self, route: str, asked: dict) -> dict:
        if route == "/tokenize":
            return {"tokens": self.ids(asked["prompt"])}
        if route == "/detokenize":
            return {"prompt": self.tokenizer.decode(asked["tokens"])}
        if route == "/v1/chat/completions":
            [message] = asked["messages"]
            text = self.generated(self.ids(message["content"]), asked["max_tokens"])
            usage = {"prompt_tokens": min(self.reads, len(self.ids(message["content"])))}
            message = {"role": "assistant", "content": text}
            return {"choices": [{"message": message, "finish_reason": self.ends}], "usage": usage}
        if self.forces and "logprobs" in asked and not self.echoes:
            return {"choices": [self.next_token(self.ids(asked["prompt"]), asked.get("logit_bias", {}))]}
        if not asked.get("echo"):
            return {"choices": [{"text": self.generated(self.ids(asked["prompt"]), asked["max_tokens"])}]}
        ids = self.ids(asked["prompt"])
        with torch.no_grad():
            found = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        given = [None, *(float(found[i, ids[i + 1]]) + self.above for i in range(len(ids) - 1)), -1.0]
        choice = {"text": "", "logprobs": {"token_logprobs": given} if self.echoes else None}
        return {"choices": [choice], "usage": {"prompt_tokens": min(self.reads, len(ids))}}

    def next_token(self, ids: list[int], bias: dict[str, float]) -> dict:
        """As llama.cpp has it; `forces` is whether the log-probability is "raw", "biased", or that of a token "at will"."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        free, biased = logits, logits.clone()
        for token, more in bias.items():
            biased[int(token)] += more
        given = free if self.forces == "raw" else biased
        token = int((free if self.forces == "at will" else biased).argmax())
        content = [{"id": token, "logprob": float(given.log_softmax(-1)[token])}]
        return {"text": "", "logprobs": {"content": content}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("served"), "llama", max_position_embeddings=512)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.0)


@pytest.fixture
def measured(command, text, tmp_path):
    """measured(*arguments) -> (exit code, rows of --json, the last line of errors)."""

    def call(*arguments: object, out: str = "run", tasks: list[str] = TASKS):
        given = [*SIZES, "--tasks", *tasks, "--out", tmp_path / out, "--json"]
        given += ["--text", text, "--documents", 2] if "perplexity" in tasks else []
        given += ["--trials", 2] if {*tasks} != {"perplexity"} else []
        given += ["--depths", 0.5] if "passkey" in tasks else []
        given += [] if "--endpoint" in arguments else ["--device", "cpu"]
        code, printed, error = command("measure", *arguments, *given)
        return code, json.loads(printed) if printed else None, error.strip().rpartition("\n")[2]

    return call


def numbers(rows: list[dict]) -> list[dict]:
    """Rows without what a server does not tell, or has by another name."""
    unlike = ("model", "label", "encoding", "dtype", "backend", "prefill", "commit", "bos")
    rows = [{name: value for name, value in row.items() if name not in unlike} for row in rows]
    return [row | {"method": re.sub(", (in|as) .*", "", row["method"])} for row in rows]


def answers(folder: Path) -> list[dict]:
    lines = (folder / "answers.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "model"} for line in lines]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.slow
def test_rows_are_those_of_the_checkpoint(chat, folder, measured, tmp_path) -> None:
    options = [] if chat else ["--no-chat", "--methods", *METHODS, "same-targets"]
    code, own, _ = measured(folder, *options, out="own")
    assert code == 0
    with listening(Model(folder)) as url:
        code, rows, _ = measured("--endpoint", url, "--model", "served/llama", "--tokenizer", folder, *options)
    assert code == 0 and {row["label"] for row in rows} == {"llama"} and {row["backend"] for row in rows} == {"server"}
    assert len(rows) == len(own) > 20 and {row["task"] for row in rows} == {"text", *TASKS[1:]}
    for got, want in zip(numbers(rows), numbers(own), strict=True):
        floats = {name: value for name, value in want.items() if isinstance(value, float)}
        assert got == want | {name: pytest.approx(value, rel=1e-4) for name, value in floats.items()}
    begun = {row["task"]: row["bos"] for row in rows}
    assert begun == dict.fromkeys(TASKS[1:], "by the server" if chat else "none") | {"text": "none"}
    assert (said := answers(tmp_path / "run")) == answers(tmp_path / "own") and any(each["generated"] for each in said)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_what_fails_is_sent_again(folder, measured) -> None:
    """500, 429 and 503 in turn; what stays away is told, and what is refused is not sent again."""
    model, given = Model(folder), ["--model", "m", "--tokenizer", folder]
    with listening(model) as url:
        code, want, _ = measured("--endpoint", url, *given, tasks=["perplexity"])
        model.fails = [500, 429, 503]
        again = measured("--endpoint", url, *given, out="again", tasks=["perplexity"])
        assert again[:2] == (code, want) and not model.fails
        model.fails = [500] * transport.ATTEMPTS * 2
        code, _, error = measured("--endpoint", url, *given, out="never", tasks=["perplexity"])
        assert code == 2 and "HTTP 500" in error
        model.fails, before = [401], model.asked.total()
        with pytest.raises(Refused, match="401"):
            Endpoint(address(url), "m").post(f"{url}/v1/completions")
        assert model.asked.total() == before + 1


@pytest.mark.slow
def test_perplexity_without_echo_is_that_of_each_token_in_turn(folder, text, command, tmp_path) -> None:
    """Of llama.cpp, which has no echo: the next token is forced by a bias, and its log-probability is that without it."""
    model = Model(folder)
    asked = ["--model", "m", "--tokenizer", folder, "--text", text, "--documents", 1, "--no-trained"]
    asked += ["--lengths", 16, 24]

    def measured(out: str) -> tuple[int, str, str]:
        return command("measure", "--endpoint", url, *asked, "--methods", "sliding", "--out", tmp_path / out, "--json")

    with listening(model) as url:
        want = json.loads(measured("echo")[1])
        model.echoes, model.forces = False, "raw"
        rows = json.loads(measured("forced")[1])
        assert len(rows) == 4 and [row["value"] for row in rows] == [pytest.approx(row["value"]) for row in want]
        for model.forces in ("biased", "at will"):
            code, _, error = measured("no")
            assert code == 2 and "log-probabilities" in error


@pytest.mark.slow
def test_a_server_of_text_and_without_a_tokenizer(folder, measured, tmp_path) -> None:
    """Prompts as text where ids are refused; its own count of tokens for questions, and one line where text is to be cut."""
    model = Model(folder)
    with listening(model) as url:
        given = ["--endpoint", url, "--model", "m", "--no-trained"]
        code, want, _ = measured(*given, "--tokenizer", folder, tasks=["passkey"])
        code, rows, _ = measured(*given, tasks=["passkey"], out="counted")
        assert code == 0 and numbers(rows) == [row | {"train_length": None} for row in numbers(want)]
        assert answers(tmp_path / "counted") == answers(tmp_path / "run")
        assert model.asked["/tokenize"] > 0
        code, _, error = measured(*given, out="no")
        assert code == 2 and "--tokenizer" in error
        model.text_alone = True
        plain = [*given, "--tokenizer", folder, "--no-chat"]
        assert measured(*plain, tasks=["passkey"], out="text")[0] == 0


def test_thinking_is_not_scored() -> None:
    assert without_thinking("<think>a</think>b") == "b" and without_thinking("a</think> b") == " b"
    assert without_thinking("<think>a") == "" and without_thinking("b") == "b"
    assert without_thinking("[THINK]a[/THINK]b") == "b" and without_thinking("[THINK]a") == ""


def test_a_message_holds_the_start_of_the_answer() -> None:
    """A server cannot be told how its answer begins; with the template its message has the length asked for."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    asked: list[Prompt] = []
    server: Any = SimpleNamespace(described="", chat=True)
    server.answers = lambda prompts, _: [asked.append(each) or ("1", False) for each in prompts]
    [row] = run(Checkpoint(stand_in(), tokenizer, None, ""), "passkey", lengths=[400], trials=2, server=server)  # pyright: ignore[reportArgumentType]
    assert row.count == 2 and row.window is not None and 300 < row.window <= 400 and row.bos == "by the server"
    for prompt in asked:
        message = [{"role": "user", "content": prompt.text}]
        sent = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert prompt.text.endswith("The pass key is") and tokenizer(sent)["input_ids"] == prompt.ids


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "localhost:8000", "{url}/wrong"])
def test_no_server_is_one_line_and_nothing_is_written(where, folder, measured, tmp_path) -> None:
    with listening(Model(folder)) as url:
        given = ["--endpoint", where.format(url=url), "--model", "m", "--tokenizer", folder]
        code, rows, error = measured(*given)
    assert (code, rows) == (2, None) and error.startswith("longitude: ") and not (tmp_path / "run").exists()


SERVED = {"endpoint": "http://a/v1", "model": "m", "tasks": ("passkey",)}
OTHERS = {"model": None, "dtype": "float32", "chunk": 8, "bos": "never", "endpoint": None}


@pytest.mark.parametrize("options", [*({name: OTHERS[name]} for name in OTHERS), {"thinking": 9, "chat": False}])
def test_options_of_a_server_and_of_a_checkpoint_exclude_each_other(options) -> None:
    with refused():
        require_consistent(MeasureConfig(**SERVED | options))


WORDS = {"text": 1, "logprobs": {"token_logprobs": ["a", "b", "c"]}}


@pytest.mark.parametrize("choices", [["x"], [{}], [{"text": None, "logprobs": "no"}], [WORDS]])
def test_answers_of_another_shape_are_refused(choices, monkeypatch):
    monkeypatch.setattr(Endpoint, "post", lambda *_, **__: {"choices": choices})
    server, prompt = Endpoint("http://a:1/v1", "m"), SimpleNamespace(ids=[1, 2], text="a", new_tokens=1)
    none = SimpleNamespace(bos_token_id=None)
    for call in (lambda: server.nats([1, 2, 3], None), lambda: replace(server, chat=False).answer(none, prompt)):
        with pytest.raises(Refused):
            call()


def test_of_text_without_bos_the_token_after_it_must_be_there(monkeypatch):
    """A server that adds no BOS would score every token as its neighbor, in as many numbers as one that omits the last token."""

    class Letters:
        def __call__(self, text, **_):
            return {"input_ids": [*map(ord, text)]}

        def decode(self, ids):
            return "".join(map(chr, ids))

    tokens = Letters()
    server = replace(Endpoint("http://a:1/v1", "m"), text=True)
    found = [None, -1.0, -2.0, -3.0]
    monkeypatch.setattr(Endpoint, "post", lambda *_, **__: {"choices": [{"logprobs": {"token_logprobs": found}}]})
    assert server.nats([0, 65, 66], tokens, bos=0) == [1.0, 2.0]
    del found[3]
    with pytest.raises(Refused):
        server.nats([0, 65, 66], tokens, bos=0)


@pytest.mark.parametrize("task", ["passkey", pytest.param("perplexity", marks=pytest.mark.slow)])
def test_a_server_that_cuts_prompts_measures_nothing(task, folder, measured) -> None:
    """It answers what it read, and 0% would be said of tokens that it never saw: the length has no row, and exit code 1."""
    model = Model(folder)
    model.reads = 400.0  # as some servers write it
    with listening(model) as url:
        given = ["--endpoint", url, "--model", "m", "--tokenizer", folder, "--no-trained"]
        given += ["--methods", "non-overlapping"] if task == "perplexity" else []
        code, rows, error = measured(*given, tasks=[task])
    assert code == 1 and {row["length"] for row in rows} == {320} and "400" in error


def test_answers_at_the_limit_are_noted_and_marked(folder, command, tmp_path) -> None:
    model = Model(folder)
    model.ends = "length"
    with listening(model) as url:
        given = ["--endpoint", url, "--model", "m", "--tokenizer", folder, "--tasks", "passkey", "--trials", 2]
        code, _, error = command("measure", *given, *SIZES, "--depths", 0.5, "--no-trained", "--out", tmp_path / "run")
    assert code == 0 and error.count("2 of 2 answers") == 2
    assert all(answer["at_limit"] for answer in answers(tmp_path / "run"))


def test_log_probabilities_above_0_are_refused(folder, measured) -> None:
    model = Model(folder)
    model.above = 9.0
    with listening(model) as url:
        code, rows, error = measured("--endpoint", url, "--model", "m", "--tokenizer", folder, tasks=["perplexity"])
    assert (code, rows) == (2, None) and "0 or less" in error
