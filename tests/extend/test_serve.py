"""`serve.md`, and `--for`: an engine's options give what the new folder has, by transformers and by llama.cpp's own formula."""

import ast
import json
import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longitude.extend.serve import FILE
from longitude.serving.gguf import HALVES, NEIGHBOURS
from tests.extend.conftest import LENGTH, config, loaded, logits
from tests.support import close

TO = 4 * LENGTH
KINDS = ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow), "gemma3_text"]
METHODS = ["linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "llama3"]


def served(folder: Path) -> dict[str, list[str]]:
    """Program -> the words of its command in the file."""
    lines = re.findall(r"```sh\n(.*)\n```", (folder / FILE).read_text())
    commands = [shlex.split(command) for line in lines for command in line.split(" && ")]
    named = {"sglang" if "sglang.launch_server" in words else words[0]: words for words in commands}
    assert len(named) == len(commands)
    return named


@pytest.fixture
def line_of(checkpoint, command):
    """line_of(engine, kind, method, *more) -> the line of `--for` for the original weights; empty if the engine has none."""

    def call(engine: str, kind: str, method: str, *more: object) -> str:
        code, out, error = command(checkpoint(kind), "--to", TO, "--method", method, *more, "--for", engine)
        assert (code == 0) == bool(out), error
        return out

    return call


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_options_are_the_keys_of_the_new_config(kind, method, checkpoint, line_of, longer) -> None:
    """Of vLLM and SGLang, and plain transformers with them has the logits of the new folder."""
    folder = longer(kind, "--to", TO, "--method", method, "--no-measure")
    commands, new = served(folder), config(folder)
    for program, options, length in (
        ("vllm", "--hf-overrides", "--max-model-len"),
        ("sglang", "--json-model-override-args", "--context-length"),
    ):
        line = line_of(program, kind, method)
        if method == "dynamic" and program == "vllm":  # it leaves the base unchanged
            assert program not in commands and line == ""
            continue
        of_folder, original = commands[program], shlex.split(line)
        assert options not in of_folder and after(of_folder, length) == after(original, length) == str(TO)
        keys = json.loads(after(original, options))
        parameters = keys.pop("rope_parameters")
        if program == "sglang":  # in place of attention_factor, which it does not read
            scaled = parameters.get("full_attention", parameters)
            assert (scaled.pop("attn_factor", None) is None) == (method != "ntk-by-parts")
        assert parameters == new["rope_parameters"]
        multiplied = method in ("linear", "dynamic") and kind != "gemma3_text"  # by the engine
        assert keys == ({} if multiplied else {"max_position_embeddings": TO})
    line = re.search(
        r"AutoModelForCausalLM.from_pretrained\(.*, (rope_parameters=.*)\)", line_of("transformers", kind, method)
    )
    assert line
    [call] = [node for node in ast.walk(ast.parse(f"f({line[1]})")) if isinstance(node, ast.Call)]
    options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind), **options).eval()
    close(logits(model, TO), logits(loaded(folder), TO), 1e-6)


def by_llama_cpp(command: list[str], base: float, dim: int, architecture: str) -> tuple[torch.Tensor, float]:
    """Radians a position of each pair and the factor of cos and sin, as llama_context and rope_yarn compute them from flags.

    Of a file that says nothing of scaling. Source: src/llama-context.cpp and ggml/src/ggml-cpu/ops.cpp of llama.cpp.
    """
    flags = {name: value for name, value in pairwise(command) if name.startswith("--")}
    overridden = [value.split("=") for name, value in pairwise(command) if name == "--override-kv"]
    keys = {key.removeprefix(f"{architecture}."): value.split(":") for key, value in overridden}
    assert keys.pop("context_length", None) == (None if "yarn" in command else ["int", str(TO)])  # YaRN raises it
    assert after(command, "-c") == str(TO)
    base = float(flags.get("--rope-freq-base", base))
    extrapolated = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    freq_scale = 1 / float(flags.get("--rope-scale", 1))
    if flags.get("--rope-scaling") != "yarn":
        assert keys == {}
        return freq_scale * extrapolated, 1.0
    fast, slow = float(flags.get("--yarn-beta-fast", 32)), float(flags.get("--yarn-beta-slow", 1))
    original = int(flags["--yarn-orig-ctx"])

    def corrected(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corrected(fast))), min(dim - 1, math.ceil(corrected(slow)))
    ramp = 1 - ((torch.arange(dim // 2) - low) / max(0.001, high - low)).clamp(0, 1)
    factor = float(keys.pop("rope.scaling.attn_factor", ["float", "1"])[1])
    assert keys == {}
    return freq_scale * extrapolated * (1 - ramp) + extrapolated * ramp, factor * (1 - 0.1 * math.log(freq_scale))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("method", ["linear", "ntk", "ntk-by-parts", "yarn", "base"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_flags_of_llama_cpp_rotate_as_the_new_folder(kind, method, checkpoint, line_of, longer) -> None:
    """Frequencies and factor that transformers computes for the folder."""
    more = ["--base", 5e5] if method == "base" else []
    folder = longer(kind, "--to", TO, "--method", method, "--no-measure", *more)
    command = shlex.split(line_of("llama.cpp", kind, method, *more))
    before, model = config(checkpoint(kind))["rope_parameters"], loaded(folder)
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    architecture = kind.replace("_", "")
    assert architecture in (*HALVES, *NEIGHBOURS)
    inverse, factor = by_llama_cpp(command, before["rope_theta"], 2 * len(rotary.inv_freq), architecture)
    close(rotary.inv_freq.double(), inverse, 1e-6)
    assert rotary.attention_scaling == pytest.approx(factor, rel=1e-6)


@pytest.mark.slow
def test_trained_weights_are_served_from_their_folder(checkpoint, command, text, tmp_path) -> None:
    """Options for the original weights would serve those; and a further training keeps no older commands."""
    tuned, again = tmp_path / "tuned", tmp_path / "again"
    training = ["--fine-tune", text, "--steps", 1, "--window", LENGTH, "--no-measure"]
    assert command(checkpoint("llama"), "--to", TO, "--method", "yarn", *training, "--out", tuned)[0] == 0
    assert served(tuned)["vllm"][2] == "." and "--for" not in (tuned / FILE).read_text()
    code, _, error = command(tuned, *training, "--out", again)
    assert code == 0, error
    assert not (again / FILE).exists()
