"""The quick tests that what you changed can break: `make near`, as arguments of pytest, one a line.

Changed are the files that differ from a commit, by default from main (on main: HEAD). A test file is near where it changed,
or imports a module that changed, or one that imports such a module. A change of what is registered by name runs its laws.

    python .ci/near.py [COMMIT]
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

import longitude
import longitude.measure

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
LAWS = "tests/testing/test_laws.py"
REGISTERED = re.compile(r'@register\w*\(\s*"([^"]+)"')
EVERYWHERE = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/support.py")
"""Files that any test may depend on."""
LAZY = {package.__name__: package._MODULE_OF for package in (longitude, longitude.measure)}
"""Packages whose names come from other modules, on first use."""
ALWAYS = ("tests/test_house.py", "tests/test_imports.py", "tests/test_docstrings.py", "tests/test_public_api.py")


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def changed(since: str) -> list[str]:
    """Files that differ from a commit, new ones included."""
    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    return ".".join(Path(path).relative_to("src").with_suffix("").parts).removesuffix(".__init__")


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules that a test file reads: by import statements, by strings of code, and by `lg.NAME`."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            places = LAZY.get(node.module, {})
            names = [alias.name for alias in node.names]
            yield from (f"longitude.{places[name]}" if name in places else f"{node.module}.{name}" for name in names)
    yield from re.findall(r"\blongitude(?:\.\w+)+", text)
    for name in {*re.findall(r"\blg\.(\w+)", text)}:
        yield f"longitude.{LAZY['longitude'].get(name, name)}"


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("longitude", exclude_type_checking_imports=True)


def near(files: list[str]) -> list[str]:
    """Arguments of pytest for changed files; none: nothing that a test reads has changed."""
    if any(name in EVERYWHERE for name in files):
        return ["tests"]
    graph = _graph()
    sources = [name for name in files if name.startswith("src/longitude/") and name.endswith(".py")]
    touched = {module_of(name) for name in sources}
    for module in [each for each in touched if each in graph.modules]:
        touched |= graph.find_downstream_modules(module)
    helpers = {name.removesuffix(".py").replace("/", ".") for name in files if name.startswith("tests/")}
    chosen = {*ALWAYS} if sources else set[str]()
    for path in ROOT.glob("tests/**/test_*.py"):
        name = str(path.relative_to(ROOT))
        if name != LAWS and (name in files or (touched | helpers) & imported(path)):
            chosen.add(name)
    registered = [
        name for file in sources if (ROOT / file).exists() for name in REGISTERED.findall((ROOT / file).read_text())
    ]
    if registered:
        laws = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", "-k", " or ".join(registered), LAWS],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        chosen |= {line for line in laws.stdout.splitlines() if line.startswith(LAWS)}
    elif any(name.startswith("src/longitude/testing/") for name in files):
        chosen.add(LAWS)
    return sorted(chosen)


if __name__ == "__main__":
    branch = git("rev-parse", "--abbrev-ref", "HEAD")[0]
    print("\n".join(near(changed(sys.argv[1] if sys.argv[1:] else "HEAD" if branch == "main" else "main"))))
