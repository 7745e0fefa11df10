"""Prompts of retrieval: the published texts, fitted to a length and never cut, and the published scores."""

import re
from collections import Counter
from itertools import product
from random import Random

import pytest
from tokenizers.processors import TemplateProcessing

from longitude.checkpoints.load import byte_tokenizer
from longitude.errors import UsageError
from longitude.measure.retrieval import TASKS, haystack, prompts, tasks
from longitude.measure.retrieval.measurement import plan
from longitude.measure.retrieval.prompts import DoesNotFit, Question, check, encode, fit
from longitude.statistics import proportions
from tests.measure.conftest import byte_pairs
from tests.support import refused

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
BYTE_PAIRS = byte_pairs([" ".join(haystack.of_python().words[:8000]), NOISE], 600, bos_token="<s>")
TOKENIZERS = {"bytes": byte_tokenizer(), "byte pairs": BYTE_PAIRS}


def question(name, *, length=4096, depth=None, trial=0, seed=0, text=None) -> Question:
    asked = plan(name, [length], None if depth is None else [depth], 1, seed)
    around = asked.haystack if text is None else haystack.Haystack(tuple(text.split()), "a text")
    return asked.task.draw(Random(f"{seed}/{trial}"), length, depth, around)


# ---- the published texts ---------------------------------------------------------------------------------------------
def test_the_passkey_prompt_is_the_published_one():
    # landmark attention, llama/run_test.py: filler repeated, cut after so many letters, on both sides of the line
    asked = question("passkey", depth=0.25)
    [key] = asked.answers
    assert asked.text(400) == "\n".join([
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.",
        f"{NOISE} The grass ",
        f"The pass key is {key}. Remember it. {key} is the pass key.",
        f"{NOISE} {NOISE} {NOISE} The grass is green. The sky is",
        "What is the pass key? The pass key is",
    ])  # fmt: skip
    keys = [int(question("passkey", trial=trial).answers[0]) for trial in range(100)]
    assert all(10000 <= key <= 50000 for key in keys) and len(set(keys)) > 90


def test_needle_prompts_are_the_published_ones():
    # RULER, scripts/data/synthetic: template and answer prefix; one needle is put in the singular
    asked = question("needle-filler", depth=0.5)
    [number] = asked.answers
    key = re.findall(r"for (\S+) is: \d{7}\.", asked.needles[0])[0]
    assert asked.text(2) == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{NOISE}\nOne of the special magic numbers for {key} is: {number}.\n{NOISE}\n"
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    asked = question("needle-multi-query", text="Lorem ipsum.")
    keys = [re.findall(r"for (\S+) is:", needle)[0] for needle in asked.needles]
    numbers = dict(zip(keys, [re.findall(r"\d{7}", needle)[0] for needle in asked.needles]))
    queries = re.findall(r"for (\S+), (\S+), (\S+), and (\S+) mentioned", asked.ask)[0]
    assert asked.text(0) == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the numbers afterwards.\n{' '.join(asked.needles)}\n"
        "What are all the special magic numbers for {0}, {1}, {2}, and {3} mentioned in the provided text? "
        "The special magic numbers for {0}, {1}, {2}, and {3} mentioned in the provided text are".format(*queries)
    )
    assert sorted(queries) == sorted(keys) and asked.answers == tuple(numbers[key] for key in queries)
    asked = question("needle-multi-query", trial=1)  # in an order of its own
    assert asked.answers != tuple(re.findall(r"\d{7}", " ".join(asked.needles)))


@pytest.mark.parametrize(
    ("name", "needles", "keys", "answers"),
    [("needle-single", 1, 1, 1), ("needle-multi-key", 4, 4, 1), ("needle-multi-value", 4, 1, 4), ("needle-multi-query", 4, 4, 4)],
)  # fmt: skip
def test_numbers_of_needles_keys_and_answers(name, needles, keys, answers):
    asked = question(name)
    found = [re.fullmatch(r"One of the special magic numbers for (\S+) is: (\d{7})\.", each) for each in asked.needles]
    assert len(found) == needles and len({each[1] for each in found}) == keys and len(asked.answers) == answers
    assert set(asked.answers) <= {each[2] for each in found} and len({each[2] for each in found}) == needles
    assert all(each[1] in asked.ask for each in found if each[2] in asked.answers)


def test_variable_tracking_is_the_published_puzzle():
    # RULER vt: 1 chain of 4 hops, a solved example of shorter names before it
    asked = question("variable-tracking")
    a, b, c, d, e = asked.answers
    example, puzzle = re.split(r"\n\n\n\n", asked.text(1))
    value = re.findall(r"VAR \w+ = (\d{5})", puzzle)[0]
    assert puzzle == (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"VAR {a} = {value} VAR {b} = VAR {a}  VAR {c} = VAR {b}  VAR {d} = VAR {c}  VAR {e} = VAR {d}  {NOISE}\n\n"
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
    )
    shown = re.findall(r"VAR ([A-Z]{3}) =", example)
    assert example.endswith(f"they are: {' '.join(shown)}") and len(shown) == 5 and example.count(NOISE) == 5
    assert value not in example


