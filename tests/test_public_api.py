"""The public API is the committed one, docs/public_api.txt: it changes on purpose. And a type checker knows what it returns."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import longitude as lg
import make_api
import make_signatures

ROOT = Path(__file__).parents[1]


def test_the_public_api_is_frozen() -> None:
    changes = make_signatures.difference(make_signatures.FILE.read_text(encoding="utf-8"), make_signatures.text())
    assert changes == [], "\n".join([make_signatures.ADVICE, *changes])


def names_in(code: str) -> Iterator[str]:
    """The dotted names that Python code imports or reads: "longitude.measure.load", "lg.attend"."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_pages_show_public_names_alone() -> None:
    """Public is what docs/public_api.txt has; every other module and name is internal."""
    public = dict(make_api.public_names())
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for name in names_in(code):
                if dotted := re.match(r"(?:lg|longitude)(\.\w+)(\.\w+)?", name):
                    module = isinstance(public.get(f"lg{dotted[1]}"), ModuleType)
                    assert f"lg{dotted[1]}{(module and dotted[2]) or ''}" in public, f"{page.name}: {name}"


TYPES = {
    "lg.attend(x, x, x)": "Tensor",
    "lg.attend(x, x, x, encoding='alibi', return_weights=False)": "Tensor",
    "lg.attend(x, x, x, encoding=[lg.ALiBi(4)], mask=lg.Window(3), return_weights=True)": "tuple[Tensor, Tensor]",
    "lg.attend(x, x, x, return_lse=True, scale=1.0)": "tuple[Tensor, Tensor]",
    "lg.attend(x, x, x, return_weights=bool(x.any()))": "Tensor | tuple[Tensor, Tensor]",
    "lg.explain(x, x, x, encoding='alibi', return_lse=True)": "tuple[Verdict, ...]",
    "lg.encoding('rope', head_dim=8, layout='half')": "Encoding",
}
MISTAKES = (
    "lg.attend(x, x, x, encodng='alibi')",
    "lg.attend(x, x, x, encoding=3)",
    "lg.explain(x, x, x, encodng='alibi')",
)


@pytest.mark.slow
def test_a_type_checker_knows_what_calls_return(tmp_path: Path) -> None:
    lines = ["import torch", "import longitude as lg", "x = torch.randn(1, 4, 8, 16)"]
    lines += [f"reveal_type({call})" for call in TYPES] + [*MISTAKES]
    (tmp_path / "user.py").write_text("\n".join(lines))
    options = {"extraPaths": [str(Path(lg.__file__).parents[1])], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    messages = [(error["range"]["start"]["line"], error["message"]) for error in errors]
    for line, (call, kind) in enumerate(TYPES.items(), 3):
        assert [message.split(" is ")[1] for n, message in messages if n == line] == [f'"{kind}"'], call
    assert {n for n, _ in messages if n >= 3 + len(TYPES)} == {3 + len(TYPES) + n for n in range(len(MISTAKES))}
