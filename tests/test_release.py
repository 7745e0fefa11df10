"""A release: tag, version, changelog and citation agree; the job that publishes waits for every other one."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

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
    assert RELEASE["notes"](tree).startswith("### ")


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


def test_links_of_the_readme_work_on_another_page() -> None:
    at = re.compile(rf"https://an\.example/(raw|blob)/v{re.escape(lg.__version__)}/([^)\"#]*)")
    page = RELEASE["page"]("https://an.example")
    files = [found[2] for found in at.finditer(page)]
    assert len(files) > 30 and all((ROOT / name).exists() for name in files)
    assert {found[2] for found in at.finditer(page) if found[1] == "raw"} == {*re.findall(r"docs/[\w-]+\.svg", page)}
    relative = re.compile(r"https://an\.example/(?:raw|blob)/v[^/]+/")
    assert relative.sub("", page) == (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r'(\]\(|src(set)?=")(?!http|#)', page)


# ---- continuous integration ------------------------------------------------------------------------------------------
def test_actions_are_pinned_by_hash() -> None:
    """By hash, with the version beside it, so that nobody moves a tag under a workflow that may publish."""
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    uses = [line.partition("uses:")[2].strip() for text in texts for line in text.splitlines() if "uses:" in line]
    assert len(uses) > 20 and all(re.match(r"[\w/-]+@[0-9a-f]{40} # v\d", each) for each in uses)
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {each["package-ecosystem"] for each in updates} == {"github-actions", "pip"}
