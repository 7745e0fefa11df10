"""A config.json read in the page against `longitude show`: random configurations of every family that the page reads."""

import json
import random

import pytest

from longitude.explore.families import ALIBI, BUCKETS, LEARNED, ROTARY
from longitude.show import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.browser]
DRAWS = 12
"""Of each family."""
INSIDE = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Where a model of text and images keeps its text model."""
READ = "text => { try { return readConfig(text); } catch (error) { return { refused: error.message }; } }"


def schemes(draws: random.Random) -> dict | None:
    """Parameters of a random type, as published files have them."""
    factor = draws.choice([2.0, 4, 8.0, 3.5])
    half = [draws.uniform(1, 9) for _ in range(4)]
    original = {"original_max_position_embeddings": draws.choice([512, 2048, 4096])}
    return draws.choice(
        [
            None,
            {},
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": factor},
            {"type": "linear", "factor": factor},
            {"type": "dynamic", "factor": factor},
            {"rope_type": "yarn", "factor": factor, **original},
            {"type": "yarn", "factor": factor},
            {
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": 24,
                "beta_slow": 2,
                "truncate": False,
                "mscale": 0.7,
                **original,
            },
            {"rope_type": "yarn", "factor": factor, "mscale": 1.0, "mscale_all_dim": 0.8, **original},
            {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
            {"rope_type": "longrope", "factor": factor, "short_factor": half, "long_factor": half, **original},
            {"type": "su", "short_factor": half, "long_factor": half},
        ]
    )


def config(family: str, draws: random.Random) -> dict:
    """A file as someone may have it: keys left out, old and new names, windows."""
    heads = draws.choice([4, 8, 16])
    raw = {
        "model_type": family,
        "hidden_size": heads * draws.choice([32, 64, 128]),
        "num_attention_heads": heads,
        "num_hidden_layers": draws.randrange(2, 40),
        "max_position_embeddings": draws.choice([1024, 4096, 32768, 131072]),
        "rope_theta": draws.choice([10000.0, 500000, 1e6, 12345.6]),
        "rope_scaling": schemes(draws),
        "head_dim": draws.choice([None, 64, 96, 128]),
        "partial_rotary_factor": draws.choice([0.25, 0.5, 1.0]),
        "sliding_window": draws.choice([None, 256, 4096]),
    }
    if family == "gpt_neox":
        raw |= {"rotary_emb_base": raw.pop("rope_theta"), "rotary_pct": raw.pop("partial_rotary_factor")}
    if family not in ROTARY:
        return {
            key: each for key, each in raw.items() if "rope" not in key and key not in ("head_dim", "sliding_window")
        }
    if draws.random() < 0.4:
        inner = {**(raw.pop("rope_scaling") or {"rope_type": "default"}), "rope_theta": 54321.0}
        raw["rope_parameters"] = inner
    for key in draws.sample([*raw][1:], draws.randrange(0, 7)):
        del raw[key]
    if draws.random() < 0.3:
        raw["sliding_window_pattern"] = draws.randrange(1, 9)
    if draws.random() < 0.3:
        raw["original_max_position_embeddings"] = draws.choice([256, 1024, 8192])
    if draws.random() < 0.2:
        raw |= {"use_sliding_window": draws.random() < 0.5, "max_window_layers": 3}
    return raw


def shown(path, raw) -> dict:
    """What `longitude show` says, or its refusal."""
    path.write_text(json.dumps(raw))
    try:
        return json.loads(json.dumps(checkpoint.facts(str(path), checkpoint.read(str(path)))))
    except ValueError as error:
        return {"refused": str(error)}


def same(page: dict, theirs: dict) -> None:
    """All facts that both have: the page's, to 1e-6."""
    for key in ("model_type", "kind", "trained", "declared", "layers"):
        assert page[key] == theirs[key], key
    assert [each["layers"] for each in page["rotations"]] == [each["layers"] for each in theirs["rotations"]]
    for ours, other in zip(page["rotations"], theirs["rotations"], strict=True):
        for key in ("base", "head_dim", "window", "pairs", "scheme", "turned"):
            assert ours[key] == other[key], key
        for key in ("turns", "attention_factor", "softmax_factor"):
            assert ours[key] == pytest.approx(other[key], rel=1e-6), key
        rows = {(row["factor"], row["scheme"]): row for row in ours["longer"]}
        assert rows.keys() == {(row["factor"], row["scheme"]) for row in other["longer"]}
        for row in other["longer"]:
            own = rows[row["factor"], row["scheme"]]
            numbers = [each for each in row if each != "scheme"]
            assert [own[each] for each in numbers] == pytest.approx([row[each] for each in numbers], rel=1e-6), row


