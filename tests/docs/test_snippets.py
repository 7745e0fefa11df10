"""README and docs/ do what they say: Python runs page by page, commands parse, cheap ones run, and figures agree."""

import re
import runpy
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from longitude import cli, plugins
from longitude.attention.mixer import MIXERS
from longitude.positions.base import ENCODINGS
from longitude.study.tasks.base import TASKS
from longitude.testing.examples import ENCODING_LAWS, MIXER_LAWS
from tests.extend.conftest import saved

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
"""Those of the project's own: CONTRIBUTING.md, whose snippets are files, is executed by tests/test_contributing.py."""
GUIDES = ("find-a-position-bug", "from-x-transformers", "my-own-encoding")
SLOW = {"README.md", *(f"docs/guides/{guide}.md" for guide in GUIDES)} | {
    f"docs/{page}.md" for page in ("checking", "extending", "measuring", "models")
}
"""Pages whose Python takes more than a second."""
EXPECTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "docs/guides/find-a-position-bug.md": lambda names: "far_positions" in names["broken"]
}
"""What the names of a page must have come to."""
RUN = {"list", "show", "check", "extend"}
"""Verbs whose cheap commands are run; those of studies, benches and measurements are parsed."""


@cache
def tokens(page: str) -> list[Token]:
    """Of a page as CommonMark with tables, inline ones too."""
    found = MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    return [each for token in found for each in (token, *(token.children or ()))]


@cache
def python(page: str) -> CodeType | None:
    """The Python of a page, each snippet at its own lines, so that an error names the line of the page."""
    lines: list[str] = []
    for token in tokens(page):
        if token.type == "fence" and token.info.strip() == "python":
            assert token.map is not None
            lines += [""] * (token.map[0] + 1 - len(lines)) + token.content.splitlines()
    return compile("\n".join(lines), str(ROOT / page), "exec") if lines else None


def commands(page: str) -> list[list[str]]:
    """The arguments of every call of longitude in the shell snippets of a page, as its shell would split them."""
    found = []
    for token in tokens(page):
        if token.type == "fence" and (kind := token.info.strip()) in ("bash", "sh", "console"):
            for line in token.content.replace("\\\n", " ").splitlines():
                if kind == "console" and not line.startswith("$ "):
                    continue  # what a command printed
                words = shlex.split(line, comments=True)
                at = [n for n, word in enumerate(words) if word in ("longitude", "$(command -v longitude)")]
                found += [words[at[0] + 1 :]] if at else []
    return found


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """reader(page): an empty folder with what the page takes for granted; nothing that is registered in it stays."""
    for registry in (ENCODINGS, MIXERS, TASKS):
        registry.load()
        monkeypatch.setattr(registry, "factories", dict(registry.factories))
    for battery in (ENCODING_LAWS, MIXER_LAWS):
        battery.laws()  # imports those of the library
        monkeypatch.setattr(battery, "added", dict(battery.added))
    for name in ("_loaded", "_outside"):
        monkeypatch.setattr(plugins, name, {})
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(tmp_path)

    def fill(page: str) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        for token in tokens(page):
            if token.type == "fence" and (name := re.match(r"# (\w+\.py)\n", token.content)):
                Path(name[1]).write_text(token.content, encoding="utf-8")
        if "models/llama" in text:
            saved("llama", tmp_path / "models" / "llama")
        if "models/deepseek" in text:
            sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "first_k_dense_replace": 1}
            heads = {"num_attention_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4}
            DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=60, **sizes, **heads)).save_pretrained("models/deepseek")
        if "models/llama.gguf" in text:
            pytest.importorskip("gguf")
            write = runpy.run_path(str(ROOT / "examples" / "write_gguf.py"))["write"]
            write(tmp_path / "models" / "llama", tmp_path / "models" / "llama.gguf")
        if "notes.txt" in text:
            (tmp_path / "notes.txt").write_text("The wind turned at noon, and the ferry left an hour late. " * 200)
        if "notes/" in text:
            (tmp_path / "notes").mkdir()
            (tmp_path / "notes" / "day.txt").write_text("".join(f"Day {n}: wind {n * n % 97}.\n" for n in range(2000)))

    return fill


PYTHON = [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES if python(page)]


@pytest.mark.parametrize("page", PYTHON)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # as x-transformers is imported
def test_python_runs(page: str, reader: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    reader(page)
    module = ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", module)
    torch.manual_seed(0)
    exec(python(page), vars(module))
    assert EXPECTED.get(page, bool)(vars(module))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_parse(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line itself, with verbs that do nothing."""

    def idle(verb: Callable[..., int]) -> Callable[..., int]:
        return wraps(verb)(lambda *_, **__: 0)

    found = {name: idle(verb) for name, verb in cli.verbs().items()}
    monkeypatch.setattr(cli, "verbs", lambda: found)
    TASKS.load()
    monkeypatch.setattr(TASKS, "factories", dict(TASKS.factories))  # what a plugin registers is forgotten
    monkeypatch.setattr(plugins, "load", lambda path: (ROOT / path).is_file() and runpy.run_path(str(ROOT / path)))
    for arguments in commands(page):
        assert cli.main(arguments) == 0, f"longitude {shlex.join(arguments)}: {capsys.readouterr().err}"


def cheap(arguments: list[str]) -> bool:
    """Whether what a command names is here, and it trains nothing, which takes minutes."""
    verb, named = arguments[0], arguments[1] if arguments[1:] else ""
    if verb == "check":
        return Path(named.partition(":")[0]).exists()
    if verb == "show":
        return named.partition(":")[0].partition("+")[0] in {**ENCODINGS, **MIXERS} or Path(named).exists()
    return verb == "list" or (verb == "extend" and Path(named).exists() and "--fine-tune" not in arguments)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if {words[0] for words in commands(page)} & RUN])
def test_cheap_commands_run(page: str, reader: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, as far as they are cheap. Pages show models that break a law, exit code 1; code of a page breaks none."""
    reader(page)
    for arguments in filter(cheap, commands(page)):
        codes = (0,) if any(".py:" in each for each in arguments) else (0, 1)
        assert cli.main(arguments) in codes, f"longitude {shlex.join(arguments)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", ["ecosystem", "errata"])
def test_tests_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = {*re.findall(r"`(?:tests/[\w/]+\.py::)?(test_\w+)`", text)}
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert named and named - {*re.findall(r"def (test_\w+)", code)} == set()


# ---- size, and figures that stand in several places ----------------------------------------------------------------------
BLOCK = re.compile(r"<!-- numbers: ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
TIMED = re.compile(r"make (study|test|checkpoint)\b[^\n]*?\b(\w+) minutes")
"""A command of make, and how long it takes, in one line."""


def test_pages_can_be_read():
    readme, *pages = (len((ROOT / page).read_text(encoding="utf-8").split()) for page in PAGES)
    assert sum(pages) <= 45_000 and readme <= 900


def test_a_table_of_a_run_and_a_time_are_the_same_on_every_page():
    """Verdicts and numbers stand in blocks that a script fills from one run."""
    blocks, times = defaultdict(set), defaultdict(set)
    for page in [*PAGES, "Makefile"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, block in BLOCK.findall(text):
            blocks[name].add(block)
        for command, time in TIMED.findall(text.replace("`", "")):
            times[command].add(time)
    assert {name: len(block) for name, block in blocks.items() if len(block) > 1} == {}
    assert times["study"] == {"five"} and times["test"] == {"ten"} and times["checkpoint"] == {"five"}
