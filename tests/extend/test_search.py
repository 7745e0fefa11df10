"""The search for LongRoPE's factors: what a candidate is, what a model does with it, what is promised."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
from longitude.checkpoints.load import open_source
from longitude.checkpoints.positions import rotary_of
from longitude.extend.factors import Candidate, RotaryPairs, rotating_with
from longitude.extend.plan import Target, pairs_of, plan_extension
from longitude.extend.search import SearchResult, search, windows_of
from longitude.extend.weights import write_checkpoint
from longitude.measure.text import losses_by_length
from longitude.runs.store import Store
from tests.extend.conftest import LENGTH, config, loaded, logits

module = sys.modules["longitude.extend.search"]
PAIRS = RotaryPairs(base=10_000.0, rotary_dim=64, original_length=4096, length=16384)


def documents(count: int = 3, length: int = 2 * LENGTH + 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (length,), generator=generator) for _ in range(count)]


# ---- starts ----------------------------------------------------------------------------------------------------------
def test_starts_are_the_published_schemes() -> None:
    """NTK, base s^(d/(d-2)) with s = 4, d = 64, divides pair k by 4^(2k/62). YaRN keeps pairs of 32 turns and more, divides
    those of one and less by 4 (correction range 10 to 23), and multiplies scores by 0.1 ln 4 + 1, twice."""
    starts = PAIRS.starts()
    assert starts["unchanged"] == Candidate((1.0,) * 32, 1.0) and starts["linear"] == Candidate((4.0,) * 32, 1.0)
    assert starts["ntk"].factors == pytest.approx([4 ** (2 * k / 62) for k in range(32)], rel=1e-9)
    yarn = starts["yarn"]
    assert (starts["ntk"].attention_factor, yarn.attention_factor) == (1, pytest.approx(1.1386294))
    assert yarn.factors[:11] == pytest.approx([1] * 11) and yarn.factors[23:] == pytest.approx([4] * 9)
    assert starts["ntk-by-parts"] == Candidate(yarn.factors, 1.0)
    for start in starts.values():
        assert all(a <= b * (1 + 1e-12) for a, b in zip(start.factors, start.factors[1:], strict=False))


# ---- a candidate in a model ------------------------------------------------------------------------------------------
def scheme_for(source) -> lg.scaling.LongRoPE:
    pairs = pairs_of(source, LENGTH, 4 * LENGTH)
    count = pairs.rotary_dim // 2
    return pairs.longrope(Candidate(tuple(1.07 + 0.4 * k for k in range(count)), 1.1), (1.02,) * count)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma3_text", "phi3"])
def test_a_candidate_is_the_written_checkpoint(kind, checkpoint, tmp_path) -> None:
    """The same logits in plain transformers at both sides of the border, by the factors of the scheme; then the model is
    what it was, after an error too."""
    source = open_source(str(checkpoint(kind)))
    model = loaded(source.folder)
    scheme = scheme_for(source)
    plan = plan_extension(source, Target(to=4 * LENGTH, method="longrope"), SearchResult(scheme, 1.0, {}, 0))
    write_checkpoint(source, tmp_path / "out", plan.config)
    written = loaded(tmp_path / "out")
    for length in (LENGTH, LENGTH + 1, 4 * LENGTH):
        before = logits(model, length)
        with rotating_with(model, scheme):
            within = logits(model, length)
        torch.testing.assert_close(within, logits(written, length))
        assert not torch.allclose(within, before, atol=1e-4)
        torch.testing.assert_close(logits(model, length), before)
    prefix = "full_attention_" if kind == "gemma3_text" else ""
    with pytest.raises(ZeroDivisionError), rotating_with(model, scheme):
        raise ZeroDivisionError
    torch.testing.assert_close(logits(model, LENGTH), logits(loaded(source.folder), LENGTH))
    rotary, dim = rotary_of(written), 2 * len(scheme.long_factor)
    want = scheme.frequencies(dim, plan.base, 4 * LENGTH)
    torch.testing.assert_close(
        want, plan.base ** (-torch.arange(0, dim, 2) / dim) / want.new_tensor(scheme.long_factor)
    )
    torch.testing.assert_close(getattr(rotary, f"{prefix}inv_freq").double(), want, rtol=2e-6, atol=0)
    assert getattr(rotary, f"{prefix}attention_scaling") == plan.attention_factor == 1.1


# ---- the whole search ------------------------------------------------------------------------------------------------
def call(model, state, **options):
    options = {"evaluations": 24, "seed": 3} | options
    length = options.pop("length", 2 * LENGTH)
    windows = windows_of(options.pop("documents", documents()), length)
    pairs = RotaryPairs(
        model.config.rope_parameters["rope_theta"],
        model.config.hidden_size // model.config.num_attention_heads,
        LENGTH,
        length,
    )
    return search(model, pairs, windows, store=Store(state), **options)


@pytest.fixture(scope="module")
def model(checkpoint):
    return loaded(checkpoint("llama"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """(result, folder, calls of on_progress) of a search that nothing interrupted."""
    folder, calls = tmp_path_factory.mktemp("searches") / "whole", []
    return call(model, folder, on_progress=lambda *arguments: calls.append(arguments)), folder, calls


def results(state: Path) -> dict[str, float]:
    """What the units of a state hold, by their names: nats per token."""
    return {path.parent.name: json.loads(path.read_text())["nats"] for path in state.glob("units/*/result.json")}


@pytest.fixture
def state(whole, tmp_path):
    """A copy of what that search left."""
    return shutil.copytree(whole[1], tmp_path / "s")


def test_a_search_keeps_its_promises(model, whole, tmp_path) -> None:
    result, folder, calls = whole
    assert result.loss < min(result.starts.values())
    assert {*result.starts} == {"unchanged", "linear", "ntk", "yarn", "ntk-by-parts", "llama3"}
    assert result.tried == 24 == calls[-1][0] and all(total == 24 for _, total, _ in calls)
    assert [best for _, _, best in calls] == sorted((best for _, _, best in calls), reverse=True)
    factors = result.scheme.long_factor
    assert list(factors) == sorted(factors) and factors[0] >= 1 and factors[-1] <= 2.5
    short = logits(model, LENGTH)
    with rotating_with(model, result.scheme):
        torch.testing.assert_close(logits(model, LENGTH), short)  # up to the original length nothing changes
        [losses] = losses_by_length(model, documents(), lengths=[2 * LENGTH], methods=["non-overlapping"])
    assert losses.nats.sum() / losses.tokens.sum() == pytest.approx(result.loss, abs=1e-6)
    assert (result.scheme.short_factor, result.scheme.attention_factor) == ((1.0,) * 8, 1)
    assert result.loss == min(results(folder).values()) and len(results(folder)) == 24
    assert call(model, tmp_path, seed=4).scheme != result.scheme


def test_a_start_that_nothing_beats_is_the_result() -> None:
    yarn, plain = PAIRS.starts()["yarn"], PAIRS.starts()["linear"]
    losses, named = {yarn: 1.0, plain: 2.0}, {"yarn": 1.0, "linear": 2.0}
    chosen = module._best(PAIRS, losses, named)
    assert chosen.loss == 1 and chosen.scheme.attention_factor == yarn.attention_factor and "short texts" in chosen.note
    losses |= {Candidate(yarn.factors, 1.2): 0.5, Candidate((1.0,) * 32, 1.0): 0.9}
    chosen = module._best(PAIRS, losses, named)
    assert (chosen.loss, chosen.scheme.attention_factor, chosen.note) == (0.9, 1.0, "")


def test_a_loss_that_is_no_number_loses(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=LENGTH, **small)).eval()
    real = module._loss
    monkeypatch.setattr(
        module, "_loss", lambda *arguments: math.inf if arguments[2].factors[-1] > 1.5 else real(*arguments)
    )
    result = call(model, tmp_path / "s")
    assert math.isfinite(result.loss) and result.starts["linear"] == math.inf and result == call(model, tmp_path / "s")
    monkeypatch.undo()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    pairs = RotaryPairs(10_000.0, 8, LENGTH, 2 * LENGTH)
    text = windows_of(documents(1), 2 * LENGTH)
    assert module._loss(model, pairs, Candidate((1.0,) * 4, 1.0), text) == math.inf
    with pytest.raises(ValueError, match="no loss of the model is finite"):
        call(model, tmp_path / "none")


def test_windows_come_from_all_over_the_text() -> None:
    windows = windows_of([torch.arange(100 * 4096 + 1)], 4096)
    assert [len(window) for window in windows] == [4097] * 4
    assert [int(window[0]) // 4096 for window in windows] == [0, 25, 50, 75]
    assert len(windows_of(documents(100, LENGTH + 1), LENGTH)) == 100
    assert len(windows_of(documents(1000, LENGTH + 1), LENGTH)) == module.TOKENS // LENGTH


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"documents": documents(4)[1:]}),
        ("llama", {"length": 192, "documents": documents(length=200)}),
        ("qwen2", {}),
    ],
)
def test_another_question_has_units_of_its_own(kind, options, whole, checkpoint, state) -> None:
    """Another text, length or model; the first one's answer stays, and is that of a state that held nothing."""
    before = results(state)
    result = call(loaded(checkpoint(kind)), state, evaluations=8, **options)
    assert len(results(state)) == len(before) + 8 and results(state).items() > before.items()
    assert result == call(loaded(checkpoint(kind)), state.with_name("empty"), evaluations=8, **options) != whole[0]


