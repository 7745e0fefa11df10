"""The quick tests that what you changed can break: `make near`, as arguments of pytest, one a line.

Changed are the files that differ from a commit, by default from main (on main: HEAD). A test file is near where it changed,
or imports a module that changed, or one that imports such a module. A change of what is registered by name runs its laws.

    python .ci/near.py [COMMIT]
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
LAWS = "tests/testing/test_laws.py"
REGISTERED = re.compile(r'@register\w*\(\s*"([^"]+)"')
EVERYWHERE = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/support.py")
"""Files that any test may depend on."""
ALWAYS = ("tests/test_house.py", "tests/test_imports.py", "tests/test_docstrings.py", "tests/test_public_api.py")


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def changed(since: str) -> list[str]:
    """Files that differ from a commit, new ones included."""
    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    return ".".join(Path(path).relative_to("src").with_suffix("").parts).removesuffix(".__init__")


@cache
def homes(package: str) -> dict[str, str]:
    """Names of a package that come from other modules, on first use, as its stub says: name -> module."""
    stub = SRC / package.replace(".", "/") / "__init__.pyi"
    nodes = ast.parse(stub.read_text(encoding="utf-8")).body if stub.exists() else []
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}


def places(package: str, name: str) -> set[str]:
    """The module that has a name of a package, and the one that the name may be."""
    home = homes(package).get(name, package)
    return {home, f"{home}.{name}"}


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules that a test file, or its conftest, reads: by import statements, by strings of code, and by `lg.NAME`."""
    text = path.read_text(encoding="utf-8")
    modules = {*re.findall(r"\blongitude(?:\.\w+)+", text)}
    modules = modules.union(*(places("longitude", name) for name in re.findall(r"\blg\.(\w+)", text)))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = modules.union({node.module}, *(places(node.module, alias.name) for alias in node.names))
            if node.module.endswith(".conftest"):
                modules |= imported((ROOT / node.module.replace(".", "/")).with_suffix(".py"))
    return frozenset(modules)


def near(files: list[str]) -> list[str]:
    """Arguments of pytest for changed files; none: nothing that a test reads has changed."""
    if any(name in EVERYWHERE for name in files):
        return ["tests"]
    graph = grimp.build_graph("longitude", exclude_type_checking_imports=True)
    sources = [name for name in files if name.startswith("src/longitude/") and name.endswith(".py")]
    touched = {module_of(name) for name in sources}
    for module in touched & graph.modules:
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
