"""The code, machine and packages that a number was computed with."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import longitude

PACKAGES = ("longitude", "torch", "transformers", "accelerate", "numpy", "scipy", "pandas")


def provenance() -> dict[str, Any]:
    """versions, commit and machine: what every run records."""
    return {"versions": versions(), "commit": commit_of_code(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """Package -> version; Python too."""
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


@cache
def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def machine() -> dict[str, Any]:
    """Description of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name, family = known.get("model name"), known.get("cpu family")
    kind = f" (family {family}, model {known.get('model')})" if family else ""  # many processors share a name
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{name}{kind}" if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@cache
def commit_of_code() -> str | None:
    """The git commit of this source tree, with "-dirty" if files differ from it; None if it is in no repository."""
    here = Path(longitude.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")
