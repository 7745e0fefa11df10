"""What weight decay pulls to zero: one rule, over every model of ours."""

import sys

import pytest
import torch
from torch import nn

import longitude as lg
from longitude.training import decayed_names
from tests.support import refused_calls


def model(**options) -> lg.LongitudeForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes | options))


def last_names(names) -> set[str]:
    return {name.split(".", 3)[-1] if name.startswith("model.layers") else name for name in names}


RATES = {
    "mamba": {"A_log", "D", "conv1d.bias", "dt_proj.bias"},
    "mamba2": {"A_log", "D", "dt_bias", "conv1d.bias", "norm.weight"},
    "rwkv7": {*(f"x_{each}" for each in "rwkvag"), "w0", "a0", "r_k", "k_k", "k_a", "ln_x.weight", "ln_x.bias"},
    "s4d": {"log_dt", "log_A_real", "A_imag", "D"},
    "lstm": {"bias_ih_l0", "bias_hh_l0"},
}
RATES["parallel"] = {"attention_norm.weight", "state_norm.weight", *(f"state.{name}" for name in RATES["mamba2"])}
NORMS = {"mixer_norm.weight", "mlp_norm.weight", "model.norm.weight"}


@pytest.mark.parametrize("mixer", ["attention", *RATES])
def test_what_decays_of_a_mixer(mixer):
    """Each parameter is in one group, of one head as of two: by their publications' code. (A law tries all mixers.)"""
    options = {"head_dim": 16} if mixer == "mamba2" else {}
    one = model(mixer={"name": mixer, **options}, encoding="nope", num_attention_heads=1)
    rest = last_names({n for n, _ in one.named_parameters()} - set(decayed_names(one)))
    assert rest == NORMS | {f"mixer.{name}" for name in RATES.get(mixer, ())}
    decayed, rest = lg.parameter_groups(one, 0.3)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert sorted(id(p) for g in (decayed, rest) for p in g["params"]) == sorted(id(p) for p in one.parameters())


def test_matrices_are_known_by_their_modules():
    """Weights of Linear layers and convolutions decay whatever their sizes; a scale [1, n] is a vector however it is written."""
    one = nn.ModuleDict({"wide": nn.Linear(1, 4), "high": nn.Linear(4, 1), "conv": nn.Conv1d(3, 3, 1, groups=3)})
    one["table"] = nn.Embedding(4, 1)
    one.scale, one.more = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(2, 1, 4))
    one["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    expected = {"more", "wide.weight", "high.weight", "conv.weight", "normed.parametrizations.weight.original1"}
    assert set(decayed_names(one)) == expected


test_wrong_use = refused_calls([
    (lambda: lg.parameter_groups([torch.ones(2, 2)]), "parameter_groups", "list"),
    (lambda: lg.parameter_groups(None), "parameter_groups"),
    (lambda: lg.parameter_groups(nn.Linear(2, 2), -1), "weight_decay", "0", "-1"),
    (lambda: lg.parameter_groups(nn.Linear(2, 2).requires_grad_(False)), "none"),
    *((lambda lr=lr: lg.parameter_groups(nn.Linear(2, 2), lr=lr), "lr", repr(lr))
      for lr in (0, -1.0, True, float("nan"), "fast")),
])  # fmt: skip


def test_marks_of_others_frozen_parameters_and_saved_models(tmp_path):
    one = model(mixer={"name": "mamba"})
    one.save_pretrained(tmp_path)
    loaded = lg.LongitudeForCausalLM.from_pretrained(tmp_path)
    assert decayed_names(loaded) == decayed_names(one)  # marks on parameters are lost there
    layer = nn.Linear(4, 4)
    assert decayed_names(layer) == ["weight"]
    layer.weight._no_weight_decay = True
    assert decayed_names(layer) == []
    layer.bias.requires_grad_(False)
    decayed, rest = lg.parameter_groups(layer)
    assert decayed["params"] == [] and len(rest["params"]) == 1
    torch.optim.AdamW(lg.parameter_groups(layer), lr=1.0)


SCORE_TABLES = {
    "t5": {"table"}, "clipped": {"table"}, "kerple_log": {"a", "p"}, "kerple_power": {"a", "p"},
    "fire": {"c", "multiplier"}, "shaw": {"key_table", "value_table"}, "transformer_xl": {"u", "v"},
    "sink": {"logits"}, "inkling": {"profiles"},
}  # fmt: skip


@pytest.mark.parametrize("encoding", ["rope", *SCORE_TABLES])
def test_tables_of_scores_learn_faster(encoding):
    """In a group of their own at ten times the rate; nothing else does, and every parameter is in one group."""
    one, wanted = model(encoding=encoding), SCORE_TABLES.get(encoding, set())
    groups = lg.parameter_groups(one, 0.3, lr=0.01)
    assert [group["lr"] for group in groups] == pytest.approx([0.01, 0.01, 0.1][: 2 + bool(wanted)])
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in one.parameters())
    fast = {id(p) for p in groups[2]["params"]} if wanted else set()
    assert {n.rsplit(".", 1)[-1] for n, p in one.named_parameters() if id(p) in fast} == wanted


@pytest.mark.parametrize("options", [{"mixer": {"name": "rwkv6"}}, {"encoding": "t5"}])
def test_our_trainer_has_these_groups(options, tmp_path):
    from transformers import TrainingArguments

    import longitude.extend
    import longitude.study.train

    assert longitude.study.train.Trainer is sys.modules["longitude.extend.fine_tune"].Trainer is lg.hf.Trainer
    one, rates = model(vocab_size=16, **options), {"weight_decay": 0.1, "learning_rate": 0.01}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **rates)
    trainer = lg.hf.Trainer(model=one, args=arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    made, wanted = trainer.optimizer.param_groups, lg.parameter_groups(one, 0.1, lr=0.01)
    assert [sorted(map(id, g["params"])) for g in made] == [sorted(map(id, g["params"])) for g in wanted]
    assert [(g["weight_decay"], g["initial_lr"]) for g in made] == [(g["weight_decay"], g["lr"]) for g in wanted]
    assert trainer.create_optimizer() is trainer.optimizer