# ---- the verb --------------------------------------------------------------------------------------------------------
@pytest.fixture
def arguments(checkpoint, text, monkeypatch):
    """Of a short search."""
    monkeypatch.setattr(module, "TOKENS", 512)
    monkeypatch.setattr("longitude.extend.short_contexts.TOKENS", 512)
    return [checkpoint("llama"), "--to", 2 * LENGTH, "--method", "longrope", "--budget", 1e-6, "--text", text]


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [[], ["--steps", 2]], ids=["alone", "fine-tuned"])
def test_longrope(tuned, arguments, text, checkpoint, command, refused, tmp_path) -> None:
    """Short texts are as they were."""
    for option in ("--dry-run", "--no-measure"):
        assert option in refused(*arguments, option)
    out = tmp_path / "out"
    tuned = ["--fine-tune", text, *tuned] if tuned else []
    code, printed, _ = command(*arguments, *tuned, "--out", out, "--json")
    result = json.loads(printed)
    assert code == 0 and result["search"]["loss"] <= min(result["search"]["starts"].values())
    rope = config(out)["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == LENGTH
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    short, before = logits(loaded(out), LENGTH), logits(loaded(checkpoint("llama")), LENGTH)
    assert logits(loaded(out), 2 * LENGTH).isfinite().all()
    assert torch.allclose(short, before, atol=1e-5) == (rope["attention_factor"] == 1 and not tuned)
    assert len(result["tuned"]["losses"] if tuned else [0, 0]) == 2
