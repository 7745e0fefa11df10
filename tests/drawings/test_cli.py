"""`longitude show` on the command line: what it prints, the files that it writes, what it refuses."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

import longitude as lg
from longitude.drawings.subjects import subjects
from longitude.report.figure import color_of, dashes_of

SMALL = "--length 64 --heads 4 --head-dim 16".split()


def test_an_encoding_in_the_terminal(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("show", "alibi", *SMALL)
    lines = out.splitlines()
    assert code == 0 and err == "" and not list(tmp_path.iterdir())
    assert max(map(len, lines)) <= 80 and "\x1b" not in out
    assert not any(line == before == "" for before, line in pairwise(lines))
    assert "score_h(i, j) += -m_h |i - j|" in out and "https://arxiv.org/abs/2108.12409" in out


@pytest.mark.parametrize("mixer", ["latent:rope_dim=8", "parallel:attention=latent"])
def test_latent_attention_rotates_its_part_of_a_head(command, mixer):
    code, out, _ = command("show", f"rope+{mixer}", *SMALL, "--json")
    found = json.loads(out)
    assert code == 0 and found["about"][0]["encodings"][0]["options"]["head_dim"] == 8
    assert found["about"][0]["mixers"][0]["options"]["dim"] == 64 and found["drawings"]


@pytest.mark.slow
def test_files(command, tmp_path):
    lg.show("alibi", length=64).save(tmp_path / "bias.svg")
    assert ET.parse(tmp_path / "bias.svg").getroot().tag.endswith("svg")
    assert ET.fromstring(lg.show("alibi", length=64)._repr_svg_()).get("role") == "img"
    for suffix in ("svg", "png"):
        file = tmp_path / f"rope.{suffix}"
        code, out, err = command("show", "rope", *SMALL, "--out", file)
        assert code == 0 and "rotated by the angle" in out and "┤" not in out and str(file) in err
        assert file.stat().st_size > 10_000
    code, _, _ = command("show", "sinusoidal", *SMALL, "--out", tmp_path / "table.svg")
    assert code == 0 and 'shape-rendering="crispEdges" class="mark-rect' in (tmp_path / "table.svg").read_text()
    root = ET.parse(tmp_path / "rope.svg").getroot()
    words = {each.tag.rpartition("}")[2]: each.text for each in root[:2]}
    assert root.get("role") == "img" and "full rotation" in words["title"] and "no scaling from " in words["desc"]


def test_the_folder_of_a_study_is_for_another_command(command, tmp_path):
    (tmp_path / "question.json").write_text('{"verb": "study"}')
    code, out, err = command("show", tmp_path)
    assert code == 2 and out == "" and f"`longitude report {tmp_path}`" in err


def test_a_notebook_shows_a_picture():
    pictures = lg.show("alibi", "t5", length=64)
    [bias] = pictures.drawings
    assert bias.name == "bias" and "weights" in pictures.others
    assert [drawing.name for drawing in lg.show("alibi", length=64, picture="weights").drawings] == ["weights"]
    assert len(lg.show("alibi", length=64, picture="all").drawings) > 1
    with pytest.raises(ValueError, match="did you mean 'bias'"):
        lg.show("alibi", picture="bais")


def test_learned_numbers_are_drawn_trained_or_not_at_all():
    """Saved numbers of T5 fall with the distance; those of other options do not exist."""
    [t5] = lg.show("t5", length=64).drawings
    near, far = (np.mean([line[1][place] for line in t5.lines.values()]) for place in (1, 60))
    assert t5.title.endswith("after training at length 128") and near > far + 3
    for label in ("t5:max_distance=99", "learned", "shaw"):
        assert not {"bias", "table"} & {drawing.name for drawing in next(subjects([label], {})).drawings}
    with pytest.raises(ValueError, match="noise before training"):
        lg.show("learned")


def test_an_encoding_has_one_color_whatever_is_beside_it():
    labels = ["rope:base=27", "alibi", "t5", "nope", "sinusoidal"]
    assert len({*map(color_of, labels)}) == 5
    assert color_of("rope+fox") == color_of("rope") == color_of("rope:base=27")
    twice = dashes_of(["rope", "alibi", "rope:base=27"])
    assert twice[0] == twice[1] != twice[2]


def test_what_has_no_such_picture_is_said(command, tmp_path):
    code, _, errors = command("show", "alibi", "t5", "--picture", "weights", "--out", tmp_path / "a.svg")
    assert code == 0 and "no picture 'weights' of t5" in errors and "alibi" not in errors
