"""`extend --method longrope2` as a whole: its search survives a kill, its checkpoint is for plain transformers."""

import json
from itertools import pairwise

import pytest
import torch

from longitude.checkpoints.load import byte_tokenizer
from longitude.extend import criteria, search as module
from longitude.extend.factors import rotary_pairs
from longitude.extend.spaces import longrope, longrope2
from longitude.runs.store import Store
from tests.extend.conftest import LENGTH, config, loaded, logits

TO = 8 * LENGTH
"""Of bytes: 512 hold a question, 256 none."""
TEXTS = ["Some words stand here. Others follow them, in lines. " * 40, "It is another text; nobody reads it. " * 40]


@pytest.fixture(autouse=True)
def few_windows(monkeypatch) -> None:
    monkeypatch.setattr(criteria, "TOKENS", 512)
    monkeypatch.setattr(criteria, "FEWEST_NEEDLES", 3)
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)


def obeys(factors: list[float]) -> bool:
    """Of the tiny Llama: 8 pairs of base 10000, of which pair 2 is critical: log(64 / 2 pi) / log(10000) * 8 = 2.02."""
    below = factors[0] == 1 and factors[1] == pytest.approx(factors[2] ** 0.5)
    return below and factors[2] >= 8 and factors[-1] <= 16 and all(a < b for a, b in pairwise(factors))


# ---- the search ------------------------------------------------------------------------------------------------------
def call(model, state, **options):
    pairs = rotary_pairs(model, LENGTH, TO)
    criterion = criteria.needles(TEXTS, byte_tokenizer(), TO)
    return module.search(model, longrope2(pairs), criterion, store=Store(state), evaluations=20, seed=3, **options)


def entries(state):
    """The candidates that were tried, by the keys of their units."""
    return {each.parent.name: json.loads(each.read_text())["inputs"] for each in state.glob("units/*/unit.json")}


@pytest.mark.slow
def test_an_interrupted_search_ends_as_one_that_was_not(checkpoint, tmp_path, monkeypatch) -> None:
    """Among the starts and after them."""
    model, notes = loaded(checkpoint("llama")), []
    whole = call(model, tmp_path / "whole", on_progress=lambda *each: notes.append(each))
    assert [*whole.starts] == [f"1.{j} s" for j in range(8)] and whole.loss <= min(whole.starts.values())
    assert whole.tried == 20 == notes[-1][0] and all(
        obeys(each["factors"]) for each in entries(tmp_path / "whole").values()
    )
    assert whole.scheme.short_factor == (1.0,) * 8 and whole.scheme.attention_factor == 1
    real, calls, stops = module._loss, [], [4, 15]

    def loss(*arguments):
        if len(calls) + 1 in stops:
            stops.remove(len(calls) + 1)
            raise KeyboardInterrupt
        calls.append(arguments[2])
        return real(*arguments)

    monkeypatch.setattr(module, "_loss", loss)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call(model, tmp_path / "s")
    assert call(model, tmp_path / "s") == whole and len(calls) == len({*calls}) == 20, "nothing twice"
    assert entries(tmp_path / "s") == entries(tmp_path / "whole")


@pytest.mark.slow
def test_another_criterion_or_method_is_another_question(checkpoint, tmp_path) -> None:
    """The same windows with all tokens counted, and the same criterion in the space of LongRoPE: no loss is taken over."""
    model, state = loaded(checkpoint("llama")), tmp_path / "s"
    pairs, needles = rotary_pairs(model, LENGTH, TO), criteria.needles(TEXTS, byte_tokenizer(), TO)
    everything = criteria.Criterion(needles.windows, [0] * len(needles.windows))
    searches = [(longrope2(pairs), needles), (longrope2(pairs), everything), (longrope(pairs), needles)]
    found = [module.search(model, *each, store=Store(state), evaluations=8).loss for each in searches]
    assert len({*found}) == 3 and len(entries(state)) == 24


# ---- the verb --------------------------------------------------------------------------------------------------------
@pytest.fixture
def arguments(checkpoint, text):
    """Of a short search."""
    return [checkpoint("llama"), "--to", TO, "--method", "longrope2", "--budget", 1e-6, "--text", text]


@pytest.mark.slow
def test_the_checkpoint_is_for_plain_transformers(arguments, checkpoint, command, tmp_path) -> None:
    """longrope with short factors of 1: short texts are as they were, long ones rotate by what was found."""
    out, before = tmp_path / "out", loaded(checkpoint("llama"))
    code, printed, _ = command(*arguments, "--out", out, "--json")
    assert code == 0 and config(out)["max_position_embeddings"] == TO
    rope, saved = config(out)["rope_parameters"], json.loads((out / "longrope_search.json").read_text())
    assert (rope["rope_type"], rope["factor"], rope["attention_factor"]) == ("longrope", 8, 1)
    assert rope["short_factor"] == [1.0] * 8 and rope["original_max_position_embeddings"] == LENGTH
    assert obeys(rope["long_factor"]) and rope["long_factor"] == saved["found"]["long_factor"]
    assert saved["method"] == "longrope2" and saved["found"]["tried"] == 32
    found = json.loads(printed)["search"]
    assert (
        found["loss"] == saved["found"]["nats_per_token"] <= min(found["starts"].values()) and len(found["starts"]) == 8
    )
    after = loaded(out)
    torch.testing.assert_close(logits(after, LENGTH), logits(before, LENGTH))
    want = 10_000 ** (-torch.arange(0, 16, 2) / 16) / torch.tensor(rope["long_factor"])
    long = logits(after, TO)
    torch.testing.assert_close(after.model.rotary_emb.inv_freq, want, rtol=2e-6, atol=0)
    assert long.isfinite().all() and not torch.allclose(long, logits(before, TO), atol=1e-3)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_the_notes_and_the_table_name_the_criterion(arguments, command, tmp_path) -> None:
    code, printed, _ = command(*arguments, "--out", tmp_path / "out")
    assert (
        code == 0 and "32 candidates tried, nats per token of the digits of hidden numbers at the new length" in printed
    )
    assert "Chosen by the loss of the digits of hidden numbers" in printed and "1.7 s" in printed


def test_what_is_refused(arguments, refused, save, text) -> None:
    """Each with what to do; nothing is begun."""
    for option in ("--dry-run", "--no-measure"):
        line = refused(*arguments, option)
        assert "--method longrope2 searches on text with the model: leave out --dry-run and --no-measure" in line
    assert "--factor is no option of --method longrope2" in refused(*arguments, "--factor", 4)
    short = refused(*arguments[:1], "--to", 4 * LENGTH, *arguments[3:])
    assert "256 tokens fit no question about a needle" in short and "give a longer --to" in short
    folder = save()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(folder, *arguments[1:])
    turns = save(rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    assert "all 8 rotary pairs make a full turn within 64 tokens" in refused(turns, *arguments[1:])
