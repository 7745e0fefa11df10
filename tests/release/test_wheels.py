"""The wheels of dist/, as `make dist` left them: names and sizes, and each in an environment of its own without a compiler."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from longitude.native import build

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]
COMPILED = {"x86_64": "manylinux_2_17_x86_64", "aarch64": "manylinux_2_17_aarch64"}
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from longitude.checkpoints.load import byte_tokenizer
torch.manual_seed(0)
config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     max_position_embeddings=64)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
byte_tokenizer().save_pretrained(sys.argv[1])
"""
ROTATE = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <math.h>
#include <stdint.h>
typedef int64_t num;
int main(int n, char **arg) {
  for (int i = 1; i < n; i++) if (!dlopen(arg[i], RTLD_NOW)) { puts(dlerror()); return 2; }
  void *lib = dlopen(arg[1], RTLD_NOW);
  void (*rotate)(const num *) = dlsym(lib, "rotate");
  float x[24], y[24], c[12], s[12];
  for (int i = 0; i < 24; i++) x[i] = i - 7;
  for (int i = 0; i < 12; i++) c[i] = cosf(i), s[i] = sinf(i);
  num call[] = {(num)c, (num)s, 1, 3, 4, 0, 1, 1, 1, (num)x, (num)y, 1, 0, 24, 24, 8, 24, 24, 8};
  rotate(call);
  float worst = 0;
  for (int l = 0; l < 3; l++) for (int k = 0; k < 4; k++) {
    float a = x[8*l+k], b = x[8*l+k+4], cc = c[4*l+k], ss = s[4*l+k];
    worst = fmaxf(worst, fabsf(y[8*l+k] - (a*cc - b*ss)) + fabsf(y[8*l+k+4] - (a*ss + b*cc)));
  }
  printf("worst %g\n", worst); return worst > 1e-5;
}
"""
ATTEND = """
import os, sys, torch, longitude as lg
from longitude.native import load
assert os.path.abspath(lg.__file__).startswith(sys.argv[1]), lg.__file__
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 50, 32).requires_grad_().unbind()
for encoding in (lg.ALiBi(4), lg.Rotary(32, "half")):
    got, expected = (lg.attend(q, k, v, encoding=encoding, mask=lg.Causal(), backend=b) for b in ("auto", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    got, expected = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
lg.mixer("mamba", dim=24)(torch.randn(1, 9, 24)).sum().backward()
print(load.route())
"""


@pytest.fixture(scope="module", autouse=True)
def built():
    if not WHEELS and "CI" not in os.environ:
        pytest.skip("no wheels in dist/: make dist")


def is_pure(wheel: Path) -> bool:
    return wheel.name.endswith("-none-any.whl")


def machine_of(wheel: Path) -> str:
    return next(machine for machine in build.LEVELS if wheel.stem.endswith(machine))


def test_there_is_a_wheel_for_everyone():
    assert sum(map(is_pure, WHEELS)) == 1 and len(list((ROOT / "dist").glob("*.tar.gz"))) == 1
    assert {machine_of(wheel) for wheel in WHEELS if not is_pure(wheel)} == {*build.LEVELS}
    (needs,) = (ROOT / "dist").glob("*.cdx.json")
    assert {"torch", "jaxtyping"} <= {part["name"] for part in json.loads(needs.read_text())["components"]}
    for wheel in WHEELS:
        assert wheel.stat().st_size < 3 * 2**20, wheel.name
        files = zipfile.ZipFile(wheel).infolist()
        names = [file.filename for file in files]
        assert all(file.external_attr >> 16 & 0o444 == 0o444 for file in files)  # readable by everybody
        assert {f"longitude/{source}" for source in build.LIBRARIES} <= set(names)
        libraries = {name for name in names if name.endswith(".so")}
        if is_pure(wheel):
            assert not libraries
            continue
        machine = machine_of(wheel)
        assert COMPILED[machine] in wheel.name, "glibc of 2014, older than torch's own"
        assert libraries == {
            f"longitude/native/compiled/{machine}/{level}/{build.name_of(source, options)}"
            for level in build.LEVELS[machine]
            for source, kinds in build.LIBRARIES.items()
            for options in kinds
        }


@pytest.fixture(scope="module", params=WHEELS, ids=lambda wheel: wheel.stem.split("-none-")[-1])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but a wheel, beside what it depends on; its PATH has no compiler."""
    wheel, folder = request.param, tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip, install = "-m pip --python".split(), "install --quiet --no-deps --no-index".split()
    command = [sys.executable, *pip, str(folder / "bin/python"), *install, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not is_pure(wheel) and machine_of(wheel) != platform.machine():
        assert done.returncode != 0 and "is not a supported wheel on this platform" in done.stderr
        pytest.skip(f"pip refuses it on {platform.machine()}, as it should")
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # whose longitude comes after its own
    return folder


def run(folder: Path, *arguments: object) -> str:
    """In the environment; what it printed."""
    clean = {"PATH": str(folder / "bin"), "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    clean |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    assert shutil.which("gcc", path=clean["PATH"]) is None
    command = [folder / "bin/python", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def expected_route(folder: Path) -> str:
    """How the line of an install begins."""
    (site,) = folder.glob("lib/python*/site-packages")
    if not (site / "longitude/native/compiled").is_dir():
        return "C kernels: none"
    level = build.levels_of(platform.machine(), build.cpuinfo())[0]
    return f"C kernels: compiled for {level}"


def test_attention_runs_and_says_by_what(installed: Path):
    printed = run(installed, "-W", "error", "-c", ATTEND, installed)
    assert printed.splitlines()[-1].startswith(expected_route(installed))
    assert not (installed / "home").exists()  # nothing was compiled


def test_the_verbs_run(installed: Path):
    longitude = "-m", "longitude"
    assert expected_route(installed) in " ".join(run(installed, *longitude, "list").split())
    study = "study --steps 20 --layers 1 --hidden 16 --heads 2 --train-length 16 --test-lengths 16 32 --batch-size 2 --out run"
    run(installed, *longitude, *study.split(), "--encodings", "rope", "alibi", "--data", "stdlib")
    assert (installed / "run" / "report.html").is_file()
    run(installed, "-c", MODEL, "model")
    run(installed, *longitude, *"extend model --to 128 --method yarn --no-measure --out longer".split())
    run(installed, *longitude, *"check longer --length 40".split())
    run(installed, *longitude, *"check alibi --laws gradients".split())


def test_every_level_that_this_processor_has_gives_the_same(installed: Path):
    """The levels below the best one, as an older processor would take them."""
    (site,) = installed.glob("lib/python*/site-packages")
    here = site / "longitude/native/compiled" / platform.machine()
    if not here.is_dir():
        pytest.skip("it has no levels")
    for level in build.levels_of(platform.machine(), build.cpuinfo()):
        needed = build.LEVELS[platform.machine()][level][1]
        flags = f"flags : {needed}\nFeatures : {needed}\n"
        script = f"from longitude.native import build; build.cpuinfo = lambda: {flags!r}\n"
        printed = run(installed, "-c", script + ATTEND, installed)
        assert printed.splitlines()[-1] == f"C kernels: compiled for {level}"


def test_the_loops_for_arm_load_under_qemu_and_rotate(tmp_path: Path):
    """No Python of that machine is needed: a program opens every library, and calls the smallest."""
    gcc, qemu = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    wheel = next((wheel for wheel in WHEELS if "aarch64" in wheel.name), None)
    if not (gcc and qemu and wheel):
        pytest.skip("no cross compiler, no qemu-aarch64, or no wheel for it here")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "main.c").write_text(ROTATE)
    subprocess.run([gcc, "-o", "main", "main.c", "-lm", "-ldl"], cwd=tmp_path, check=True)
    libraries = [*(tmp_path / "longitude/native/compiled/aarch64").rglob("*.so")]
    libraries.sort(key=lambda path: not path.name.startswith("rotate-FLOAT32"))
    command = [qemu, "-L", "/usr/aarch64-linux-gnu", "main", *map(str, libraries)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
