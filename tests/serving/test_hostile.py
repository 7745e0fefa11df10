"""Random values in the place of numbers, in every key and for every engine: an answer or one sentence, never another error."""

import json
import random
from contextlib import suppress

import pytest

from longitude.serving.check import as_json, screen
from longitude.serving.effective import judged
from longitude.serving.findings import findings
from longitude.serving.line import lines_in
from tests.serving.models import alone

VALUES = [
    None, True, "x", "4.0", -1, 0, 1, 2.5, 1e308, float("nan"), float("inf"), [], [1, "a"], {}, 10**30, 32768, 4.0,
]  # fmt: skip
NUMERIC = ["factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "mscale"]
KEYS = [*NUMERIC, "type", "mrope_section", "short_factor"]
KINDS = ["yarn", "linear", "dynamic", "llama3", "longrope", "deepseek_yarn", "default", "mrope", "su", "xdrope"]
STARTS = {
    "vllm": "vllm serve m --hf-overrides '{}'",
    "sglang": "sglang serve --model-path m --json-model-override-args '{}'",
    "mlx": "mlx_lm.server --model m --model-config '{}'",
}


def drawn(draw: random.Random) -> dict:
    scheme = {key: draw.choice(VALUES) for key in KEYS if draw.random() < 0.4}
    if draw.random() < 0.8:
        scheme["rope_type"] = draw.choice(KINDS)
    keys = {draw.choice(["rope_scaling", "rope_parameters"]): scheme if draw.random() < 0.9 else draw.choice(VALUES)}
    if draw.random() < 0.3:
        keys["max_position_embeddings"] = draw.choice(VALUES)
    return {"text_config": keys} if draw.random() < 0.3 else keys


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma3", "gpt_oss"])
def test_values_of_other_types(name) -> None:
    config, rotations, _ = alone(name)
    draw = random.Random(0)
    for _ in range(30):
        keys = drawn(draw)
        for start in STARTS.values():
            [line] = lines_in(start.replace("{}", json.dumps(keys)))
            try:
                case = judged(line, config, rotations)
                rows = findings(case)
            except ValueError:
                continue
            json.dumps(as_json(case, rows, None))
            assert [*screen(case, rows, None)]


def test_random_words_of_llama_cpp() -> None:
    config, rotations, _ = alone("qwen3")
    draw = random.Random(0)
    flags = (
        "-c --rope-scaling --rope-scale --rope-freq-scale --rope-freq-base --yarn-orig-ctx -np --override-kv".split()
    )
    values = ["4", "0.5", "yarn", "linear", "none", "131072", "-1", "0", "a.context_length=int:5", "nan", "1e400"]
    for _ in range(150):
        drawn_flags = [f"{flag} {draw.choice(values)}" for flag in flags if draw.random() < 0.4]
        try:
            case = judged(lines_in(" ".join(["llama-server -m m.gguf", *drawn_flags]))[0], config, rotations)
        except ValueError:
            continue
        assert [*screen(case, findings(case), None)]


def test_huge_texts_take_seconds() -> None:
    for text in ("vllm serve m '" * 10_000, "LLM(" * 40_000, "vllm serve \n" * 10_000, "- " * 40_000):
        with suppress(ValueError):
            lines_in(text)