@pytest.mark.parametrize(("size", "often", "seldom", "example"), [(4096, 30, 3, (40, 10, 3)), (4095, 6, 1, (20, 3, 1))])
def test_common_words_have_the_published_numbers(size, often, seldom, example):
    # RULER cwe: 10 words 30 times, others 3 times; below 4096 tokens 6 and 1
    asked = question("common-words", length=size)
    first, second = asked.text(100).split("\nBelow is a numbered list of words.")
    listed = [re.findall(r"(\d+)\. ([a-z-]+)", text[: text.index("\nQuestion")]) for text in (first, second)]
    assert all([int(number) for number, _ in items] == list(range(1, len(items) + 1)) for items in listed)
    shown, counts = (Counter(word for _, word in items) for items in listed)
    assert sorted(counts.values()) == [seldom] * 90 + [often] * 10
    assert {word for word, count in counts.items() if count == often} == set(asked.answers)
    assert sorted(shown.values()) == [example[2]] * (example[0] - 10) + [example[1]] * 10
    top = [word for word, _ in shown.most_common(10)]
    solved = re.findall(r"\d+\. ([a-z-]+)", first[first.index("appear most often in the list are:") :])
    assert sorted(top) == sorted(solved)
    assert asked.ask == (
        "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
        "the list are:"
    )


def test_frequent_words_follow_the_published_zeta_law():
    # RULER fwe, alpha 2: 1000 / (1.644934 k^2) = 607.9, 151.98, 67.5, 37.99, 24.3, 16.9, ... rounded down
    asked = question("frequent-words")
    text = asked.text(1000)
    coded = text.removeprefix(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        "coded words. "
    ).removesuffix(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    ranked = Counter(coded.split()).most_common()
    assert [count for _, count in ranked[:6]] == [607, 151, 67, 37, 24, 16]
    assert ranked[0][0] == "..." and tuple(word for word, _ in ranked[1:4]) == asked.answers
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


def test_frequent_words_are_clear_from_the_smallest_text():
    asked = question("frequent-words")
    for size in range(asked.smallest, 400):
        coded = asked.text(size).partition("coded words. ")[2].partition("\nQuestion")[0]
        counts = Counter(coded.split())
        top = {word for word, _ in counts.most_common(4)}
        assert top == {"...", *asked.answers}
        assert min(counts[word] for word in top) > max((counts[word] for word in counts if word not in top), default=0)


# ---- fitted and never cut ----------------------------------------------------------------------------------------------
def occurrences(name, asked, text) -> list[int]:
    """How often each answer stands in a prompt, after the solved example."""
    end = {"variable-tracking": "\n\n\n\n", "common-words": "\nBelow"}.get(name)
    found = Counter(re.findall(r"\w+", text.partition(end)[2] if end else text))
    return [found[each] for each in asked.answers]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_full_and_whole(name, tokenizer):
    tokens, expected = TOKENIZERS[tokenizer], {"passkey": [2], "variable-tracking": [2, 2, 2, 2, 1]}
    for length in (500, 1024, 2200, 3000, 7000, 12345):
        asked = plan(name, [length], None, 1)
        try:
            prompt = asked.prompt(tokens, length, None, 0)
        except DoesNotFit:
            assert length < 3000 or name == "common-words" and length < 7100
            continue
        assert 0.9 * length <= prompt.tokens <= length
        assert prompt.tokens == len(prompt.ids) + prompt.new_tokens
        read = tokens.decode(prompt.ids, skip_special_tokens=True)
        assert read.endswith(prompt.question.ask) and all(read.count(needle) == 1 for needle in prompt.question.needles)
        found = occurrences(name, prompt.question, read)
        if name != "frequent-words":
            assert found == expected.get(name, found[:1] * len(found))  # all equally often
        assert not name.startswith("needle") or set(found) == {1}


CHAT = (
    "{% for each in messages %}<|{{ each.role }}|>\n{{ each.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", TASKS)
def test_a_chat_has_the_question_as_a_message_and_begins_the_answer(name):
    """With the template's tokens counted; without the template, or without a wish for it, the plain text."""
    tokens = byte_pairs([" ".join(haystack.of_python().words[:8000]), NOISE], 600, bos_token="<s>", pad_token="<|end|>")
    length = 6000 if name == "common-words" else 2600
    plain = plan(name, [length], None, 1).prompt(tokens, length, None, 0)
    tokens.chat_template = CHAT
    asked = plan(name, [length], None, 1)
    prompt = asked.prompt(tokens, length, None, 0)
    assert length - 400 < prompt.tokens <= length
    text = tokens.decode(prompt.ids)
    begin = prompt.question.begin.strip()
    assert begin and text.startswith("<|user|>\n") and text.endswith(f"<|end|>\n<|assistant|>\n{begin}")
    message = text.split("<|end|>")[0].removeprefix("<|user|>\n")
    assert message.endswith(prompt.question.ask.removesuffix(prompt.question.begin).rstrip())
    assert begin not in message[-40:]
    if prompt.needles:
        first, last = prompt.needles
        assert prompt.question.needles[0].split()[1] in tokens.decode(prompt.ids[first:last])
    assert plan(name, [length], None, 1, chat=False).prompt(tokens, length, None, 0).ids == plain.ids


@pytest.mark.slow
def test_questions_depend_on_the_seed_and_not_on_the_tokenizer():
    for name in TASKS:

        def ids_and_answers(seed=0, length=4000, trial=0, tokens=BYTE_PAIRS, name=name):
            prompt = plan(name, [length], None, 1, seed).prompt(tokens, length, None, trial)
            return prompt.ids, (prompt.question.answers, prompt.question.text(30))

        first = ids_and_answers()
        assert ids_and_answers() == first and ids_and_answers(tokens=TOKENIZERS["bytes"])[1] == first[1]
        others = (ids_and_answers(seed=1), ids_and_answers(trial=1), ids_and_answers(length=3999))
        for drawn in zip(first[1], *(each for _, each in others)):
            assert len({*drawn}) == 4


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.depths])
def test_the_needle_stands_at_its_depth(name):
    tokens, length = TOKENIZERS["bytes"], 5_000
    for depth in (0, 0.1, 0.5, 0.75, 1):
        prompt = plan(name, [length], [depth], 1).prompt(tokens, length, depth, 0)
        [needle] = [each.encode() for each in prompt.question.needles]
        text = tokens.decode(prompt.ids).encode()  # a byte is a token
        assert prompt.needles == (text.index(needle), text.index(needle) + len(needle))
        head = text.index(b"\n") + 1  # the task's description
        body = len(text) - head - len(prompt.question.ask) - len(needle)
        assert prompt.needles is not None
        assert (prompt.needles[0] - head) / body == pytest.approx(depth, abs=0.03)


