"""The size of the house: lines of code, files, tests, public names and assertions on wording. Advice; no test asks for it.

python benchmarks/budget.py [--at COMMIT]
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
WORDS = 3
"""A literal of so many words that a test compares with a message is an assertion on wording."""


def code_lines(path: Path) -> int:
    """Lines that hold code: no comment, no docstring, no blank."""
    text = path.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({line for t in tokens if t.type not in NOT_CODE for line in range(t.start[0], t.end[0] + 1)} - strings)


def on_wording(path: Path) -> int:
    """`match=` of several words, and comparisons of such a literal with what was printed or raised."""
    text = path.read_text(encoding="utf-8")
    matches = re.findall(r'match=[rf]{0,2}"([^"]*)"', text)
    literals = re.findall(
        r'"([^"\n]*)"\s+(?:not )?in (?:str\(|error|err\b|out\b|message|words|reason|capsys|notes|printed)', text
    )
    return sum(len(re.findall(r"[A-Za-z]{2,}", each)) >= WORDS for each in (*matches, *literals))


def count(root: Path) -> dict[str, int]:
    src, tests = [*(root / "src").rglob("*.py")], [*(root / "tests").rglob("*.py")]
    return {
        "src, lines of code": sum(map(code_lines, src)),
        "files in src": len(src),
        "tests, lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "public rows": len((root / "docs" / "public_api.txt").read_text().splitlines()),
        "assertions on wording": sum(map(on_wording, tests)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", help="a commit to count as well")
    asked = parser.parse_args()
    columns = {"now": count(ROOT)}
    if asked.at:
        archive = subprocess.run(["git", "archive", asked.at], cwd=ROOT, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            columns = {asked.at: count(Path(folder))} | columns
    print(f"{'':<24}" + "".join(f"{name:>12}" for name in columns))
    for name in columns["now"]:
        print(f"{name:<24}" + "".join(f"{column[name]:>12,}" for column in columns.values()))


if __name__ == "__main__":
    main()
