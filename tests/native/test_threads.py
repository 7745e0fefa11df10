"""Threads of the loops in C: torch's own, whatever other runtimes a process has."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

import longitude as lg
from longitude.native import build, load
from longitude.positions import rotation

pytestmark = pytest.mark.skipif(rotation.compiled(torch.float32) is None, reason="no loops in C here")


def results(threads: int) -> list[torch.Tensor]:
    """Attention with a bias and its gradients, of one token, with a rotation; a scan. Other processes run this source, too."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 161, 32).requires_grad_().unbind()
    outs = [lg.attend(q, k, v, encoding=lg.ALiBi(4), mask=lg.Causal(), backend="table")]
    outs += torch.autograd.grad(outs[0].square().sum(), (q, k, v))
    outs.append(lg.attend(q[:, :, -1:], k, v, encoding=lg.ALiBi(4), backend="table"))
    outs.append(lg.attend(*torch.randn(3, 2, 8, 300, 64).unbind(), encoding=lg.Rotary(64, "half"), mask=lg.Causal()))
    outs.append(lg.mixer("mamba", dim=48)(torch.randn(2, 30, 48)))
    return [out.detach() for out in outs]


def libraries() -> list[ctypes.CDLL]:
    """All that results() runs."""
    made = [load.library(build.PACKAGE / source, *kinds[0]) for source, kinds in build.LIBRARIES.items()]
    return [library for library in made if library is not None]


def test_no_library_links_to_a_runtime():
    for library in libraries():
        binary = Path(library._name).read_bytes()
        assert b"libc.so" in binary and not re.search(rb"lib[gi]?omp|GOMP_|omp_|__kmpc", binary), library


TEAM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def team_of(given: int, asked: list[int]):
    """A runtime that gives a number of threads, one after the other, and notes how many it was asked for."""

    def team(function: int, data: int, threads: int, flags: int) -> None:
        asked.append(threads)
        for _ in range(min(given, threads)):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

    return TEAM(team)


def test_fewer_threads_than_asked_for_do_all_the_work():
    """A runtime may give fewer, one after the other, or none but the caller's: the same tasks, so the same bits."""
    before = torch.get_num_threads()
    try:
        expected = results(3)
        for given in (1, 2, 3):
            asked: list[int] = []
            team = team_of(given, asked)
            for library in libraries():
                library.use_team(team)
            assert all(torch.equal(a, b) for a, b in zip(results(3), expected, strict=True))
            assert len(asked) >= 5 and set(asked) == {3}
        for library in libraries():
            library.use_team(None)
        assert all(torch.equal(a, b) for a, b in zip(results(3), expected, strict=True))
    finally:
        for library in libraries():
            library.use_team(ctypes.c_void_p(load.team()))
        torch.set_num_threads(before)
