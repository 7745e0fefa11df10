"""Whether a tag may be released: `python .ci/release.py v0.1.0` prints what changed in that version, or what is in the way.

The tag, the version in src/longitude/__init__.py, the newest entry of CHANGELOG.md and CITATION.cff must agree, and the entry
has a date.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def found(pattern: str, path: Path) -> str | None:
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return None if match is None else match[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """What contradicts a release of this tag; [] where all is well."""
    version = found(r'^__version__ = "([^"]+)"', root / "src" / "longitude" / "__init__.py")
    newest = found(r"^## \[?(\d[^\]\s]*)", root / "CHANGELOG.md")
    date = found(r"^## \[?\d[^\]\s]*\]? - (\S+)", root / "CHANGELOG.md")
    cited = found(r"^version: (\S+)", root / "CITATION.cff")
    wrong = []
    if tag != f"v{version}":
        wrong.append(f"the tag {tag}: expected v{version}, the version in src/longitude/__init__.py")
    if newest != version:
        wrong.append(f"CHANGELOG.md: expected its newest entry to be {version}, got {newest}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date or ""):
        wrong.append(f"CHANGELOG.md: expected the date of {newest} as in 2026-11-23, got {date}")
    if cited != version:
        wrong.append(f"CITATION.cff: expected version {version}, got {cited}")
    return wrong


def notes(root: Path = ROOT) -> str:
    """The newest entry of the changelog, without its heading."""
    return re.split(r"^## .*\n", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1].strip()


def page(url: str, root: Path = ROOT) -> str:
    """README.md for a page elsewhere: relative links and pictures lead to this version of the repository at `url`."""
    version = found(r'^__version__ = "([^"]+)"', root / "src" / "longitude" / "__init__.py")

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith(".svg") else "blob"
        return f"{link[1]}{url}/{kind}/v{version}/{link[2]}"

    text = (root / "README.md").read_text(encoding="utf-8")
    return re.sub(r'(\]\(|\bsrc(?:set)?=")(?!https?:|#)([^)"]+)', absolute, text)


def main() -> int:
    if len(sys.argv) != 2:
        print("expected one tag, as in: python .ci/release.py v0.1.0", file=sys.stderr)
        return 2
    wrong = problems(sys.argv[1])
    print("\n".join(wrong) if wrong else notes())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