@pytest.fixture(scope="module")
def read(chromium, written):
    """raw -> what the page makes of it."""
    page = chromium.new_page(offline=True)
    page.goto(written.as_uri())
    yield lambda raw: page.evaluate(READ, raw if isinstance(raw, str) else json.dumps(raw))
    page.close()


@pytest.mark.parametrize("family", [*ROTARY, *LEARNED, *ALIBI, *BUCKETS])
def test_random_files_of_a_family(family, read, tmp_path):
    draws, answered = random.Random(family), 0
    for draw in range(DRAWS):
        raw = config(family, draws)
        if family in INSIDE:
            raw = {"model_type": family, "text_config": {**raw, "model_type": INSIDE[family]}}
        ours, theirs = read(raw), shown(tmp_path / "config.json", raw)
        if "refused" in ours or any("refused" in row for each in ours["rotations"] for row in each["longer"]):
            continue  # it says nothing, so nothing false
        assert "refused" not in theirs, (draw, raw, theirs)
        same(ours, theirs)
        answered += 1
    assert answered


# ---- files as they are published, and what is none --------------------------------------------------------------------
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FILES = {
    "llama3": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    },
    "yarn": {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "linear": {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "plain": {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768},
    "two bases": {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "partial": {
        "model_type": "gpt_neox",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "hidden_size": 2048,
        "num_attention_heads": 8,
    },
    "longrope": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48},
    },
    "alibi": {"model_type": "bloom", "n_layer": 24, "n_head": 16, "hidden_size": 1024},
    "buckets": {"model_type": "t5", "num_layers": 12, "n_positions": 512},
    "learned": {"model_type": "gpt2", "n_positions": 2048},
}


@pytest.mark.parametrize("name", FILES)
def test_published_shapes(name, read, tmp_path):
    same(read(FILES[name]), shown(tmp_path / "config.json", FILES[name]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "This is not readable JSON"),
        ("[1]", "It names no model_type"),
        ('{"vocab_size": 5}', "It names no model_type"),
        ('{"model_type": "lama"}', 'does not know models of type "lama"'),
        ('{"model_type": "constructor"}', 'does not know models of type "constructor"'),
        ('{"model_type": "longitude"}', "Its positions are Longitude's own"),
        ('{"model_type": "gemma3"}', "keeps its positions in text_config, and there is none"),
        ('{"model_type": "llama", "rope_scaling": {"type": "yarm"}}', 'Unknown rope_type "yarm"'),
        ('{"model_type": "llama", "rope_scaling": {"type": "linear"}}', 'rope_type "linear" needs factor'),
        ('{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": "4"}}', 'factor cannot be "4"'),
        (
            '{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0.5}}',
            "expected a factor of 1 or more",
        ),
        (
            '{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}',
            'Unknown key "beta_fast"',
        ),
        ('{"model_type": "llama", "rope_scaling": 4}', "Expected rope_scaling to be an object or null"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "Expected num_hidden_layers to be a whole number"),
        ('{"model_type": "llama", "head_dim": 5}', "even and above 0"),
        ('{"model_type": "gpt2", "rope_scaling": {"type": "linear", "factor": 2}}', "It has rotary parameters"),
        ('{"model_type": "qwen2", "use_sliding_window": true}', "write how many tokens the window has"),
    ],
)
def test_what_is_no_config_is_refused_in_words(text, reason, read):
    assert reason in read(text)["refused"]


def test_dropped_chosen_and_pasted(opened, tmp_path):
    """The three ways in give one table; its words are those of the facts, and a refusal is shown as one."""
    page, path = opened(), tmp_path / "config.json"
    path.write_text(json.dumps(FILES["llama3"]))
    page.locator("#config input[type=file]").set_input_files(path)
    page.wait_for_function(
        "document.querySelector('#config [role=status]').textContent.startsWith('config.json: a llama model')"
    )
    words = page.locator("#config .result").inner_text()
    assert "8,192 tokens; 131,072 are declared" in words and "pairs 35 to 63, 45% of them, never finished one" in words
    page.locator("#config .paste summary").click()
    page.locator("#config textarea").fill(json.dumps(FILES["alibi"]))
    assert "positions: alibi" in page.locator("#config [role=status]").text_content()
    assert "nothing needs to be scaled" in page.locator("#config .result").inner_text()
    drop = """(text) => {
        const data = new DataTransfer();
        data.items.add(new File([text], "other.json"));
        const how = { dataTransfer: data, bubbles: true, cancelable: true };
        document.querySelector(".drop").dispatchEvent(new DragEvent("drop", how));
    }"""
    page.evaluate(drop, "not json")
    page.wait_for_function(
        "document.querySelector('#config [role=status]').textContent.startsWith('other.json: This is not readable JSON')"
    )
    assert page.locator("#config .result").inner_text() == ""
