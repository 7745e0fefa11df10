"""One part of the tests that pytest was asked for, so that several processes share them: `pytest -p gpu_part --part 2/5`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="N/OF", help="tests that are next to each other")


@pytest.hookimpl(trylast=True)  # of those that -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, of = map(int, config.getoption("--part").split("/"))
    items[:] = items[len(items) * (part - 1) // of : len(items) * part // of]
