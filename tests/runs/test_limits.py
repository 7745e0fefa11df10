"""Limits of time and memory for work of others."""

from threading import Event

import pytest

from longitude.runs.machine import memory_within, within


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