def test_a_beginning_stays_and_an_end_does_not():
    assert encode(BYTE_PAIRS, "abc")[0] != BYTE_PAIRS.bos_token_id
    tokens = byte_pairs([NOISE], 300, bos_token="<s>", eos_token="<s>")
    tokens.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    assert tokens("abc")["input_ids"] == [0, *encode(tokens, "abc")[1:], 0] and encode(tokens, "abc")[0] == 0
    assert plan("passkey", [700], None, 1).prompt(tokens, 700, 0.5, 0).ids[0] == 0


class Cutting:
    """A tokenizer that silently keeps some of the tokens."""

    eos_token_id, decode = None, TOKENIZERS["bytes"].decode

    def __init__(self, kept):
        self.kept = kept

    def __call__(self, text, **_):
        return {"input_ids": TOKENIZERS["bytes"](text)["input_ids"][self.kept]}


def test_a_tokenizer_that_cuts_is_refused():
    asked = plan("passkey", [1024], None, 1)
    for most, kept in product((200, 600, 1000), (slice, lambda most: slice(-most, None))):
        with refused("tokenizer", "model_max_length"):
            asked.prompt(Cutting(kept(most)), 1024, 0.0, 0)
    assert asked.prompt(Cutting(slice(1100)), 1024, 0.0, 0).tokens == 1024  # nothing is cut


def test_a_prompt_that_is_not_whole_is_refused():
    asked = question("needle-multi-value", text="Lorem ipsum. Dolor sit amet.")
    text = asked.text(5)
    check(asked, text, text.upper().replace(" ", ""))  # what some tokenizers do not keep
    for broken in (text[:-1], text[300:], text.replace(asked.answers[2], "1"), asked.needles[0] + text):
        with refused("prompt", "tokenizer"):
            check(asked, text, broken)
        with refused("prompt", "tokenizer"):
            check(asked, broken, text)


def test_a_question_that_does_not_fit():
    with pytest.raises(DoesNotFit, match="takes 257 tokens"):  # 247 letters and 10 new tokens
        plan("passkey", [200], None, 1).prompt(TOKENIZERS["bytes"], 200, 0.5, 0)
    asked = Question(text=lambda size: "x" * (size + 90), ask="x", answers=("x",), whole_answer="y" * 30)
    assert fit(asked, TOKENIZERS["bytes"], 120, 10).tokens == 120
    with pytest.raises(DoesNotFit):
        fit(asked, TOKENIZERS["bytes"], 119, 10)


