"""The size of the documentation, and figures that stand in several places: each of them once, or everywhere the same."""

import re
from collections import defaultdict
from pathlib import Path

PAGES = [*Path("docs").rglob("*.md"), Path("README.md")]
BLOCK = re.compile(r"<!-- numbers: ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
TIMED = re.compile(r"make (study|test|checkpoint)\b[^\n]*?\b(\w+) minutes")
"""A command of make, and how long it takes, in one line."""


def test_pages_can_be_read():
    total = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES[:-1])
    assert total <= 45_000 and len(PAGES[-1].read_text(encoding="utf-8").split()) <= 900


def test_a_table_of_a_run_and_a_time_are_the_same_on_every_page():
    """Verdicts and numbers stand in blocks that a script fills from one run."""
    blocks, times = defaultdict(set), defaultdict(set)
    for page in [*PAGES, Path("Makefile")]:
        text = page.read_text(encoding="utf-8")
        for name, block in BLOCK.findall(text):
            blocks[name].add(block)
        for command, time in TIMED.findall(text.replace("`", "")):
            times[command].add(time)
    assert {name: len(block) for name, block in blocks.items() if len(block) > 1} == {}
    assert times["study"] == {"five"} and times["test"] == {"ten"} and times["checkpoint"] == {"five"}
