"""A release: tag, version, changelog and citation agree."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

import longitude as lg

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
FILES = ("CHANGELOG.md", "CITATION.cff", "src/longitude/__init__.py")


# ---- the version -----------------------------------------------------------------------------------------------------
@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a release reads, with a date."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    log = tmp_path / "CHANGELOG.md"
    log.write_text(re.sub(r"^(## \[\S+\]) - .*", r"\1 - 2030-01-31", log.read_text(), count=1, flags=re.MULTILINE))
    return tmp_path


def test_a_right_tag(tree: Path) -> None:
    assert RELEASE["problems"](f"v{lg.__version__}", tree) == []
    assert RELEASE["notes"](tree).startswith("### Added\n")


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("src/longitude/__init__.py", f'"{lg.__version__}"', '"7.7.7"', "expected v7.7.7"),
        ("CHANGELOG.md", f"[{lg.__version__}]", "[7.7.7]", "its newest entry"),
        ("CHANGELOG.md", "2030-01-31", "unreleased", "expected the date"),
        ("CITATION.cff", f"version: {lg.__version__}", "version: 7.7.7", "CITATION.cff"),
    ],
)
def test_what_contradicts_is_named(name: str, before: str, after: str, words: str, tree: Path) -> None:
    path = tree / name
    path.write_text(path.read_text().replace(before, after, 1))
    assert any(words in line for line in RELEASE["problems"](f"v{lg.__version__}", tree))


def test_a_tagged_commit_is_a_release() -> None:
    """Where this commit has a tag of a version, it is the right one."""
    done = subprocess.run(["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True)
    tags = [tag for tag in done.stdout.split() if re.match(r"v\d", tag)] if done.returncode == 0 else []
    assert [problem for tag in tags for problem in RELEASE["problems"](tag)] == []
