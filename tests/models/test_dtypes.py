"""A model moved to 16 bits is the same model, whichever way it went; what must not be rounded is not."""

import pytest
import torch

import longitude as lg

WIDE = {"s4d": {"log_dt", "log_A_real", "A_imag"}}
OPTIONS = {"mamba2": {"head_dim": 8}, "s4d": {"state_size": 64}, "window": {"size": 8}, "latent": {"kv_rank": 8}}
TOKENS = torch.arange(40).view(1, 40) * 7 % 64


def model(mixer="attention", encoding="auto", seed=0):
    torch.manual_seed(seed)
    config = lg.LongitudeConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        encoding=encoding, mixer={"name": mixer, **OPTIONS.get(mixer, {})},
    )  # fmt: skip
    return lg.LongitudeForCausalLM(config).eval()


def cases():
    for name in lg.list_mixers():
        yield pytest.param({"mixer": name}, id=name, marks=[] if name in ("s4d", "attention") else [pytest.mark.slow])
    for name in lg.list_encodings():
        yield pytest.param({"encoding": name}, id=name, marks=[pytest.mark.slow])


@pytest.mark.parametrize("what", list(cases()))
def test_every_way_to_16_bits_is_the_same_model(what, tmp_path):
    one = model(**what)
    one.save_pretrained(tmp_path)
    kept = WIDE.get(what.get("mixer"), set())
    with torch.no_grad():
        want = one.double()(TOKENS).logits
        one.float()
        for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
            loaded = lg.LongitudeForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
            moved = model(**what, seed=1).to(dtype)
            moved.load_state_dict(one.state_dict())
            for other in (loaded, moved, model(**what).to(dtype)):
                assert other.dtype == dtype and other(TOKENS).logits.dtype == dtype
                for name, p in other.named_parameters():
                    assert p.dtype == (torch.float32 if name.rsplit(".", 1)[-1] in kept else dtype), name
                    assert torch.equal(p, one.get_parameter(name).to(p.dtype)), name
            near = loaded.double()(TOKENS).logits
            assert (near - want).abs().max() < tolerance * want.abs().max()


def test_what_a_model_keeps_in_float32_is_what_its_own_layers_name(tmp_path):
    """transformers asks each model; names that none of its layers has would be slips."""
    assert model()._keep_in_fp32_modules_strict == set()
    hybrid = lg.LongitudeForCausalLM(lg.LongitudeConfig(mixers=["attention", "s4d"], num_hidden_layers=2))
    assert hybrid._keep_in_fp32_modules_strict == WIDE["s4d"]
    assert lg.LongitudeForCausalLM(lg.LongitudeConfig())._keep_in_fp32_modules_strict == set()
    kept = {n.rsplit(".", 1)[-1] for n, p in hybrid.bfloat16().named_parameters() if p.dtype == torch.float32}
    assert kept == WIDE["s4d"]


def test_gradients_move_with_what_is_kept():
    layer = lg.mixer("s4d", dim=8)
    layer(torch.randn(1, 5, 8)).sum().backward()
    layer.bfloat16()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32, torch.bfloat16}
    assert all(p.grad.dtype == p.dtype for p in layer.parameters())
    assert layer.double().log_dt.grad.dtype == torch.float64 and layer.float().log_dt.dtype == torch.float32


def test_a_layer_made_or_assigned_in_16_bits_keeps_them_too():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = lg.mixer("s4d", dim=8)
    finally:
        torch.set_default_dtype(before)
    assert layer.A_imag.dtype == torch.float32 and layer.D.dtype == torch.bfloat16
    assert layer.A_imag._no_weight_decay and layer.A_imag[0, -1].item() == pytest.approx(31 * torch.pi)
    layer.load_state_dict(lg.mixer("s4d", dim=8).bfloat16().state_dict(), assign=True)
    assert layer.log_dt.dtype == torch.float32 and layer.C.dtype == torch.bfloat16
