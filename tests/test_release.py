"""A release: tag, version, changelog and citation agree; the job that publishes waits for every other one."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import longitude as lg

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
JOBS = runpy.run_path(str(ROOT / ".ci" / "jobs.py"))
FILES = ("CHANGELOG.md", "CITATION.cff", "src/longitude/__init__.py")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    """Nothing else changes, and each leads to a file of the version."""
    at = re.compile(rf"https://an\.example/(raw|blob)/v{re.escape(lg.__version__)}/([^)\"#]*)")
    page = RELEASE["page"]("https://an.example")
    files = [found[2] for found in at.finditer(page)]
    assert len(files) > 30 and all((ROOT / name).exists() for name in files)
    assert {found[2] for found in at.finditer(page) if found[1] == "raw"} == {*re.findall(r"docs/[\w-]+\.svg", page)}
    relative = re.compile(r"https://an\.example/(?:raw|blob)/v[^/]+/")
    assert relative.sub("", page) == (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r'(\]\(|src(set)?=")(?!http|#)', page)


def test_a_tagged_commit_is_a_release() -> None:
    """Where this commit has a tag of a version, it is the right one."""
    done = subprocess.run(["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True)
    tags = [tag for tag in done.stdout.split() if re.match(r"v\d", tag)] if done.returncode == 0 else []
    assert [problem for tag in tags for problem in RELEASE["problems"](tag)] == []


# ---- the citation ----------------------------------------------------------------------------------------------------
def test_the_citation_says_what_the_package_says() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["cff-version"] == "1.2.0"
    assert cited["version"] == lg.__version__ and cited["type"] == "software"
    assert cited["title"].partition(":")[0].lower() == project()["name"] == "longitude"
    assert cited["authors"] == project()["authors"]
    assert (cited["abstract"], cited["keywords"]) == (project()["description"], project()["keywords"])
    assert cited["license"] == project()["license"]


# ---- continuous integration ------------------------------------------------------------------------------------------
def workflow() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def test_a_tag_runs_everything_and_then_publishes() -> None:
    ci = workflow()
    assert ci[True]["push"]["tags"] == ["v*"]  # YAML reads `on` as true
    jobs = ci["jobs"]
    build, publish = jobs["build"], jobs["publish"]
    commands = [step.get("run", "") for step in build["steps"]]
    assert any(".ci/release.py" in each for each in commands) and any("make dist" in each for each in commands)
    after = {"publish", "announce", "site"}
    assert set(publish["needs"]) == set(jobs) - after  # every other job
    assert jobs["announce"]["needs"] == "publish"
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"} and "secrets" not in str(publish)
    assert ci["permissions"] == {"contents": "read"}


def test_actions_are_pinned_by_hash() -> None:
    """By hash, with the version beside it, so that nobody moves a tag under a workflow that may publish."""
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    uses = [line.partition("uses:")[2].strip() for text in texts for line in text.splitlines() if "uses:" in line]
    assert len(uses) > 20 and all(re.match(r"[\w/-]+@[0-9a-f]{40} # v\d", each) for each in uses)
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {each["package-ecosystem"] for each in updates} == {"github-actions", "pip"}


@pytest.mark.slow
def test_the_jobs_that_run_here_say_why_others_do_not() -> None:
    """Each `run:` is tried by .ci/jobs.py, or named."""
    reasons = {job.title: [JOBS["why_not"](job, step) for step in job.steps] for job in JOBS["jobs"]()}
    assert any(reasons["publish"]) and any(reasons["browser"])


def test_what_ci_makes_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {"conformance", "ecosystem"} | set(
        re.findall(r"\bmake ([a-z-]+)", (ROOT / ".github/workflows/ci.yml").read_text())
    )
    assert asked - targets == set()


# ---- what is trusted -------------------------------------------------------------------------------------------------
def test_the_page_of_security_names_what_there_is() -> None:
    """Its options, variables and the group of plugins are those of the code."""
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "longitude").rglob("*.py"))
    for name in re.findall(r"LONGITUDE_\w+|XDG_\w+|longitude\.plugins", page):
        assert name in code, name
    for option in re.findall(r"`--([a-z-]+)", page):
        assert option.replace("-", "_") in code, option
    assert "http" not in page  # a place that is not there


@pytest.mark.slow
def test_near_tests_are_those_that_a_change_can_break() -> None:
    """Of a room that few import, of one that all import, of a page that none reads, and of a name's laws."""
    near = runpy.run_path(str(ROOT / ".ci" / "near.py"))["near"]
    few = near(["src/longitude/statistics/seeds.py"])
    assert {"tests/statistics/test_seeds.py", "tests/study/test_analysis.py"} <= {*few}
    assert not [name for name in few if name.startswith(("tests/positions", "tests/attention", "tests/recurrent"))]
    assert {"tests/measure/test_run.py", "tests/study/test_runner.py"} <= {*near(["src/longitude/positions/base.py"])}
    assert near(["docs/start.md"]) == [] and near(["tests/support.py"]) == ["tests"]
    laws = [name for name in near(["src/longitude/recurrent/rwkv7.py"]) if "::" in name]
    assert laws and all("rwkv7" in name for name in laws)
