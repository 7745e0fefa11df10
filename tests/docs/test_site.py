"""The site: whole, made without a warning or a network."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from transformers import CONFIG_MAPPING

import make_laws
import make_site
from fill_numbers import newest
from tests.checkpoints.published import RELEASED


# ---- what a page is made of --------------------------------------------------------------------------------------------
def test_laws_that_are_kept_are_those_of_today() -> None:
    """docs/make_laws.py tries what is lacking; what is kept has its name still, and none is broken."""
    kept = newest("laws")["found"]
    batteries = {name: {*battery} for name, (_, battery) in make_laws.subjects().items()}
    assert kept.keys() <= batteries.keys() and all({*found} <= batteries[name] for name, found in kept.items())
    statuses = [result["status"] for found in kept.values() for result in found.values()]
    assert "failed" not in statuses and statuses.count("not applicable") > 50
    assert kept["alibi"]["places"]["status"] == "not applicable" and kept["abacus"]["places"]["status"] == "passed"


def test_front_pages_count_what_the_tables_have() -> None:
    """Cards are of released models with a class."""
    known = [name for name, config in RELEASED.items() if config.get("model_type") in CONFIG_MAPPING]
    for page in ("README.md", "docs/showing.md"):
        assert f" {len(known)}" in (make_site.ROOT / page).read_text(encoding="utf-8")
    families, lines = (pd.read_csv(make_site.DOCS / name, dtype=str) for name in ("families.csv", "audit.csv"))
    failing = families.apply(lambda row: row.str.endswith("!", na=False)).any(axis=1).sum()
    for page in ("README.md", "docs/index.md"):
        text = (make_site.ROOT / page).read_text(encoding="utf-8")
        assert f"[{failing} of {len(families)} architectures]" in text and f"[{len(lines)} published" in text
        assert f"{(lines['verdict'] == 'wrong').sum()} of [{len(lines)}" in text


# ---- built -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, in a folder of its own, where every connection is refused."""
    pytest.importorskip("sphinx", reason="the site needs longitude[docs]: make docs")

    folder = tmp_path_factory.mktemp("site")
    code = f"""
import socket, sys
from pathlib import Path

def refuse(*_, **__):
    raise SystemExit("the build of the site asked a network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.path[:0] = {[str(make_site.DOCS), str(make_site.ROOT / "benchmarks"), str(make_site.ROOT / "src")]}
import make_site
from fill_numbers import newest
sys.exit(make_site.build(Path({str(folder)!r}, "source"), Path({str(folder)!r}, "html")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "html"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_asks_no_network_and_every_picture_has_words(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 100 and sum(file.stat().st_size for file in site.rglob("*.*")) < 40e6
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|source|iframe)[^>]*?\ssrc=\"([^\"]*)|<link[^>]*?\shref=\"([^\"]*)", text)
        assert [each for pair in fetched for each in pair if each.startswith(("http", "//"))] == [], page
        for picture in re.findall(r"<img[^>]*>", text):
            alt, file = re.search(r'alt="([^"]*)"', picture), re.search(r'src="([^"]*)"', picture)
            assert file is not None and (file[1].startswith("data:") or (page.parent / file[1]).is_file()), picture
            assert alt is not None and len(alt[1]) > 20, (page, picture)
