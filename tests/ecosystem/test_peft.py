"""PEFT: LoRA on our models and on an extended Llama; what is saved is the adapter, and merged it is the model with it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import longitude as lg
from longitude.check.against import against
from longitude.testing import fill
from tests.ecosystem.conftest import MODELS, ours
from tests.extend.conftest import LENGTH, saved
from tests.models.conftest import SMALL, mixer_spec
from tests.support import close

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ecosystem,
    # PEFT uses the name that transformers has given up
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.fixture(params=["ours", "recurrences", "extended"])
def base(request, tmp_path, command):
    """(a model, the folder of its checkpoint where it has one)."""
    if request.param != "extended":
        return MODELS[request.param](), None
    source, folder = saved("llama", tmp_path / "model"), tmp_path / "longer"
    assert command("extend", source, "--to", 4 * LENGTH, "--method", "yarn", "--out", folder)[0] == 0
    return AutoModelForCausalLM.from_pretrained(folder), folder


def test_an_adapter(base, tmp_path):
    model, folder = base
    plain = copy.deepcopy(model).eval()
    names = [name for name in ("q_proj", "v_proj", "in_proj") if any(name in n for n, _ in model.named_modules())]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    before = {name: p.detach().clone() for name, p in tuned.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    ids, losses = torch.arange(3, 15).repeat(2, 2), []
    for _ in range(8):
        loss = tuned(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    moved = {name for name, p in tuned.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)

    tuned.eval().save_pretrained(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in files and not any(name.endswith((".bin", ".pt")) for name in files)
    with torch.no_grad():
        wanted = tuned(ids, use_cache=False).logits
        assert (wanted - plain(ids, use_cache=False).logits).abs().max() > 1e-3
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        close(loaded(ids, use_cache=False).logits, wanted, 1e-5)
        merged = loaded.merge_and_unload()
        close(merged(ids, use_cache=False).logits, wanted, 1e-5)
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    if folder is not None:  # the adapter knows what it was trained on
        assert [fact.name for fact in against(folder, tmp_path / "adapter") if fact.differs] == []


PROMPTED = {
    **{name: lambda name=name: MODELS[name]() for name in MODELS},
    **{name: lambda name=name: ours(encoding=name) for name in ("t5", "fox", "path", "learned", "mrope")},
}


@pytest.mark.parametrize("name", PROMPTED)
def test_prompt_tuning_on_padded_batches(name):
    """PEFT puts float ones before the mask. A row trains and generates as it does alone; only the prompt changes."""
    model = peft.get_peft_model(PROMPTED[name](), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    ids = torch.tensor([[3, 4, 5, 6, 0, 0], [3, 4, 5, 6, 7, 8]])
    mask = (ids != 0).long()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(ids == 0, -100)).loss
    loss.backward()
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("prompt_encoder" in name and p.grad.abs().max() > 0 for name, p in learned.items()) and learned
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options["use_cache"] = False  # PEFT 0.21 looks for its former name, and puts the prompt before every step
    left = torch.tensor([[0, 0, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8]])
    both = model.eval().generate(input_ids=left, attention_mask=(left != 0).long(), **options)
    for row, prompt, padding in zip(both, left, (2, 0), strict=True):
        x = prompt[None, padding:]
        alone = model.generate(input_ids=x, attention_mask=torch.ones_like(x), **options)
        assert row[padding:].tolist() == alone[0].tolist()


EVERY = [
    *({"encoding": name} for name in lg.list_encodings()),
    *({"encoding": "auto", "mixer": mixer_spec(name)} for name in lg.list_mixers()),
]


@pytest.mark.parametrize("options", EVERY, ids=str)
@torch.no_grad()
def test_all_linear_layers_merged_and_not(options):
    """LoRA on every linear layer, those inside of encodings included: all at once, and token by token."""
    torch.manual_seed(0)
    model = fill(lg.LongitudeForCausalLM(lg.LongitudeConfig(**SMALL, **options)).double().eval(), std=0.3)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    x = torch.randint(1, 16, (2, 12))
    plain = model(x).logits
    tuned = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).eval()

    def logits(model):
        step = model(x[:, :7], use_cache=True)
        parts = [step.logits]
        for token in x[:, 7:].split(1, 1):
            parts.append((step := model(token, cache=step.cache, use_cache=True)).logits)
        return torch.stack([model(x).logits, torch.cat(parts, 1)])

    want = logits(tuned)
    assert (want[0] - plain).abs().max() > 1e-3
    close(want[1], want[0], 1e-8)
    close(logits(tuned.merge_and_unload()), want, 1e-8)