def test_new_tokens_are_the_published_ones_unless_the_answer_is_longer():
    published = {"passkey": 10, "variable-tracking": 30, "common-words": 120, "frequent-words": 50}
    published |= dict.fromkeys(("needle-city", "needle-country"), 32)
    assert {name: task.new_tokens for name, task in TASKS.items()} == dict.fromkeys(TASKS, 128) | published
    asked = Question(text=lambda size: "x" * size, ask="x", smallest=1, answers=("x",), whole_answer="z" * 77)
    assert [fit(asked, TOKENIZERS["bytes"], 200, new).new_tokens for new in (10, 78)] == [77, 78]


# ---- haystacks ----------------------------------------------------------------------------------------------------------
def test_needles_stand_between_sentences():
    text = haystack.Haystack(tuple("One two three. Four five six seven. Eight!".split()), "a text")
    assert text.with_needles(8, ["N."], [0.5]) == "One two three. N. Four five six seven. Eight!"
    assert text.with_needles(8, ["A.", "B."], [0.0, 1.0]) == "A. One two three. Four five six seven. Eight! B."
    assert text.with_needles(8, ["A.", "B."], [0.4, 0.41]) == "One two three. A. B. Four five six seven. Eight!"
    assert text.with_needles(11, ["N."], [0.8]) == "One two three. Four five six seven. Eight! N. One two three."
    whole = "One two three. Four five six seven. Eight!"
    assert text.with_needles(16, ["N."], [10 / 16]) == f"{whole} One two three. N. Four five six seven. Eight!"
    flat = haystack.Haystack(("word",) * 1000, "a text")
    assert flat.with_needles(500, ["N."], [0.5]).split().index("N.") == 250


# ---- scores, and what is refused ----------------------------------------------------------------------------------------
def test_scores_are_the_published_ones():
    number = tasks.first_number
    assert [number(output, ["12345"]) for output in (" 12345.", "12345 67", "is 12345", "012345")] == [1] * 4
    assert [number(output, ["12345"]) for output in ("", " 1234", " 123456", "7 12345", "12,345", "none")] == [0] * 6
    assert tasks.match_all("ABC, def and 12", ["abc", "DEF", "ghi", "12"]) == 0.75
    assert tasks.match_all("xabcx", ["abc"]) == 1 and tasks.match_all("a b c", ["abc"]) == 0


def test_intervals_are_wilsons():
    # Brown, Cai and DasGupta 2001: (p + z^2/2n +- z sqrt(p q / n + z^2/4n^2)) / (1 + z^2/n), z = 1.96
    expected = {(10, 10): (0.7225, 1.0), (0, 10): (0.0, 0.2775), (8, 10): (0.4902, 0.9433), (25, 50): (0.3664, 0.6336)}
    for (right, count), interval in expected.items():
        value, *got = proportions.mean([1.0] * right + [0.0] * (count - right))
        assert value == right / count and got == pytest.approx(interval, abs=1e-4)
    assert proportions.mean([0.75, 0.25])[0] == 0.5 and proportions.mean([0.5])[1] < 0.5 < proportions.mean([0.5])[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "passkeys"}, ("'passkeys'", "'passkey'")),
        ({"depths": []}, ("depths", "none")),
        ({"task": "common-words", "depths": [0.5]}, ("common-words", "depths")),
    ],
)
def test_wrong_options(options, words):
    with refused(*words):
        plan(**{"task": "passkey", "lengths": [512], "depths": None, "trials": 1} | options)


@pytest.mark.parametrize("task", ["needle-city", "needle-country"])
def test_a_needle_and_its_question_share_no_word(task):
    """But for the line of the question's own form: every landmark, both steps, as NoLiMa wants it."""
    common = set("the character has been to only answer with name of is which actually lives next".split())
    for seed in range(20):
        question = TASKS[task].draw(Random(seed), 512, 0.5, haystack.of_python())
        [needle], [name] = question.needles, question.answers
        words = [set(re.findall(r"\w+", text.lower())) - common for text in (needle, question.ask)]
        assert not words[0] & words[1] and name.lower() in words[0]
        assert question.text(300).count(needle) == 1 and question.text(300).endswith(question.ask)


LONG = "{% for a in range(200) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='12345678') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param(DOUBLED, "GB of memory", marks=pytest.mark.slow),
        (LONG, "0.1 s"),
        ("{{ raise_exception('only tools') }}", "only tools"),
        ("{{ messages.nothing.inside }}", "nothing"),
        ("{% for", "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_that_cannot_be_rendered_is_one_sentence(template, words, monkeypatch) -> None:
    """It is a program of the checkpoint, in a sandbox that limits neither time nor memory."""
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.1 if template is LONG else 60)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=words) as error:
        plan("passkey", [400], None, 1).require_prompt(tokenizer, None)
    assert "--no-chat" in error.value.remedy
