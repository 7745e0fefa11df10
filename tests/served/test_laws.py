"""`longitude check http://...`: healthy servers raise no alarm, and each planted fault is named by the law that it breaks."""

import json
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from longitude.checkpoints.load import byte_tokenizer
from longitude.errors import UsageError
from longitude.measure import transport
from longitude.measure.endpoint import Endpoint
from longitude.measure.retrieval.prompts import encode
from longitude.measure.transport import address
from longitude.runs.store import Store
from longitude.served import run
from longitude.served.calls import Answer, Call, Served, Trial
from longitude.served.laws import CALLS, LAWS, PATTERNS, suspects
from longitude.testing.engine import LawBroken, Unknown
from tests.served import server as servers
from tests.served.server import FAULTS, listening

FOUND = {
    "length_classes": ("modulo-4", "modulo-16"),
    "borders": ("border-64", "border-128", "ring-256", "ring-96"),
    "prefix": ("stale-length", "stale-blocks", "stale-slots"),
    "depth": ("window-1024", "window-700", "cut-start-silent", "cut-middle-silent"),
    "counts": ("cut-start", "cut-middle", "hidden-1000", "hidden-500"),
    "repeatable": ("unsteady-1500", "unsteady-600", "batch-1000", "batch-300"),
    "by_position": (
        "factor-twice", "factor-twice-2", "factor-long", "factor-long-2", "base", "base-2", "window-added", "window-added-2",
        "window-lost", "window-wider",
    ),
}  # fmt: skip
"""The planted faults by the law that has to find them."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch) -> None:
    monkeypatch.setattr(transport, "PAUSE", 0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    servers.english().save_pretrained(folder)
    return folder


def unasked(tmp_path, longest: int = 4096) -> Served:
    """A server that nobody asks."""
    return Served(Endpoint("http://none/v1", "m"), servers.english(), longest, None, 0, False, Store(tmp_path))


@contextmanager
def connected(model, out, tokenizer, laws=(), **more):
    with listening(model) as url:
        server = Endpoint(address(url), "served")
        yield run.connect(server, out, tokenizer=str(tokenizer), **more), LAWS.chosen(laws)


def judged(model, out, tokenizer, **more):
    """Results by law of a server's model."""
    with connected(model, out, tokenizer, **more) as (served, laws):
        return run.check(served, laws, lambda *_: None, lambda: None), served


def test_prompts_have_the_tokens_that_calls_name(tmp_path):
    served = unasked(tmp_path)
    first, last = served.edges
    for length, places in ((first + last + 130, (first + 3,)), (700, (101,)), (1003, (200, 600))):
        call = Call(law="", length=length, places=places, text=length)
        prompt = served.prompt_of(call)
        assert len(prompt.ids) == length
        for place, needle in zip(places, prompt.question.needles):
            assert len(encode(served.tokenizer, prompt.text[: prompt.text.index(needle) - 1])) == place


def answered(served: Served, law: str, is_wrong) -> None:
    """Answer the calls of a law, wrongly where is_wrong(tokens, place, Random) says so."""
    random = Random(0)

    def trial(call: Call) -> Trial:
        return Trial(call, Answer(sent=call.length), not is_wrong(call.length, call.places[0], random))

    served.answered[law] = [trial(call) for group in CALLS[law](served) for call in group]
    again = suspects(served, law) if law in PATTERNS else []
    served.confirmed[law] = {pattern.name: [trial(call) for call in calls] for pattern, calls in again}


