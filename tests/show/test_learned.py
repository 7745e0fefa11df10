"""What `longitude show RUN` draws of trained models, against the weights that they have."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from longitude.errors import UsageError
from longitude.positions.bias import ALiBi
from longitude.positions.buckets import T5Bias
from longitude.show import attention, learned
from longitude.show.biases import biases
from longitude.study.train import build_model, save
from tests.study.conftest import NUMBERS, units_in, write_answers, write_run

LENGTH = 16


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a study of three labels, with models whose biases have been trained, in a way."""
    path = tmp_path_factory.mktemp("study")
    labels = {"t5": (2.5,), "rope": (2.5,), "mamba": (2.5,), "nope": (2.5,)}
    written = write_run(path, labels, test_lengths=(64,), layers=2, hidden=16, heads=2, train_length=LENGTH)
    config = learned.read_run(written).config
    for label in ("t5", "rope", "mamba"):
        model = build_model(config, label, 0)
        for module in model.modules():
            if isinstance(module, T5Bias):
                torch.nn.init.ones_(module.table)
        save(model, units_in(path, label, 0)["train"])
    return path


@pytest.fixture(autouse=True)
def _numbers(monkeypatch):
    """A text that is quick to read."""
    monkeypatch.setattr("longitude.study.data.read_texts", lambda data: NUMBERS)


def drawn(path, label, length=LENGTH):
    run, trials = learned.opened(path, [label])
    data = run.task.prepare(run.config)
    return {each.name: each for each in learned.drawings(run, trials[label], data, length)}


def test_biases_before_and_after(study):
    run, trials = learned.opened(study, ["t5", "rope"])
    [found] = biases(run, trials["t5"])
    before = next(m for m in build_model(run.config, "t5", 0).modules() if isinstance(m, T5Bias))
    assert [*found.lines] == ["head 1", "head 2", "head 1, before", "head 2, before"]
    for head in (1, 2):
        offsets, after = found.lines[f"head {head}"]
        assert after == [1.0] * len(offsets)
        offsets, bias = found.lines[f"head {head}, before"]
        assert bias == pytest.approx(before.bias_at(torch.tensor(offsets))[head - 1].tolist(), abs=1e-4)
    assert [*biases(run, trials["rope"])] == []  # no bias that positions alone decide


def test_the_bias_of_alibi_falls_by_its_slopes(tmp_path):
    shape = {"layers": 2, "hidden": 16, "heads": 2, "train_length": 16}
    run = learned.read_run(write_run(tmp_path, {"alibi": (2.5,)}, test_lengths=(64,), **shape))
    save(build_model(run.config, "alibi", 0), run.of("alibi")[0].folder)
    [found] = biases(run, run.of("alibi")[0])
    for slope, (offsets, bias) in zip(ALiBi(2).slopes, found.lines.values(), strict=True):
        assert bias == pytest.approx([-slope * offset for offset in offsets], abs=1e-4)
        assert offsets[0] == 0 and offsets[-1] == 63


def test_a_forbidden_side_is_not_drawn_and_a_decoder_has_no_future(tmp_path):
    label, shape = "alibi:future=one-sided", {"layers": 1, "hidden": 16, "heads": 2, "train_length": 4}
    run = learned.read_run(write_answers(tmp_path, {label: (1.0,)}, test_lengths=(8,), documents=4, **shape))
    save(build_model(run.config, label, 0), run.of(label)[0].folder)
    encoder, decoder = ([offsets for offsets, _ in each.lines.values()] for each in biases(run, run.of(label)[0]))
    assert encoder == [list(range(9)), list(range(-8, 1))] and decoder == [list(range(9)), [0]]


