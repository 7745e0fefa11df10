"""`longitude show config.json --card card.svg`: its numbers, texts that fit, and what it refuses."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from longitude.drawings import card as cards, checkpoint
from longitude.drawings.card import card, fitted, lines_of, width_of, write
from tests.checkpoints.published import PUBLISHED, Config
from tests.support import require_words

SHOWN = ("Llama 3.2 1B", "Gemma 3 1B", "gpt-oss 20B", "GPT-2", "BLOOM 560M", "Mamba 130M", "GPT-J 6B")
FEWER = [name for name in PUBLISHED if name not in ("InternLM2 7B", "Baichuan 2 13B", "Kimi K2 by its own name")]


def saved(folder: Path, config: Config) -> str:
    path = folder / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path)


def texts_of(picture: str) -> list[str]:
    """The texts of a card; AssertionError unless it is an SVG of its own, 480 high at most, whose texts end within it."""
    assert not re.search(r"<script|<image|<foreignObject|javascript:| on\w+=|href|url\((?!#)|@import", picture)
    root = ET.fromstring(picture)
    assert root.get("viewBox").split()[2] == "720" and float(root.get("height")) <= 480
    texts = [element for element in root.iter() if element.tag.endswith("}text")]
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in texts:
        size = {"title": 37, "says quiet": 18}.get(text.get("class", ""), 20)
        start = float(text.get("x"))
        rows.setdefault(text.get("y"), []).append((start, start + width_of(text.text or "", size)))
    for places in rows.values():
        assert max(end for _, end in places) <= 689, texts
        assert all(end <= start for (_, end), (start, _) in pairwise(places)), places
    return [text.text or "" for text in texts]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHOWN else pytest.mark.slow) for n in FEWER])
def test_numbers_are_those_of_show(name, tmp_path):
    path = saved(tmp_path, PUBLISHED[name])
    about = checkpoint.facts(path, config := checkpoint.read(path), PUBLISHED[name])
    write(path, tmp_path / "card.svg")
    texts = texts_of((tmp_path / "card.svg").read_text(encoding="utf-8"))
    shown, made = " ".join(texts), card(path)
    assert texts[0] == "model" and about["model_type"] in texts[1]
    assert len(made["layers"]) == len(checkpoint.kinds_of(config)) > 0
    assert sum(int(text.split()[0]) for _, text in made["legend"]) == len(made["layers"])
    for rotation in about["rotations"][:2]:
        never = rotation["pairs"] - rotation["turned"]
        assert f"{never} of {rotation['pairs']} in {rotation['window'] or about['trained']:,}" in shown
        scheme = f"its own {rotation['scheme']['name']}" if rotation["scheme"] else "no scaling"
        shares = [f"{row['unseen']:.0%}" for row in rotation["longer"] if row["scheme"] == scheme]
        assert f"{rotation['base']:,.9g}" in texts
        assert not shares or shares in [[f"{share:.0%}" for _, share in row] for _, row in made["longer"]]
    assert all(f"{share:.0%}" in texts for _, row in made["longer"][:1] for _, share in row)
    assert all(f"{about[key]:,}" in shown for key in ("trained", "declared") if about[key])
    assert ("learned sinks in 24 layers" in shown) == (name == "gpt-oss 20B") or about["sinks"]
    assert shown.count("not known") >= len(about["unknown"])


@pytest.mark.parametrize("name", ["<script>alert(1)</script>&\"'", "W" * 10_000, "a\0\x1b[31m\u202eb\nc", "模型" * 99])
def test_names_of_strangers(name, tmp_path, monkeypatch):
    hostile = {"name": name, "model": name, "layers": [("solid", True)] * 300, "says": [name]}
    hostile |= {"legend": [(("solid", True), name)] * 9, "rotations": [(name,) * 4] * 9, "rows": [(name, name)]}
    monkeypatch.setattr(cards, "card", lambda path: hostile | {"longer": [(name, [(2, 0.5)])] * 2})
    write("a", tmp_path / "card.html")
    page = (tmp_path / "card.html").read_text(encoding="utf-8")
    assert page.count("<script") == 0 and "\x1b" not in page and len(page) < 120_000
    root = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert all(width_of(t.text or "", 20) <= 656 for t in root.iter() if t.tag.endswith("}text") and not t.get("class"))
    assert fitted(name, 100, 20, " (+2 more)").endswith(" (+2 more)") and len(lines_of(name, 300)) <= 3


def test_wrong_use_and_files(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, PUBLISHED["GPT-2"] | {"n_layer": 2})
    assert command("show", path, "--card", "card.png") == (0, "", "card of model: card.png\n")
    assert (tmp_path / "card.png").read_bytes()[16:20] == (1440).to_bytes(4, "big")
    for names, word in ((f"{path} alibi", "alibi"), ("alibi", "alibi"), (f"{path} --json", "--json")):
        code, out, err = command("show", *names.split(), "--card", "no.svg")
        assert code == 2 and out == "" and err.count("\n") == 1 and not (tmp_path / "no.svg").exists()
        require_words(err, "--card", word)
