"""For all tests: the same random numbers, fresh memory full of NaN, one thread per worker, and what is in the quick tier."""

import gc
import inspect
import os
import random
import shutil
import sys
from collections import Counter
from functools import lru_cache

import pytest
import torch

# Without a GPU kernels in Triton are interpreted; triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for switch in ("LONGITUDE_BACKENDS",):  # tests set them themselves
    os.environ.pop(switch, None)
if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:  # workers share the cores
    torch.set_num_threads(1)
# torch keeps a seed for a GPU that is not there, with a traceback of pytest's deep stack: 3 ms for each seed.
if not torch.cuda.is_available() and not torch.xpu.is_available():
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="test the files in another order, drawn by this seed")


@pytest.hookimpl(tryfirst=True)  # before -m is read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """@pytest.mark.one_in(n): each n-th case of the test is quick, the others are slow. Where n has no divisor in common with the
    lengths of the grid's sides, and there are n times as many cases as values of a side, each value of it is met."""
    cases: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    if (seed := config.getoption("shuffle")) is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        place = {file: n for n, file in enumerate(files)}
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays: a full collection, as Trainer asks for after each training, need not walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_imported_stays():
    """Freeze what a file imported, as after the collection. Quick tier: 609 s of processor time with it, 635 s without."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Skip what asks for the backend `table` where it was not compiled. `auto` never says this."""
    try:
        return (yield)
    except ValueError as error:
        # where it should have been compiled, its absence is an error
        expected = sys.platform == "linux" and shutil.which("gcc") and os.environ.get("LONGITUDE_COMPILE") != "0"
        if expected or "it runs in C, which is not compiled here" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed also walks the stack, a millisecond deep inside pytest
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def command(capsys):
    """command(*arguments) -> (exit code, standard output, standard error) of the command line."""

    def call(*arguments: object) -> tuple[int, str, str]:
        from longitude.cli import main

        return main([*map(str, arguments)]), *capsys.readouterr()

    return call


@pytest.fixture(autouse=True, scope="session")
def _fresh_memory_is_nan():
    """torch.empty gives NaN, so that a read of what was never written shows. Kernels must be deterministic, too."""
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())  # cumsum has no such kernel on CUDA
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _what_the_interpreter_replaces_is_found_once():
    """Not at each call of a function in a kernel, as Triton does: that was half of the time of all kernels."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_patch_builtin"):
        return
    is_builtin = sys.modules["triton.language"].core.is_builtin

    @lru_cache
    def names(package) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch(package, *rest) -> None:
        for name in names(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch


@pytest.fixture(autouse=True)
def no_plugins_of_other_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that a test loads is written into the environment, for workers; commands of later tests would load it, too."""
    if "claims" not in request.node.nodeid:
        monkeypatch.delenv("LONGITUDE_PLUGINS", raising=False)