def test_attention_by_offset_is_the_mean_of_the_weights(study):
    run, trials = learned.opened(study, ["rope"])
    found = drawn(study, "rope")
    texts = learned.windows(run, run.task.prepare(run.config), LENGTH)
    model = run.task.model.from_pretrained(trials["rope"].folder)
    with torch.no_grad():
        weights = model(**texts, output_attentions=True).attentions[1].mean(1).numpy()
    for offset in (0, 3, 12):
        queries = range(max(LENGTH // 2, offset), LENGTH)
        mean = np.mean([[w[query, query - offset] for query in queries] for w in weights])
        assert found["attention"].lines["layer 2"][1][offset] == pytest.approx(mean, rel=1e-6)
    field = found["field"].lines["layer 1"][1]
    assert field[-1] == pytest.approx(1) and (np.diff(field) >= 0).all()


def test_entropy_lies_between_none_and_all_tokens_alike(study):
    """Of a causal row over n tokens: 0 to log2 n; each row adds up to 1, so its first token has at most 1."""
    run, trials = learned.opened(study, ["rope"])
    texts = learned.windows(run, run.task.prepare(run.config), 48)
    model = learned.model_of(run, trials["rope"])
    layers, _ = attention.read(model, texts)
    with torch.no_grad():
        weights = model(**texts, output_attentions=True).attentions[0].double()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64), rtol=0, atol=1e-6)
    layer, seen = layers["layer 1"], np.arange(1, 49)
    entropy = -(weights * weights.clamp(min=1e-300).log2()).sum(-1).mean(0).numpy()
    np.testing.assert_allclose(layer.entropy, entropy, atol=1e-9)
    assert (layer.entropy >= 0).all() and (layer.entropy <= np.log2(seen) + 1e-6).all()
    np.testing.assert_allclose(layer.first, weights[..., 0].mean(0).numpy(), atol=1e-12)
    away = torch.arange(48)[:, None] - torch.arange(48)
    distance = (weights * away).sum(-1)[..., 24:].mean((0, 2)).numpy()
    np.testing.assert_allclose(layer.distance, distance, rtol=1e-6)


def test_what_changes_with_the_length_is_drawn_up_to_the_longest_tested_one(study):
    run, trials = learned.opened(study, ["rope"])
    found = {each.name: each for each in learned.drawings(run, trials["rope"], run.task.prepare(run.config), None)}
    for name in ("entropy", "first"):
        x, y = found[name].lines["layer 1"]
        assert len(x) == len(y) <= run.lengths[-1] and x[-1] > run.lengths[-1] - 1
        assert found[name].marks == {"training length": LENGTH}
    assert len(found["attention"].lines["layer 1"][0]) == LENGTH


def test_many_layers_have_grids_and_a_few_lines():
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 1, 3, 32, 32, generator=random).log() + torch.full((32, 32), -torch.inf).triu(1)
    layers = {f"layer {i}": attention.layer_of(each.softmax(-1)) for i, each in enumerate(scores, 1)}
    lines = [*attention.by_distance(layers, ""), *attention.by_length(layers, "", None)]
    assert {each.name for each in lines} == {"attention", "field", "entropy", "first"}
    distance, *_, strips = attention.grids(layers, "")
    np.testing.assert_allclose(np.nansum(strips.values, 1), 3)  # of each head all its attention
    assert distance.values.shape == (6, 3) and (distance.values[2] == layers["layer 3"].distance).all()
    drawn = [*lines[0].lines]
    assert len(drawn) == attention.SOME and drawn[0] == "layer 1" and drawn[-1] == "layer 6"


