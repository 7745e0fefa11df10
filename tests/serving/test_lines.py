"""What must be found, a case each; published lines that are right; all forms in which people keep lines; bad input."""
# ruff: noqa: E501 - a line or a config is a line here

import csv
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import make_audit
from longitude.serving.check import as_json, check_lines
from longitude.serving.config import Config
from longitude.serving.effective import alone_of, judged
from longitude.serving.findings import findings, wrong
from longitude.serving.line import FACTS, lines_in
from longitude.serving.write import corrected
from tests.check.building import TRAINED, file_of
from tests.checkpoints.published import PUBLISHED
from tests.serving.models import DEEPSEEK, FLAT, ORIGINAL, Y4, cases, model
from tests.serving.test_cases import LINEAR16, LLAMA, LONG, PLUS, VLLM, WHOLE, rules, sglang, vllm

LINEAR = {"rope_type": "linear", "factor": 4, "rope_theta": 1000000}
MSCALE = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768, "rope_theta": 1000000, "attention_factor": 1.0}
FULL_ONLY = {"rope_parameters": FLAT | {"rope_theta": 1e6}, "max_position_embeddings": 131072}
CODER = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000000, "factor": 4, ORIGINAL: 32768}}
MUST_FIND = {
    "no effect, a class without scaling": ("phi", sglang({"rope_scaling": {**FLAT, ORIGINAL: 2048}}, 8192), {"no effect", "no scaling"}),
    "no effect, type beside rope_type": ("qwen3", sglang({"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 32768}, "max_position_embeddings": 65536}), {"no effect", "no scaling"}),
    "no effect, a scale of 1": ("qwen2", LLAMA + "-c 65536 --rope-scaling yarn --yarn-orig-ctx 32768", {"no effect", "cut"}),
    "no effect, factor 1": ("qwen2", sglang({"rope_scaling": {**FLAT, "factor": 1.0}, "max_position_embeddings": 131072}), {"no effect", "no scaling"}),
    "no effect, nested in a text model": ("qwen3", vllm({"text_config": {"rope_parameters": FLAT}}, 131072, before=LONG), {"no effect", "too long", "no scaling"}),
    "no effect, a base beside the dict": ("qwen3", vllm({"rope_theta": 5000000}), {"no effect"}),
    "no effect, dynamic in vLLM": ("qwen3", vllm({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000000}}, 131072), {"no effect", "too long", "no scaling"}),
    "no effect, beside the scaling of training": ("gemma3_4b", vllm(LINEAR16, 262144, before=LONG), {"no effect"}),
    "lost share": ("phi", vllm({"rope_parameters": {**FLAT, ORIGINAL: 2048, "rope_theta": 10000.0}, "max_position_embeddings": 8192}, 8192), {"keys lost"}),
    "lost layer types": ("gemma3", vllm(FULL_ONLY, 131072), {"keys lost"}),
    "factor twice": ("llama", sglang({"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 32768}), {"factor twice"}),
    "factor twice, without a base": ("llama2", vllm({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}), {"factor twice"}),
    "no original length": ("llama", sglang({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), {"original length"}),
    "original length of the extended": ("qwen3", vllm({**WHOLE, "rope_parameters": {**WHOLE["rope_parameters"], ORIGINAL: 131072}}, 131072), {"original length"}),
    "beyond factor times original": ("qwen3", sglang({"rope_scaling": {**FLAT, "factor": 2.0}}, 131072), {"too long"}),
    "too long": ("qwen3", LONG + VLLM + "--max-model-len 131072", {"too long", "no scaling"}),
    "longer without scaling": ("qwen3", vllm({"max_position_embeddings": 131072}, 131072), {"no scaling"}),
    "shorter than native": ("qwen3_coder", vllm(CODER), {"too long", "needless scaling"}),
    "attention factor not read": ("qwen3", sglang({"rope_parameters": MSCALE}, 131072), {"attention factor"}),
    "scaling of training replaced": ("llama3", vllm({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 131072}, "max_position_embeddings": 524288}), {"base lost", "original length", "other scheme"}),
    "window cuts": ("mistral", VLLM + "--disable-sliding-window", {"cut"}),
    "int factor": ("qwen3", vllm({"rope_parameters": LINEAR}, 131072), {"refused"}),
    "text in place of a number": ("qwen3", vllm({"rope_parameters": {**FLAT, "factor": "4.0"}}, 131072), {"refused"}),
    "quotes that the shell took": ("qwen3", VLLM + "--hf-overrides {rope_scaling:{rope_type:yarn,factor:4.0}}", {"refused"}),
    "no rope_type": ("qwen3", vllm({"rope_parameters": {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}}, 131072), {"refused"}),
    "a key in the wrong place": ("qwen3", vllm({"max_model_len": 131072}), {"key not read"}),
    "misspelt key": ("qwen3", vllm({**WHOLE, "rope_parameters": {**WHOLE["rope_parameters"], "beta_fasst": 16}}, 131072), {"key not read"}),
    "inverse scale": ("qwen3_5", LLAMA + "-c 524288 --rope-scaling yarn --yarn-orig-ctx 262144 --rope-freq-scale 2.0", {"refused", "cut"}),
    "longer without scaling, cut": ("qwen2", LLAMA + "-c 81920 --rope-scale 2.5", {"other scheme", "needless scaling", "cut"}),
    "56": ("qwen3", VLLM + "--max-model-len 131072 --hf-overrides.rope_scaling.rope_type yarn --hf-overrides.rope_scaling.factor 4.0 --hf-overrides.rope_scaling.original_max_position_embeddings 32768", {"refused"}),
    "78": ("qwen3", LLAMA + "-c 131072 --rope-scaling yarn --yarn-orig-ctx 32768", {"no effect", "cut"}),
    "87": ("qwen3_5", LLAMA + "--ctx-size 32000 --parallel 2 --rope-scale 5 --rope-scaling yarn --yarn-orig-ctx 32768", {"needless scaling"}),
    "71, not followed": ("qwen4", sglang({"text_config": {"rope_scaling": {**FLAT, ORIGINAL: 262144}}}, 1000000), {"keys lost", "not known"}),
    "a variable": ("qwen3", VLLM + "--max-model-len $LENGTH", {"not known"}),
    "lost base in transformers": ("qwen3", f"AutoModelForCausalLM.from_pretrained('m', rope_scaling={FLAT})", {"refused"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MUST_FIND)
def test_it_finds(case) -> None:
    name, line, expected = MUST_FIND[case]
    assert {*rules(name, line)} == expected
    [(_, rows)] = cases(name, line)
    sources = [row.source for row in rows if row.verdict == "wrong"]
    assert [source for source in sources if not re.search(r"\d: .*(\w/[\w/.-]*\.(py|cpp):|#\d+)", source)] == []


def test_every_rule_has_a_source_in_every_engine() -> None:
    keys = {"flat", "base", "lost", "type", "factor", "length", "rows", "unread", "parse"}
    assert [(facts.name, lacking) for facts in FACTS.values() if (lacking := keys - facts.sources.keys())] == []


M3 = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768, "rope_theta": 1000000.0}
RIGHT = {
    "33": ("qwen3", sglang({"rope_scaling": FLAT}, 131072)),
    "61": ("qwen2", vllm({"rope_scaling": FLAT}, 131072, before=LONG)),
    "75": ("qwen3", sglang({"max_position_embeddings": 131072, "rope_parameters": M3}, None, "")),
    "84": ("qwen3_5", LLAMA + "--ctx-size 1400000 --parallel 4 --kv-unified --kv-unified-per-slot 400000 --override-kv qwen35moe.context_length=int:400000 --rope-scaling yarn --rope-scale 1.52587890625 --yarn-orig-ctx 262144"),
    "64": ("qwen3_5", vllm({"text_config": {"rope_parameters": {**Y4["text_config"]["rope_parameters"], "factor": 1.0}}})),
    "79": ("qwen3_coder", LLAMA + "-c 100000 --rope-scaling yarn --yarn-orig-ctx 32768"),
    "86": ("qwen3_coder", LLAMA + "-c 262144 --parallel 4"),
    "deepseek as it is": ("deepseek", VLLM + "--max-model-len 131072"),
    "deepseek, the same by another name": ("deepseek", vllm({"rope_scaling": {**DEEPSEEK, "rope_type": "deepseek_yarn", "type": "deepseek_yarn", "rope_theta": 10000}}, 131072)),
    "a share that the class fills in": ("glm4", vllm(PLUS, 131072)),
    "mistral": ("mistral", VLLM + "--max-model-len 32k --kv-cache-dtype fp8"),
    "transformers, scaled": ("qwen3", f"AutoModelForCausalLM.from_pretrained('m', rope_parameters={M3}, max_position_embeddings=131072)"),
    "linear": ("llama", vllm({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}, 16384)),
    "a larger base": ("llama", "llama-cli -m m.gguf -c 16384 --rope-freq-base 2000000 --override-kv llama.context_length=int:16384"),
    "a draft at the trained length": ("deepseek", VLLM + "--max-model-len 65536 --speculative-config '{\"method\": \"mtp\"}'"),
    "dotted": ("qwen3", LONG + VLLM + "--max-model-len 128K --hf-overrides.rope_parameters.rope_type yarn --hf-overrides.rope_parameters.factor 4.0 --hf-overrides.rope_parameters.original_max_position_embeddings 32768 --hf-overrides.rope_parameters.rope_theta 1000000"),
}  # fmt: skip
"""Lines of published documents that are right, by their numbers in the collection, and others."""


@pytest.mark.parametrize("number", RIGHT)
def test_no_alarm(number) -> None:
    name, line = RIGHT[number]
    assert rules(name, line) == []


with make_audit.TABLE.open(newline="", encoding="utf-8") as file:
    AUDIT = [row for row in csv.DictReader(file) if row["verdict"] != make_audit.OPEN]


@pytest.mark.parametrize("row", AUDIT, ids=lambda row: row["source"])
def test_published_lines_are_judged_as_on_their_page(row) -> None:
    """Verdict, what the line does, and the corrected line; `python docs/make_audit.py` writes all of them again."""
    assert make_audit.verdict_of(row) == (row["verdict"], row["does"], row["corrected"])


WANTED = ["m", "--max-model-len", "131072", "--hf-overrides", json.dumps(WHOLE)]
LINE = f"vllm serve m --max-model-len 131072 --hf-overrides '{json.dumps(WHOLE)}'"
FORMS = {
    "recipe.yaml": ("serve: |\n  pip install vllm\n  " + LINE.replace(" --hf", " \\\n    --hf") + "\n"),
    "pod.yaml": "containers:\n- command: [vllm, serve]\n  args:\n"
    + "".join(f"  - {json.dumps(word)}\n" for word in WANTED),
    "compose.yaml": "services:\n  llm:\n    image: vllm/vllm-openai:v0.33.0\n    command: >\n      --model m\n"
    + f"      --max-model-len 131072 --hf-overrides '{json.dumps(WHOLE)}'\n",
    "run.sh": f"#!/bin/sh\nexport X=1\n{LINE} && echo done\n",
    "Dockerfile": "FROM vllm/vllm-openai\nCMD " + json.dumps(["vllm", "serve", *WANTED]) + "\n",
    "vllm.service": f"[Service]\nExecStart=/usr/bin/{LINE}\n",
    "arguments.json": json.dumps({"model": "m", "max_model_len": 131072, "hf_overrides": WHOLE}),
    "page.md": f"Run it:\n```bash\n{LINE}\n```\n",
    "call.txt": f'llm = LLM("m", max_model_len=131072, hf_overrides={WHOLE!r})\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_line_is_found(name) -> None:
    suffix = Path(name).suffix
    [line] = lines_in(FORMS[name], suffix)
    flags = dict(line.flags)
    assert (line.engine, flags["--max-model-len"]) == ("vllm", "131072")
    assert json.loads(flags["--hf-overrides"] or "") == WHOLE
    assert not [row for _, rows in cases("qwen3", FORMS[name], suffix) for row in rows if row.verdict == "wrong"]


def test_a_variable_of_a_compose_file_lifts_the_limit() -> None:
    text = 'image: vllm/vllm-openai\nenvironment: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: "1"}\ncommand: [--max-model-len, 131072]\n'
    [(_, rows)] = cases("qwen3", text, ".yaml")
    assert {row.rule for row in rows} == {"too long", "no scaling"}


SERVED = "vllm serve m --max-model-len 131072"
COMMANDS = [
    f"bash -lc 'source v/bin/activate && {SERVED}'",
    f'docker exec -it box bash -c "cd /app && {SERVED} --hf-overrides \'{{\\"a\\": 1}}\'"',
    f"[Service]\nExecStart=/bin/sh -c '{SERVED}'\n",
    f"serve: deps\n\t@X=1 {SERVED.replace(' --', chr(92) + chr(10) + '  --')}\n",
    f"Use `{SERVED}`, or not.",
    f"1. `{SERVED}`",
    f"# don't\nWe don't use vllm serve here.\n{SERVED} # it's long\n",
    f'if [ -n "$X" ]; then {SERVED}; fi',
    f"conda run -n v {SERVED}",
    f"uvx --from vllm {SERVED}",
    "$ vllm serve m \\\n>   --max-model-len 131072",
    "& .\\llama-server.exe -m m.gguf `\n  -c 131072 `\n",
    '& "C:\\my llama\\llama-server.exe" -m m.gguf -c 131072',
    "llama-server.exe -m m.gguf ^\r\n  -c 131072",
    "~/llama.cpp/build/bin/llama-server -m m.gguf -c 131072",
    "docker run -v ./m:/models ghcr.io/ggml-org/llama.cpp:server-cuda -m m.gguf -c 131072",
]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_is_found(text) -> None:
    [line] = lines_in(text)
    assert line.options[0] in ("m", "-m") and "131072" in line.options


LLAMA_IMAGE, VLLM_IMAGE = "image: ghcr.io/ggml-org/llama.cpp:server-cuda\n", "image: vllm/vllm-openai\n"
STORED = {  # Dockerfiles, and YAML
    "llama.cpp": LLAMA_IMAGE + "command: [-m, m, -c, 131072]\n",
    "llama.cpp, text": LLAMA_IMAGE + "command: >\n  -m m\n\n  -c 131072\n",
    "llama.cpp, variables": LLAMA_IMAGE + "environment:\n  - LLAMA_ARG_CTX_SIZE=131072\n",
    "compose, dotted": VLLM_IMAGE + "command: [--hf-overrides.max_position_embeddings=131072]",
    "pod, a text": VLLM_IMAGE + "args: ['--model m --max-model-len 131072']\n",
    "pod, a script": VLLM_IMAGE + f"command: [sh, -c]\nargs:\n- |\n  set -e\n  exec {SERVED}\n",
    "values": "image: {repository: vllm/vllm-openai, tag: v1}\nextraArgs: [--max-model-len=131072]\n",
    "values of the stack": "vllmConfig: {maxModelLen: 4096, extraArgs: [--hf-overrides.x, 131072]}\n",
    "a container": VLLM_IMAGE + "command: [vllm, serve, m]\nargs: [--max-model-len, '131072']\n",
    "Dockerfile": 'FROM vllm/vllm-openai\nCMD ["--model", "m", \\\n  "--max-model-len", "131072"]\n',
    "Dockerfile of two lists": (
        'FROM vllm/vllm-openai\nENTRYPOINT ["vllm", "serve", "m"]\nCMD ["--max-model-len", "131072"]\n'
    ),
    "Dockerfile with a script before": (
        'FROM nvidia/cuda\nENTRYPOINT ["/start.sh"]\nCMD ["vllm", "serve", "m", "--max-model-len", "131072"]\n'
    ),
}


@pytest.mark.parametrize("form", STORED)
def test_a_line_in_data_is_found(form) -> None:
    [line] = lines_in(STORED[form], "" if form.startswith("Dockerfile") else ".yaml")
    assert line.engine == ("llama.cpp" if form.startswith("llama.cpp") else "vllm")
    assert "131072" in [value for _, value in line.flags]


PYTHON = {
    "names": 'MODEL = "m"\nllm = LLM(model=MODEL, max_model_len=131072, seed=len(x))',
    "arguments": 'AsyncEngineArgs(model="m", max_model_len=131072)',
    "json.dumps": "sgl.Engine(model_path=path, context_length=131072, json_model_override_args=json.dumps({}))",
    "transformers": 'AutoConfig.from_pretrained("m", torch_dtype=torch.float32, max_position_embeddings=131072)',
}


@pytest.mark.parametrize("form", PYTHON)
def test_a_call_is_found(form) -> None:
    [line] = lines_in(PYTHON[form])
    assert "131072" in [value for _, value in line.flags]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve $MODEL", []),
        ("vllm serve m > $LOG", []),
        ("vllm serve m $MORE", ["not known"]),
        ('vllm serve m "${FLAGS[@]}"', ["not known"]),
        ('vllm serve "$@"', ["not known"]),
        ("vllm serve m {{ .Values.extraArgs }}", ["not known"]),
        ("vllm serve m --max-context-tokens 131072", ["not known"]),
        ("vllm serve m --decode-context-parallel-size 2 --max-num-seqs 8", []),
        ("vllm serve m --no-disable-sliding-window", []),
        ("LLM('m', **options)", ["not known"]),
        ("AutoModelForCausalLM.from_pretrained(m, rope_scaling=scaling)", ["not known"]),
        ("llama-server -m m.gguf --ctx-size=4096", ["refused"]),
    ],
)
def test_what_is_not_seen_is_not_known(line, expected) -> None:
    assert rules("qwen3", line) == expected


def test_a_gguf_file(tmp_path) -> None:
    file_of(tmp_path / "m.gguf", freq_base=5e5)
    line = f"llama-server -m {tmp_path}/m.gguf -c 256 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx {TRAINED}"
    for text, expected in ((line, 256), (line.replace("--rope-scale 4 ", ""), TRAINED)):
        [(case, rows, _)] = check_lines(str(tmp_path / "m.gguf"), text)
        assert case.served.length == expected and (expected == TRAINED) == any(row.verdict == "wrong" for row in rows)
        assert case.rope is not None and case.rope.base == 5e5


def test_a_release_that_was_not_read_is_not_judged() -> None:
    removed = VLLM + "--rope-scaling '" + json.dumps(FLAT) + "' --max-model-len 131072"
    for text, expected in (
        ("pip install vllm==0.10.0\n" + removed, [("release", "unknown"), ("refused", "unknown")]),
        ("pip install vllm==0.33.0\n" + removed, [("refused", "wrong")]),
    ):
        [(_, rows)] = cases("qwen3", text)  # the reason comes before what it makes unknown
        assert [(row.rule, row.verdict) for row in rows if row.verdict != "remark"] == expected


@cache
def published() -> list[tuple[str, Config, Any]]:
    configs = {name: Config.of(raw) for name, raw in PUBLISHED.items()}
    return [(name, config, alone_of({}, config)[0]) for name, config in configs.items()]


@pytest.mark.parametrize(
    "line", ["vllm serve m", "sglang serve --model-path m", LLAMA, "mlx_lm.server --model m", "transformers serve m"]
)
def test_no_alarm_for_published_configs(line) -> None:
    """Without a flag about positions. Of `dynamic`, vLLM's table has fewer rows than the length that it derives."""
    for name, config, rotations in published():
        rows = findings(judged(lines_in(line)[0], config, rotations))
        assert not wrong(rows) or (line == "vllm serve m" and config.flat.get("rope_type") == "dynamic"), (name, rows)


def test_nothing_is_executed_or_expanded(tmp_path) -> None:
    trap = tmp_path / "made"
    text = f"vllm serve m --max-model-len $(touch {trap}) `touch {trap}`"
    [(_, rows)] = cases("qwen3", text)
    assert not trap.exists()
    assert [row.verdict for row in rows] == ["unknown"]


BAD = {
    "no engine": "serve my model please",
    "one word": "vllm",
    "open quote": "vllm serve m --hf-overrides '{",
    "no JSON": "vllm serve m --hf-overrides '{\"a\": }'",
    "a list": "vllm serve m --hf-overrides '[1]'",
    "deep": "vllm serve m --hf-overrides '" + '{"a":' * 3000 + "1" + "}" * 3000 + "'",
    "a flag of another engine": "vllm serve m --context-length 4096",
    "a slip": "vllm serve m --max-model-length 4096",
    "no number": "vllm serve m --max-model-len many",
    "no value": "vllm serve m --max-model-len",
    "1.5K": "vllm serve m --max-model-len 1.5K",
    "no whole number": "llama-server -m m.gguf -c 128k",
    "no scale": "llama-server -m m.gguf --rope-scale 0",
    "no type": "llama-server -m m.gguf --rope-scaling su",
    "override": "llama-server -m m.gguf --override-kv a=b",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_one_sentence(case, command) -> None:
    code, out, error = command("check", model("qwen3"), "--serve", BAD[case])
    assert (code, out) == (2, "")
    assert error.startswith("longitude: ") and error.count("\n") == 1


def test_bad_files_are_one_sentence(command, tmp_path) -> None:
    def require_one_sentence(name: object, line: object) -> None:
        code, out, error = command("check", name, "--serve", line)
        assert (code, out, error.count("\n")) == (2, "", 1), (name, line)

    huge, binary, bomb, link = (tmp_path / name for name in ("huge.yaml", "binary.sh", "bomb.yaml", "loop.sh"))
    huge.write_bytes(b"vllm serve m\n" + b" " * 2**21)
    binary.write_bytes(b"vllm serve m \xff\xfe")
    bomb.write_text("a: &a [vllm serve m]\nb: [*a, *a]\n")
    link.symlink_to(link)
    for place in (huge, binary, bomb, link):
        require_one_sentence(model("qwen3"), place)
    for name in (tmp_path / "none" / "config.json", tmp_path):
        require_one_sentence(name, LINE)
    usual, place = json.loads((model("qwen3") / "config.json").read_text()), tmp_path / "config.json"
    yarn = {"rope_scaling": {"type": "yarn"}}
    for change in ({"num_hidden_layers": 10**9}, {"rope_theta": "x"}, {"rope_scaling": [1]}, yarn, {"text_config": 3}):
        place.write_text(json.dumps(usual | change))
        require_one_sentence(place, LINE)
    place.write_text("[" * 100_000)
    require_one_sentence(place, LINE)


def test_exit_codes_and_json(command, tmp_path) -> None:
    folder = model("qwen3")
    wrong, right, unknown = VLLM + "--max-model-len 131072", VLLM + "--max-model-len 32768", VLLM + "--max-model-len $N"
    assert [command("check", folder, "--serve", line)[0] for line in (right, wrong, unknown)] == [0, 1, 3]
    code, out, _ = command("check", folder / "config.json", "--serve", wrong, "--json")
    [case] = json.loads(out)
    assert code == 1 and case["findings"][0]["verdict"] == "wrong" and "--max-model-len" in case["corrected"]
    assert case["layers"]["all"]["checkpoint"]["base"] == 1_000_000
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"serve: {wrong.replace(' m ', f' {folder} ')}\n")
    assert command("check", recipe)[0] == 1


def test_a_screen_fits_in_80_columns(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("check", model("qwen3_5"), "--serve", sglang({"rope_scaling": FLAT}, 524288))
    table = [line for line in out.splitlines() if "  " in line.strip() and not line.startswith(" ")]
    assert table and max(map(len, table)) <= 80 and len(out.splitlines()) < 50


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "transformers", "mlx"])
def test_extend_prints_a_line_that_check_finds_right(engine, command) -> None:
    code, line, error = command("extend", model("qwen3") / "config.json", "--to", 131072, "--for", engine)
    assert code == 0, error
    assert rules("qwen3", line) == []
    [(case, _)] = cases("qwen3", line)
    assert case.rope is not None and case.rope.scaling is not None and case.rope.scaling.name == "yarn"
    assert case.rope.base == 1000000 and (case.served.length == 131072 or engine == "mlx")


IN_FILE = {  # a line -> how the corrected one begins
    'HF=$T vllm serve "$MODEL" --dir ~/m --max-model-len 131072 > log 2>&1': "HF=$T vllm serve $MODEL --dir ~/m ",
    '{"model": "m", "max_model_len": 131072}': "vllm serve --model m ",
    "vllm serve m --name '$(touch x)' --max-model-len 131072": "vllm serve m --name '$(touch x)' ",
    VLLM_IMAGE + "args: [--model, m, --max-model-len, 131072]\n": "docker run --gpus all vllm/vllm-openai --model m ",
}


@pytest.mark.parametrize("line", IN_FILE)
def test_a_corrected_line_is_one_to_paste(line) -> None:
    suffix = ".json" if line.startswith("{") else ".yaml" if line.startswith("image") else ""
    [(case, _)] = cases("qwen3", line, suffix)
    remedy, _ = corrected(case)
    assert remedy is not None and remedy.startswith(IN_FILE[line] + "--hf-overrides '{")


def test_a_corrected_line_keeps_the_scheme_of_training() -> None:
    """Llama 3.1 and gpt-oss: no key of the scheme is lost, and nothing is scaled twice."""
    for name, length in (("llama3", 262144), ("gpt_oss", 262144), ("ministral", 524288)):
        line = vllm({"rope_parameters": FLAT, "max_position_embeddings": length}, length)
        [(case, rows)] = cases(name, line)
        assert wrong(rows)
        remedy, why = corrected(case)
        assert remedy is not None, why
        [(again, _)] = cases(name, remedy)
        trained, used = case.alone[case.full or None].scaling, again.scaling
        assert trained is not None and used == replace(trained, factor=length / trained.original_max_length)


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("qwen3", VLLM + "--max-model-len 131072 --hf-overrides " + json.dumps(FULL_ONLY).replace('"', "").replace(" ", ""), 32768),
        ("glm4_yarn", VLLM + "--max-model-len 131072", 32768),
    ],
)  # fmt: skip
def test_a_corrected_line_keeps_what_was_meant(name, line, expected) -> None:
    """JSON without quotes; and a length that the scaling in config.json carries, and its declared length does not."""
    [(case, rows)] = cases(name, line)
    assert wrong(rows)
    remedy, why = corrected(case)
    assert remedy is not None, why
    [(again, faults)] = cases(name, remedy)
    assert not wrong(faults) and again.served.length == 131072
    assert again.yarn is not None and (again.yarn.factor, again.yarn.original_max_length) == (4.0, expected)


def test_a_switch_may_be_turned_off() -> None:
    [(case, rows)] = cases("llama3", LLAMA + "-c 131072 --parallel 4 --no-kv-unified")
    assert case.served.length == 32768 and not wrong(rows)


def test_no_length_where_the_engine_stops() -> None:
    [(case, rows)] = cases("qwen3", VLLM + "--rope-theta 5 --max-model-len 65536")
    assert as_json(case, rows, None)["lengths"]["vLLM"] is None


def test_extend_has_no_line_where_none_is_right(command) -> None:
    for case in ("qwen3_moe mlx yarn", "qwen3 vllm dynamic", "llama3 vllm yarn", "llama3 ollama yarn"):
        name, engine, method = case.split()
        code, out, error = command("extend", model(name), "--to", 262144, "--for", engine, "--method", method)
        assert (code, out, error.count("\n")) == (2, "", 1) and "None" not in error


def test_extend_raises_the_factor_that_weights_were_trained_with(command) -> None:
    options = ["--to", 262144, "--for", "vllm", "--method", "llama3", "--factor", 16]
    code, line, error = command("extend", model("llama3"), *options, "--original", 8192)
    assert code == 0, error
    assert rules("llama3", line) == []
    assert command("extend", model("llama3"), *options, "--original", 131072)[0] == 2


def test_recipes_are_told_from_checkpoints(tmp_path) -> None:
    from longitude.cli.check import is_file_of_lines

    assert not is_file_of_lines(str(model("qwen3") / "config.json"))
    assert not is_file_of_lines(str(Path(__file__)))
    (tmp_path / "Dockerfile.vllm").write_text(LINE)
    assert is_file_of_lines(str(tmp_path / "Dockerfile.vllm"))
