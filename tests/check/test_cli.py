"""`longitude check`: exit codes, the table, JSON, and encodings and mixers of the user's own."""

import json

import pytest

from longitude.check.parts import check_part
from longitude.cli.check import check, part_of
from tests.check.broken_models import llama

OWN = '''
import torch
from longitude.attention.mixer import Mixer
from longitude.positions.base import Encoding, OffsetBias, PairBias
from longitude.positions.coordinates import wide


class Root(Encoding):
    """A bias that falls with the root of the distance."""

    relative = True
    shared = True

    def __init__(self, num_heads: int, rate: float = 1.0):
        super().__init__()
        self.num_heads, self.rate = num_heads, rate

    def terms(self, context):
        def at(offset):
            rates = self.rate * 2.0 ** -torch.arange(1, self.num_heads + 1, dtype=wide(offset.device))
            return -rates.view(-1, *[1] * offset.dim()) * offset.abs().to(rates).sqrt()

        return (OffsetBias(at),)


class Mean(Mixer):
    """The mean of the tokens so far, times a matrix."""

    def __init__(self, dim: int, leak: bool = False):
        super().__init__()
        self.dim, self.leak = dim, leak
        self.out = torch.nn.Linear(dim, dim)

    def forward(self, x, **options):
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.out(x.mean(1, keepdim=True).expand_as(x) if self.leak else x.cumsum(1) / count)


def meaner(dim):
    return Mean(dim, leak=True)


class NoEncoding:
    pass


class Raising(Root):
    def __init__(self, num_heads: int):
        raise RuntimeError("no room")


class Drifting(Root):
    """Grows with the key's position, and says it does not."""

    def terms(self, context):
        (plain,) = super().terms(context)
        return (PairBias(lambda query, key: plain.at(query - key) * (1 + 0.01 * key)),)
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path)
    return tmp_path


def test_a_healthy_checkpoint(folder, capsys):
    assert check(str(folder)) == 0
    printed = capsys.readouterr().out
    assert "cached_decoding" in printed and "of 13 laws 11 hold, 0 are broken, 2 do not apply" in printed


def test_a_broken_checkpoint_as_json(folder, capsys):
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(json.dumps(raw))
    assert check(str(folder), json=True) == 1
    found = json.loads(capsys.readouterr().out)
    broken = [one for one in found["laws"] if one["status"] == "broken"]
    assert found["broken"] == 1 and found["tokens"] == 48 and found["equality laws in"] == "float64"
    assert [(one["law"], one["measured"], one["threshold"]) for one in broken] == [("config", 1, 0)]
    assert check(str(folder), laws=("causality",), json=True) == 0


def test_a_failure_is_explained_in_the_table(folder, capsys):
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"rope_theta"', '"rope_tetha"'))
    assert check(str(folder)) == 1
    assert "config: unknown key" in (printed := capsys.readouterr().out) and "1 are broken" in printed


WRONG = (
    ("{model}/nowhere", {}, "there is no such folder"),
    ("{model}", {"laws": ("caching",)}, "unknown law"),
    ("{model}", {"length": 4}, "expected 16 tokens or more"),
    ("alibi", {"length": 64}, "--length is for models"),
    ("alibi:slope=3", {}, "unknown option"),
    ("alibi+rope", {}, "expected one encoding or mixer"),
    ("rope+mamba", {}, "expected one encoding or mixer"),
    ("mamba", {"reference": "alibi"}, "--reference is for models"),
    ("window:sise=8", {}, "did you mean 'size'"),
    ("window:size=0", {}, "size"),
    ("mamba", {"laws": ("far_positions",)}, "unknown law 'far_positions'"),
    ("no.such.module:Class", {}, "there is no such module"),
    ("{own}:Rot", {}, "did you mean 'Root'"),
    ("{own}:Root:rat=2", {}, "unknown option"),
    ("{own}:NoEncoding", {}, "longitude.Encoding or a longitude.Mixer, and NoEncoding makes a NoEncoding"),
    ("{own}:Raising", {}, "Raising cannot be built: it raised RuntimeError: no room"),
    ("./alibbi", {}, "no such folder"),
)


def test_wrong_use_is_a_value_error(folder, own):
    for name, options, words in WRONG:
        with pytest.raises(ValueError, match=words):
            check(name.format(model=folder, own=own), **options)


def test_an_encoding_misspelt(monkeypatch):
    def none(name, **options):
        raise ValueError(f"{name}: no such name on the hub")

    monkeypatch.setattr("longitude.checkpoints.load.load", none)  # the hub is not asked
    for name, words in (
        ("alibbi", "; did you mean the encoding 'alibi'"),
        ("mambo", "; did you mean the mixer 'mamba'"),
        ("owner/llama", "$"),
    ):
        with pytest.raises(ValueError, match=f"{name}: no such name on the hub{words}"):
            check(name)


def test_what_is_an_encoding_or_a_mixer(own, monkeypatch):
    assert part_of("nobody/model") is None
    assert part_of("rope:base=500000") == ("rope", {"base": 500000})
    assert part_of("window:size=8") == ("window", {"size": 8})
    kind, options = part_of(f"{own}:Root:rate=2.5")
    assert kind.__name__ == "Root" and options == {"rate": 2.5}
    assert part_of("longitude.positions.bias:ALiBi")[0].__name__ == "ALiBi"
    monkeypatch.chdir(own.parent)
    (own.parent / "alibi").mkdir()
    assert part_of("alibi") is None  # a folder is a model


def test_an_encoding_of_ones_own(own, capsys):
    laws = ("padding", "batch_invariance", "shift", "far_positions", "state_dict")
    assert check(f"{own}:Root", laws=laws) == 0
    assert "5 hold, 0 are broken" in capsys.readouterr().out
    assert check(f"{own}:Drifting", laws=("shift",), json=True) == 1
    (broken,) = json.loads(capsys.readouterr().out)["laws"]
    assert broken["status"] == "broken" and broken["reason"] and broken["threshold"] is not None
    assert broken["measured"] > broken["threshold"]


def test_a_mixer_by_name(capsys):
    assert check("mamba", laws=("batch_invariance", "state_dict"), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "mixer" and found["broken"] == 0
    rows, state = found["laws"]
    assert [rows["law"], rows["status"], rows["reason"], state["law"]] == [
        "batch_invariance",
        "holds",
        "",
        "state_dict",
    ]
    assert rows["measured"] <= rows["threshold"] and rows["claim"].startswith("A row of a batch")
    assert check("window:size=8", laws=("batch_invariance",)) == 0
    assert "1 hold, 0 are broken" in capsys.readouterr().out


def test_a_mixer_of_ones_own(own, capsys):
    assert check(f"{own}:Mean", laws=("causality",)) == 0
    assert check(f"{own}:Mean:leak=true", laws=("causality",)) == 1
    assert "differs by" in capsys.readouterr().out
    broken = check_part(part_of(f"{own}:meaner")[0], laws=("causality",))["causality"]
    assert broken.status == "broken" and "differs by" in broken.reason


def test_a_registered_name_says_why_a_law_does_not_apply():
    found = check_part("alibi", laws=("export", "order"))
    assert found["export"].status == "does not apply" and "plain attention" in found["export"].reason
    assert found["order"].status == "holds" and found["order"].claim