def test_a_text_is_colored_by_the_losses_of_each_model(study, command, tmp_path):
    """Bits of the model's own loss; a line for each model in one picture."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten ü " * 4)
    run, trials = learned.opened(study, ["rope"])
    [drawing] = learned.one_text(run, trials["rope"], text, 40)
    ids = torch.tensor([list(text.read_bytes()[:41])])
    with torch.no_grad():
        loss = learned.model_of(run, trials["rope"])(ids, labels=ids).loss
    panel = drawing.panels["RoPE (base=10000)"]
    assert panel.values.mean() == pytest.approx(float(loss) / math.log(2), rel=1e-5) and panel.mark == LENGTH
    assert "".join(panel.pieces) == text.read_text()[1:41]
    code, out, _ = command("show", study, "--encoding", "rope", "t5", "--text", text)
    assert code == 0 and "RoPE (base=10000)" in out and out.count("One text, colored") == 1
    longer = replace(run, study=run.study | {"configuration": run.study["configuration"] | {"train_length": 48}})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learned, "opened", lambda *_: (replace(run, others=(longer,)), trials))
        code, out, _ = command("show", study, "--encoding", "rope", "--text", text)
        assert code == 0 and "RoPE (base=10000), at 48" in out and "steps at length 48" in out
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learned, "measurable", lambda *_: (20, []))  # as with a table of 20 positions
        with pytest.raises(UsageError, match="--length"):
            learned.one_text(run, trials["rope"], text, 40)
    for words, length in (("--text", 10_000), ("no/such/file", None)):
        with pytest.raises(UsageError) as refused:
            learned.one_text(run, trials["rope"], text if length else tmp_path / "no/such/file", length)
        assert words in refused.value.what


def test_a_longer_window(study):
    assert len(drawn(study, "rope", 48)["field"].lines["layer 1"][0]) == 48
    with pytest.raises(ValueError, match="--length 100000: what this study held out has windows of at most"):
        drawn(study, "rope", 100_000)


@pytest.mark.parametrize(("task", "stacks"), [("masked", [""]), ("reverse", ["encoder, ", "decoder, "])])
def test_encoders_look_to_both_sides(task, stacks, tmp_path):
    """The share of a distance is that of both sides; decoders of encoder-decoders look back."""
    path = write_run(
        tmp_path, {"rope": (2.5,)}, task=task, test_lengths=(16,), layers=1, hidden=16, heads=2, train_length=8
    )
    run = learned.read_run(path)
    save(build_model(run.config, "rope", 0), run.of("rope")[0].folder)
    found = drawn(path, "rope", 8)
    assert [*found["attention"].lines] == [f"{stack}layer 1" for stack in stacks]
    offsets, weights = found["attention"].lines[f"{stacks[0]}layer 1"]
    assert [*offsets] == [*range(-offsets[-1], offsets[-1] + 1)]
    queries = len(weights) // 2 + 1 - np.abs(offsets)  # that have a key there
    near = (weights * queries)[np.abs(offsets) <= 2].sum() / queries.max()
    [(_, share)] = [line for layer, line in found["field"].lines.items() if not layer.startswith("decoder")]
    assert 0 < near < share[-1] == pytest.approx(1) and share[2] == pytest.approx(near)
    if task == "reverse":
        assert min(found["attention"].lines["decoder, layer 1"][0]) == 0
    with pytest.raises(ValueError, match="--length 5: what this study held out has examples of 8 alone; leave it out"):
        drawn(path, "rope", 5)


def test_cross_attention_by_place(tmp_path, command):
    """Rows of the answer, columns of the source: the means of what the model's own weights are."""
    path = write_run(
        tmp_path, {"rope": (2.5,)}, task="reverse", test_lengths=(16,), layers=2, hidden=16, heads=2, train_length=8
    )
    run = learned.read_run(path)
    save(build_model(run.config, "rope", 0), run.of("rope")[0].folder)
    grids = [each for name, each in drawn(path, "rope", 8).items() if name.startswith("cross")]
    assert [grid.name for grid in grids] == ["cross-1", "cross-2"]
    texts = learned.windows(run, run.task.prepare(run.config), 8)
    model = run.task.model.from_pretrained(run.of("rope")[0].folder).eval()
    with torch.no_grad():
        weights = model(**texts, output_attentions=True).cross_attentions[1].numpy()
    assert grids[1].values == pytest.approx(weights.mean((0, 1)), rel=1e-5)
    assert grids[1].values.sum(1) == pytest.approx(np.ones(len(grids[1].rows)))
    assert grids[1].values.std() > 0 and len(grids[1].columns) == texts["input_ids"].shape[1]
    code, out, _ = command("show", path, "--encoding", "rope")
    assert code == 0 and "Cross-attention by place, decoder, layer 2" in out


def test_a_mixer_without_weights_draws_none(study):
    assert drawn(study, "mamba") == {}


def test_runs_that_lack_what_is_asked_for(study, command):
    code, out, err = command("show", study, "--encoding", "nope")
    assert code == 2 and out == "" and "no model of NoPE: config.json and model.safetensors missing" in err
    _, _, err = command("show", study, "--encoding", "ropee")
    assert "unknown label of --encoding 'ropee': did you mean 'rope'?" in err
    _, _, err = command("show", "alibi", "--encoding", "rope")
    assert "--encoding chooses models of a study; expected a folder that `longitude study` wrote" in err
    _, _, err = command("show", study, "--heads", 2)
    assert "--heads is for names of encodings and mixers" in err


def test_in_the_terminal_side_by_side(study, command):
    code, out, _ = command("show", study, "--encoding", "rope", "t5")
    assert code == 0 and "A rope  B t5" in out and "Of each, layer 2 is drawn." in out
    assert max(map(len, out.splitlines())) <= 80 or str(study) in out
