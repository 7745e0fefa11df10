"""Recurrences with a loop in C, and the same without it."""

import sys

import pytest


@pytest.fixture
def in_torch(monkeypatch):
    """in_torch() -> torch's operators in place of the loops in C."""

    def change() -> None:
        for module in ("mamba", "rwkv4", "s4d", "ops.delta"):
            monkeypatch.setattr(sys.modules[f"longitude.recurrent.{module}"], "usable", lambda *_: False)

    return change


@pytest.fixture(params=["C", "torch"])
def form(request, in_torch) -> str:
    """The loop in C where it can be compiled, and torch's operators."""
    if request.param == "torch":
        in_torch()
    return request.param
