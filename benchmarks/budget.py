"""The size of the project against the budget: code, files, tests, public names, words. Advice; no test asks for it."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
WANTED = {
    "src, lines of code": 34_500,
    "files in src": 310,
    "tests, lines": 38_000,
    "scripts, lines of code": 5_500,
    "public names": 330,
    "words in docs/*.md": 45_000,
}
"""Upper limits. A change that passes one removes as much elsewhere, and its message says where."""
ROOMS = {
    "attention": 6_300,
    "study": 4_500,
    "positions": 3_200,
    "check": 2_700,
    "measure": 2_700,
    "testing": 2_600,
    "recurrent": 2_100,
    "extend": 1_900,
    "checkpoints": 1_800,
    "drawings": 1_400,
}
"""Upper limits of lines of code by folder of src/longitude."""
NOT_CODE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def code_lines(path: Path) -> int:
    """Lines that hold code: no comment, no docstring, no blank."""
    text = path.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({line for t in tokens if t.type not in NOT_CODE for line in range(t.start[0], t.end[0] + 1)} - strings)


def code_in(*folders: Path) -> int:
    return sum(
        code_lines(path) for folder in folders for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi")
    )


def count() -> dict[str, int]:
    """Every number of WANTED, then every number of ROOMS."""
    package, tests = ROOT / "src" / "longitude", [*(ROOT / "tests").rglob("*.py")]
    return {
        "src, lines of code": code_in(package),
        "files in src": len([*package.rglob("*.py"), *package.rglob("*.pyi")]),
        "tests, lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "scripts, lines of code": code_in(*(ROOT / name for name in ("benchmarks", "docs", ".ci", "release"))),
        "public names": sum(line[0] != "#" for line in (ROOT / "docs" / "public_api.txt").read_text().splitlines()),
        "words in docs/*.md": sum(len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")),
    } | {room: code_in(package / room) for room in ROOMS}


def main() -> None:
    now, wanted = count(), WANTED | ROOMS
    columns = {"now": now, "wanted": wanted, "missed by": {name: max(0, now[name] - wanted[name]) for name in now}}
    print(f"{'':<24}" + "".join(f"{title:>13}" for title in columns))
    for name in now:
        print(f"{name:<24}" + "".join(f"{column[name] or '-':>13}" for column in columns.values()))


if __name__ == "__main__":
    main()
