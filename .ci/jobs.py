"""Runs the jobs of .github/workflows here, in fresh clones and environments: `python .ci/jobs.py core-only versions`.

    python .ci/jobs.py                      what there is, and which steps need GitHub

Each combination of a job's matrix gets a clone of the last commit and an environment of its Python, as actions/setup-python gives
one. A step that needs GitHub, another system or a missing Python is named. So is one that changes the machine; the steps after
it run with what is here.
Needs PyYAML.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
DONE_HERE = ("checkout", "setup-python")
ONLY_THERE = {
    "sudo ": "it changes the machine",
    "playwright install": "it loads a browser from elsewhere",
    "gh ": "it writes to the repository's pages",
}
HERE = {"server_url": "https://example.org", "repository": "longitude/longitude"}
"""Values of GitHub's context that steps ask for."""
SYSTEMS = {"linux": "ubuntu", "darwin": "macos", "win32": "windows"}


class Job(NamedTuple):
    name: str
    cell: dict[str, str]
    runner: str
    steps: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.cell.items())])


def jobs() -> list[Job]:
    """Every job of every workflow, once for each combination of its matrix."""
    found = []
    for path in sorted(WORKFLOWS.glob("*.yml")):
        for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
            for cell in cells(job.get("strategy", {}).get("matrix", {})):
                found.append(Job(name, cell, filled(job["runs-on"], cell), job["steps"]))
    return found


def cells(matrix: dict[str, Any]) -> list[dict[str, str]]:
    """The combinations of a matrix, which has either lists or `include`."""
    if "include" in matrix:
        return matrix["include"]
    return [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]


def filled(text: str, cell: dict[str, str]) -> str:
    """With the values of the matrix in it. A variable of the repository is one of the environment here, or empty."""
    text = re.sub(r"\$\{\{ *matrix\.([\w-]+) *\}\}", lambda found: cell[found[1]], text)
    text = re.sub(r"\$\{\{ *github\.(\w+) *\}\}", lambda found: HERE.get(found[1], found[0]), text)
    return re.sub(r"\$\{\{ *vars\.(\w+) *\}\}", lambda found: os.environ.get(found[1], ""), text)


def why_not(job: Job, step: dict[str, Any]) -> str | None:
    """Why a step cannot run here; None where it can, or where its condition is false."""
    if "uses" in step:
        action = step["uses"].partition("@")[0]
        if action.rpartition("/")[2] not in DONE_HERE:
            return f"{action} is GitHub's"
        version = filled(step.get("with", {}).get("python-version", ""), job.cell)
        return f"no Python {version} is here" if version and python(version) is None else None
    return next((why for words, why in ONLY_THERE.items() if words in step["run"]), None)


def python(version: str) -> str | None:
    """An interpreter of this version that runs."""
    code = "import sys, ensurepip; print(*sys.version_info[:2], sep='.')"
    named = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for each in map(str, filter(None, named)):
        if subprocess.run([each, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return each
    return None


def run(job: Job, folder: Path) -> bool:
    """Every step of a job, up to the first that fails or cannot run; prints a line for each. Whether all passed."""
    clone = folder / re.sub(r"[^\w.=-]+", "-", job.title)
    bin_of = clone / "of-the-job" / "bin"
    environment = {
        **os.environ,
        "GITHUB_REF_NAME": "main",
        "CI": "true",
        "PATH": f"{bin_of}{os.pathsep}{os.environ['PATH']}",
    }
    environment.setdefault("TORCH_OPTIONS", "")
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    print(f"{job.title}", flush=True)
    if not job.runner.startswith(SYSTEMS[sys.platform]) or "arm" in job.runner:
        print(f"    not here: it needs {job.runner}")
        return True
    for step in job.steps:
        name = step.get("name") or step.get("run") or step["uses"].partition("@")[0]
        if "if" in step:
            print(f"    not here: {name}: it is for {step['if']}", flush=True)
            continue
        if (why := why_not(job, step)) is not None:
            print(f"    not here: {name}: {why}{'' if 'run' in step else '; and what follows it'}", flush=True)
            if "run" in step:
                continue
            return True
        begun = time.monotonic()
        code = do(job, step, clone, environment)
        what = "passed" if code == 0 else f"failed ({code})"
        print(f"    {what} in {time.monotonic() - begun:.0f} s: {' '.join(name.split())[:120]}", flush=True)
        if code:
            return False
    return True


def do(job: Job, step: dict[str, Any], clone: Path, environment: dict[str, str]) -> int:
    """The exit code of one step. Its output is in clone/LOG."""
    action = step.get("uses", "").partition("@")[0].rpartition("/")[2]
    with open(clone.with_name(f"{clone.name}.log"), "a", encoding="utf-8") as log:

        def call(command: list[str], cwd: Path | None = None) -> int:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            return subprocess.call(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)

        if action == "checkout":
            return call(["git", "clone", "--quiet", str(ROOT), str(clone)])
        if action == "setup-python":
            interpreter = python(filled(step["with"]["python-version"], job.cell))
            assert interpreter is not None
            return call([interpreter, "-m", "venv", str(clone / "of-the-job")])
        command = filled(step["run"], job.cell)
        environment = environment | {key: filled(str(value), job.cell) for key, value in step.get("env", {}).items()}
        return call(["bash", "-eo", "pipefail", "-c", command], clone)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="JOB")
    options = parser.parse_args()
    found = jobs()
    if unknown := set(options.names) - {job.name for job in found}:
        print(f"expected jobs among {', '.join(dict.fromkeys(job.name for job in found))}, got {', '.join(unknown)}")
        return 2
    if not options.names:
        for job in found:
            reasons = [why for step in job.steps if "if" not in step and (why := why_not(job, step)) is not None]
            print(f"{job.title}{''.join(f'; not here: {why}' for why in dict.fromkeys(reasons))}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="longitude-ci-"))
    print(f"logs and clones: {folder}", flush=True)
    passed = [run(job, folder) for job in found if job.name in options.names]
    if all(passed):
        shutil.rmtree(folder)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