@pytest.mark.parametrize("part", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("law", [*PATTERNS])
def test_wrong_answers_by_chance_are_no_finding(tmp_path, law, part):
    served = unasked(tmp_path)
    answered(served, law, lambda tokens, place, random: random.random() < part)
    LAWS[law].test(served)


@pytest.mark.parametrize(
    ("law", "is_wrong", "name"),
    [
        ("length_classes", lambda tokens, place: tokens % 4 == 3, "3 modulo 4"),
        ("length_classes", lambda tokens, place: tokens % 128 == 77, "77 modulo 128"),
        ("depth", lambda tokens, place: tokens - place > 1500, "farther than"),
        ("borders", lambda tokens, place: place % 64 in range(40, 52), "modulo 64"),
        ("borders", lambda tokens, place: (tokens - place) % 128 in range(20, 40), "from the end, modulo 128"),
        ("borders", lambda tokens, place: tokens in (512, 1024, 2048, 4096), "prompts of"),
    ],
)
@pytest.mark.parametrize("part", [0.0, 0.05])
def test_a_pattern_of_wrong_answers_is_named(tmp_path, law, is_wrong, name, part):
    served = unasked(tmp_path)
    answered(served, law, lambda tokens, place, random: is_wrong(tokens, place) or random.random() < part)
    with pytest.raises(LawBroken, match=name):
        LAWS[law].test(served)
    assert not served.evidence[law].right


def test_a_model_that_answers_nothing_is_not_blamed(tmp_path):
    served = unasked(tmp_path)
    answered(served, "length_classes", lambda tokens, place, random: True)
    with pytest.raises(Unknown):
        LAWS["length_classes"].test(served)


@pytest.mark.parametrize("law", [*PATTERNS])
def test_no_two_calls_share_a_key_or_a_number(tmp_path, law):
    served = unasked(tmp_path)
    served.trials = 2
    pairs = [served.pairs_of(call)[0] for group in CALLS[law](served) for call in group]
    keys, numbers = zip(*pairs)
    assert len({*keys}) > 0.99 * len(pairs) and len({*numbers}) > 0.99 * len(pairs)


def test_counts_of_another_tokenizer_or_of_nothing_are_no_finding(tmp_path):
    served = unasked(tmp_path)
    with pytest.raises(Unknown, match="other laws"):
        LAWS["counts"].test(served)
    calls = [Call(law="depth", length=n, places=(9,)) for n in (400, 900)]
    served.answered["depth"] = [
        Trial(call, Answer(sent=call.length, read=call.length * 9 // 10), True) for call in calls
    ]
    with pytest.raises(Unknown, match="--tokenizer"):
        LAWS["counts"].test(served)


@pytest.mark.parametrize(("length", "longest"), [(None, 2000), (900, 900), (2040, 2000), (9000, 2000)])
def test_prompts_leave_room_for_an_answer(tmp_path, tokenizer, length, longest):
    with connected(servers.Served(max_model_len=2048), tmp_path, tokenizer, length=length) as (served, _):
        assert longest - 8 <= served.longest <= longest + 8
        assert (served.beyond is None) == (length == 900)


def test_no_declared_length_is_believed(tmp_path, tokenizer):
    longest = servers.Served(max_model_len=10**12)
    with pytest.raises(UsageError, match="--length"), connected(longest, tmp_path, tokenizer):
        pass


@pytest.mark.parametrize("before", [servers.dies(20), servers.busy(429, 20, 10**9), servers.busy(502, 20, 10**9)])
def test_a_server_that_dies_loses_no_answer(tmp_path, tokenizer, before):
    model = servers.Served(max_model_len=2048)
    with connected(model, tmp_path, tokenizer, laws=("prefix",)) as (served, laws):
        alive, model.before = model.before, before
        with pytest.raises(UsageError, match="the same command continues"):
            run.check(served, laws, lambda *_: None, lambda: None)
        model.before, asked = alive, model.asked.total()
        kept = sum(path.name.startswith("call-") for path in (tmp_path / "units").iterdir())
        run.check(served, laws, lambda *_: None, lambda: None)
        assert kept > 5
        assert model.asked["/v1/chat/completions"] and model.asked.total() - asked == 40 - kept


def test_the_command_names_a_fault_and_shows_its_request(tmp_path, tokenizer, command, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-mine")
    with listening(FAULTS["unsteady-600"](max_model_len=2048)) as url:
        given = ["--model", "served", "--tokenizer", tokenizer, "--laws", "repeatable", "--out", tmp_path, "--json"]
        code, out, _ = command("check", url, *given)
    [law] = json.loads(out)["laws"]
    assert code == 1 and law["status"] == "failed" and f"@{tmp_path}" in law["request"]
    assert json.loads((tmp_path / "repeatable.json").read_text())["messages"]
    assert not any("secret-of-mine" in path.read_text() for path in tmp_path.rglob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for names in FOUND.values() for name in names])
def test_each_planted_fault_is_named(tmp_path, tokenizer, name):
    [law] = [law for law, names in FOUND.items() if name in names]
    model = FAULTS[name](max_model_len=4096)
    more: dict[str, Any] = {"laws": (law, "depth") if law == "counts" else (law, *LAWS[law].rests_on)}
    if law == "by_position":
        model.save(reference := tmp_path / "reference")
        more["reference"] = str(reference)
    results, _ = judged(model, tmp_path / "run", tokenizer, **more)
    assert results[law].status == "failed", results


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_server_raises_no_alarm(tmp_path, tokenizer, seed):
    model = servers.Served(right=(1.0, 0.95, 0.8)[seed % 3], max_model_len=2048)
    results, _ = judged(model, tmp_path / "run", tokenizer, seed=seed)
    assert not [result for result in results.values() if result.status not in ("passed", "not applicable")]


def test_a_prefix_is_not_blamed_for_what_equal_calls_do(tmp_path):
    """Answers to equal calls differ now and then: those to a prompt asked again do, too, and no cache is at fault."""
    served = unasked(tmp_path)
    for law in ("repeatable", "prefix"):
        calls = [call for group in CALLS[law](served) for call in group]
        texts = [f"1{' ' * (i % 7 == 3)}2" for i in range(len(calls))]
        served.answered[law] = [Trial(call, Answer(text=text), True) for call, text in zip(calls, texts)]
    with pytest.raises(Unknown, match="equal calls"):
        LAWS["prefix"].test(served)
    served.answered.pop("repeatable")
    with pytest.raises(LawBroken, match="another answer than cold"):
        LAWS["prefix"].test(served)


def test_log_probabilities_that_are_no_numbers_are_not_judged(tmp_path, monkeypatch):
    served = unasked(tmp_path)
    served.echoes = True
    monkeypatch.setattr(Endpoint, "nats", lambda self, ids, *_: [float("nan")] * (len(ids) - 1))
    served.answered["by_position"] = served.ask(CALLS["by_position"](served))
    with pytest.raises(Unknown, match="no number"):
        LAWS["by_position"].test(served)


def test_prompts_of_another_tokenizer_are_other_calls(tmp_path):
    call = Call(law="depth", length=600, places=(100,))
    words, signs = unasked(tmp_path), unasked(tmp_path)
    signs.tokenizer = byte_tokenizer()
    assert words.unit(call).key == unasked(tmp_path).unit(call).key != signs.unit(call).key
