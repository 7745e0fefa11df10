"""`transformers serve` and llama.cpp: `measure --endpoint` gets the answers and losses of the checkpoint itself."""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longitude.checkpoints.load import byte_tokenizer
from longitude.measure.retrieval.measurement import plan
from tests.measure.conftest import build

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]

LENGTHS, TRIALS = (560, 620), 2
STARTED = 120.0
"""Seconds after which a server should answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "llama"
    build("llama", max_position_embeddings=640).save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}[{{ each.role }}]{{ each.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder):
    """The address of `transformers serve`."""
    for library in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(library, reason="what serves is not installed: pip install 'transformers[serving]'")
    options = ["--host", "127.0.0.1", "--device", "cpu", "--port"]
    with serving("-m", "transformers.cli.transformers", "serve", str(folder), *options) as address:
        yield address


@contextmanager
def serving(*arguments: str):
    """The address of a server in a process of its own. arguments: of Python, before the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, *arguments, str(port)], env=os.environ | {"HF_HUB_OFFLINE": "1"})
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTED
    try:
        while True:
            try:
                urlopen(f"{address}/health", timeout=5).close()
                break
            except URLError:
                assert process.poll() is None and time.monotonic() < until, "the server does not answer"
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def answers(command, tmp_path):
    """answers(*arguments) -> what is answered to each question."""

    def call(*arguments: object) -> list[dict]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        asked = ["--tasks", "passkey", "needle-single", "--lengths", *LENGTHS, "--trials", TRIALS, "--depths", 0.5]
        code, _, error = command("measure", *arguments, *asked, "--no-trained", "--out", out)
        assert code == 0, error
        return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]

    return call


def test_completions_are_those_of_the_checkpoint(folder, url, answers) -> None:
    served = answers("--endpoint", url, "--model", folder, "--tokenizer", folder, "--no-chat")
    own = answers(folder, "--no-chat", "--device", "cpu")
    assert len(own) == 8 and len({each["generated"] for each in own}) > 1
    assert [(each["task"], each["generated"]) for each in served] == [(each["task"], each["generated"]) for each in own]


def test_a_chat_is_the_template_by_hand(folder, url, answers) -> None:
    """Which the server fills in: the whole question, and with it the start of the answer, is the message."""
    found = answers("--endpoint", url, "--model", folder, "--tokenizer", folder)
    served = [each["generated"] for each in found if each["task"] == "passkey"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked, own = replace(plan("passkey", LENGTHS, [0.5], TRIALS), begins=False), []
    for length, trial in product(LENGTHS, range(TRIALS)):
        prompt = asked.prompt(tokenizer, length, 0.5, trial)
        ids = torch.tensor([tokenizer(f"[user]{prompt.text}[assistant]").input_ids])
        assert ids.shape[1] + prompt.new_tokens == length
        out = model.generate(ids, max_new_tokens=prompt.new_tokens, do_sample=False, pad_token_id=0)
        own.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert served == own


def test_laws_of_a_server_raise_no_alarm(folder, url, command, tmp_path) -> None:
    """The model answers no question, so laws that count answers cannot judge; equal calls have equal answers."""
    laws = ["repeatable", "prefix", "depth", "counts"]
    given = ["--model", folder, "--tokenizer", folder, "--length", 800, "--laws", *laws, "--out", tmp_path, "--json"]
    code, out, error = command("check", url, *given)
    status = {law["law"]: law["status"] for law in json.loads(out)["laws"]}
    assert code == 3, error
    assert status == dict(zip(laws, ("passed", "unknown", "unknown", "passed")))


# ---- llama.cpp ---------------------------------------------------------------------------------------------------------
WRITE = Path(__file__).parents[2] / "examples" / "write_gguf.py"
LLAMA_CPP = """
import sys, time, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.hostnames, given.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
given.n_ctx, given.n_parallel, given.cpuparams.n_threads = 256, 1, 1
server = xllamacpp.Server(given)
time.sleep(600)
"""


def test_llama_cpp_has_the_perplexity_of_the_checkpoint(folder, command, tmp_path) -> None:
    """Which has no echo: token by token, in the engine's own code."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed: pip install xllamacpp")
    gguf = pytest.importorskip("gguf")

    class WithTokens(gguf.GGUFWriter):
        def add_tokenizer_model(self, model: str) -> None:  # without a vocabulary it does not answer
            super().add_tokenizer_model("gpt2")
            self.add_token_list([f"t{i}" for i in range(AutoTokenizer.from_pretrained(folder).vocab_size)])
            self.add_token_merges(["t1 t2"])

    with patch.object(gguf, "GGUFWriter", WithTokens):
        runpy.run_path(str(WRITE))["write"](folder, file := tmp_path / "served.gguf")
    asked = ["--lengths", 32, 64, "--documents", 1, "--no-trained", "--json"]
    code, own, error = command("measure", folder, *asked, "--device", "cpu", "--out", tmp_path / "own")
    assert code == 0, error
    with serving("-c", LLAMA_CPP, str(file)) as url:
        given = ["--endpoint", url, "--model", "served", "--tokenizer", folder, "--concurrency", 1]
        code, served, error = command("measure", *given, *asked, "--out", tmp_path / "served")
    assert code == 0, error
    values = [[row["value"] for row in json.loads(rows)] for rows in (served, own)]
    assert len(values[0]) > 6 and values[0] == pytest.approx(values[1], rel=2e-3)  # its cache is in float16
