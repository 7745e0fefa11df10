"""Memory, devices, progress where nobody watches, and limits of time and memory for work of others."""

import io
from threading import Event

import psutil
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from longitude.runs import costs, machine
from longitude.runs.machine import cores, device_of, memory_within, threads, within
from longitude.runs.terminal import Progress
from tests.support import printed, refused


def test_free_memory_is_at_most_that_of_the_group(tmp_path, monkeypatch):
    assert 0 < machine.available_memory() <= machine.total_memory()
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.available_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() > 2000


def test_free_memory_is_at_most_that_of_ulimit():
    resource, process = pytest.importorskip("resource"), psutil.Process()
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + 2**28, before[1]))
        assert machine.available_memory() <= 2**28
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [("150000 100000", 2), ("max 100000", 8), ("20000 100000", 1), ("6400000 100000", 8), (None, 8)],
)
def test_cores_are_those_that_a_container_grants(limit, wanted, tmp_path, monkeypatch):
    """A quota is no affinity: a container with two of a host's hundred cores sees them all."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cores() == wanted


def test_memory_of_a_model_is_at_least_its_numbers():
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    weights = sum(parameter.numel() for parameter in model.parameters())
    need = costs.forward_memory(model, 16, torch.bfloat16, width=1024, rows=2, chunk=128, logits=10**9)
    assert need.weights == 2 * weights and need.cache == 2 * 2 * 1024 * 64 * 2 * 2 and need.logits >= 4 * 128 * 2 * 100
    assert need.total > need.weights + need.cache and "GB (weights" in str(need)
    whole = costs.forward_memory(model, 16, torch.bfloat16, width=1024, rows=2, chunk=4096, logits=10**9)
    assert whole.cache == 0 and whole.layer > need.layer
    steps = [costs.training_memory(model, model.config, 2, 1024, saving).total for saving in (True, False)]
    assert 16 * weights < steps[0] < steps[1]


@pytest.mark.slow
@pytest.mark.skipif(not machine.can_measure_peak(), reason="reads /proc")
def test_growth_is_of_the_call_alone():
    """In a process of its own: one that has freed memory takes it again without growing."""
    code = """
import torch
from longitude.runs.machine import memory_growth
held = torch.ones(2**24)
print(memory_growth(lambda: torch.ones(2**24)), memory_growth(lambda: held.sum()))
"""
    grown, none = map(int, printed(code).split())
    assert 0.9 * 2**26 < grown < 1.3 * 2**26 and none < 2**24


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device_of().type == device_of("auto").type == device_of("cpu").type == "cpu"
    for name in ("cuda", "mps", "tpu"):
        with refused("--device", name):
            device_of(name)


def lines_of(**options) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    return Progress(Console(file=file, width=200), **options), file


def test_without_a_terminal_only_notes_are_written():
    progress, file = lines_of()
    with progress:
        for _ in range(3):
            progress.advance("loading")
        progress.update("measuring", 1, total=2)  # the next part of the work
        progress.note("noted")
    assert file.getvalue() == "noted\n" and (progress.done, progress.total) == (1, 2)


def test_threads_are_those_before_again():
    before = torch.get_num_threads()
    for count, inside in ((2, 2), (1, 1), (None, before)):
        with threads(count):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == before
    with pytest.raises(KeyError), threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_what_ends_in_time_is_returned_or_raised() -> None:
    assert within(60, lambda: 3) == 3 and within(60, lambda: None) is None
    with pytest.raises(KeyError):
        within(60, lambda: {}["a"])


def test_what_does_not_end_is_left() -> None:
    with pytest.raises(TimeoutError):
        within(0.05, Event().wait)


def test_memory_is_limited_and_the_limit_goes() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), memory_within(2**26):
        bytearray(2**28)
    assert resource.getrlimit(resource.RLIMIT_AS) == before and bytearray(2**28)
