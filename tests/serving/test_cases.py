"""Threads and published lines of 2026 (docs/audit.csv has more), each with the finding that is right, by each engine's rules."""

import json
from pathlib import Path

import pytest

from longitude.serving.findings import MEASURED, wrong
from longitude.serving.write import corrected
from tests.serving.models import F2, FLAT, ORIGINAL, Y2, cases

VLLM, SGLANG = "vllm serve m ", "python -m sglang.launch_server --model-path m "
LONG, OVER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 ", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 "
LLAMA = "llama-server -m q.gguf "
HALF = LLAMA + "-c 524288 "


def vllm(keys: object, length: int | None = None, more: str = "", before: str = "") -> str:
    end = f" --max-model-len {length}" if length else ""
    return f"{before}{VLLM}--hf-overrides '{json.dumps(keys)}'{end}{more}"


def sglang(keys: object, length: int | None = None, before: str = OVER) -> str:
    end = f" --context-length {length}" if length else ""
    return f"{before}{SGLANG}--json-model-override-args '{json.dumps(keys)}'{end}"


def rules(name: str, line: str) -> list[str]:
    """The rules that find the line wrong, or not to be judged."""
    [(_, rows)] = cases(name, line)
    return [row.rule for row in rows if row.verdict in ("wrong", "unknown")]


LINEAR2 = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
NO_SCALING = ["no effect", "no scaling"]
LINEAR16 = {"rope_scaling": {"rope_type": "linear", "factor": 16.0}}
WHOLE = {"max_position_embeddings": 131072, "rope_parameters": {**FLAT, "rope_theta": 1000000}}
PLUS = {"max_position_embeddings": 131072, "rope_parameters": FLAT}
THREADS = {
    "sglang#27974 flat": ("qwen3_5", sglang({"rope_scaling": F2}, 524288), NO_SCALING),
    "sglang#27974 flat, no variable": ("qwen3_5", sglang({"rope_scaling": F2}, 524288, ""), ["refused", *NO_SCALING]),
    "sglang#27974 twin": ("qwen3_5", sglang({"text_config": {"rope_scaling": F2}}, 524288), ["base lost", "keys lost"]),
    "sglang#27974 whole": ("qwen3_5", sglang(Y2, 524288), []),
    "the same JSON merges in vLLM": ("qwen3_5", vllm({"text_config": {"rope_scaling": F2}}, 524288, before=LONG), []),
    "Safe-Synthesizer#623": ("llama2k", vllm({"max_position_embeddings": 4096} | LINEAR2, 4096), ["factor twice"]),
    "Safe-Synthesizer#623 mended": ("llama2k", vllm(LINEAR2, 4096), []),
    "omlx#1077": ("qwen3_moe_yarn", "mlx_lm.server --model m", ["no effect"]),
    "ninfer#165 vLLM": ("qwen3_5", vllm(Y2, 524288, before=LONG), []),
    "ninfer#165 llama.cpp": ("qwen3_5", HALF + "--rope-scaling yarn --rope-scale 2 --yarn-orig-ctx 262144", []),
    "lmstudio#2112": ("qwen3_5", HALF + "--rope-freq-scale 0.5", ["other scheme", "needless scaling", "cut"]),
    "edutelligence#744": ("qwen3_5", vllm({"rope_scaling": FLAT}), ["no effect"]),
    "edutelligence#744 MoE": ("qwen3_moe", vllm({"rope_scaling": FLAT}), ["base lost", "needless scaling"]),
    "edutelligence#744 dense": ("qwen3", vllm({"rope_scaling": FLAT}, 131072), ["refused"]),
    "edutelligence#744 gpt-oss": ("gpt_oss", vllm({"rope_scaling": FLAT}), ["refused"]),
    "edutelligence#744 mended": ("qwen3_moe", vllm(WHOLE, 131072), []),
    "sglang#38786": ("qwen3", sglang({"rope_parameters": FLAT}, 131072), []),
    "vllm#58080 draft": ("qwen3_5", vllm(Y2, 524288, ' --speculative-config \'{"method":"mtp"}\'', LONG), ["draft"]),
    "sglang#41227 merged now": ("llama", sglang({"rope_scaling": {**F2, ORIGINAL: 8192}}, 16384), []),
}


@pytest.mark.parametrize("thread", THREADS)
def test_threads(thread) -> None:
    name, line, expected = THREADS[thread]
    assert rules(name, line) == expected


@pytest.mark.parametrize("thread", [name for name, (_, _, expected) in THREADS.items() if expected])
def test_a_corrected_line_reaches_the_length(thread) -> None:
    """`corrected` gives no line that is wrong; most threads have one that is right."""
    name, line, _ = THREADS[thread]
    [(case, _)] = cases(name, line)
    remedy, why = corrected(case)
    assert bool(remedy) != bool(why)
    assert bool(remedy) == (thread not in NO_LINE)
    if remedy:
        [(again, rows)] = cases(name, remedy)
        assert not wrong(rows) and again.served.length == (case.meant.length or case.before.declared)


NO_LINE = ("omlx#1077", "vllm#58080 draft")
"""Threads that a file mends, and no line: a class that takes no scaling, a draft that overrides do not reach."""


def test_what_yarn_costs_is_what_was_measured():
    """The committed rows of docs/extending.md's table, at the training length."""
    saved = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-24-retrieval.json"
    bits, scores = {}, {}
    for row in json.loads(saved.read_text(encoding="utf-8"))["rows"]:
        if not row["steps"] and row["method"] in ("unchanged", "yarn"):
            counted = [score["value"] for score in row["scores"] if score["length"] == 512]
            bits[row["method"]], scores[row["method"]] = row["bits"]["512"], sum(counted) / len(counted)
    numbers = *(f"{score:.2f}" for score in scores.values()), f"{bits['yarn'] / bits['unchanged'] - 1:.0%}"
    assert len(numbers) == 3 and all(number in MEASURED for number in numbers)
