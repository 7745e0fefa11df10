"""A model moved to 16 bits is the same model, whichever way it went; what must not be rounded is not."""

import pytest
import torch

import longitude as lg

FLOAT32 = {"log_dt", "log_A_real", "A_imag"}
"""What S4D keeps in float32."""


@pytest.mark.parametrize(
    ("encoding", "mixers", "kept"),
    [
        ("auto", ["attention"] * 2, set()),
        ("auto", ["attention", "s4d"], FLOAT32),
        ("rope:learned_frequencies=true", ["attention"] * 2, {"alpha"}),
        ("axial_rope:mixed=true", ["attention"] * 2, {"theta"}),
    ],
    ids=["no parameter", "S4D", "learned frequencies", "RoPE-Mixed"],
)
@torch.no_grad()
def test_every_way_to_16_bits_is_the_same_model(encoding, mixers, kept, build, ids, tmp_path):
    one, x = build(encoding, mixers=mixers).float(), ids(1, 40)
    assert one._keep_in_fp32_modules_strict == kept  # transformers asks each model
    one.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = lg.LongitudeForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        moved = build(encoding, mixers=mixers).to(dtype)
        moved.load_state_dict(one.state_dict())
        for other in (loaded, moved):
            assert other.dtype == dtype and other(x).logits.dtype == dtype
            for name, p in other.named_parameters():
                assert p.dtype == (torch.float32 if name.rsplit(".", 1)[-1] in kept else dtype), name
                assert torch.equal(p, one.get_parameter(name).to(p.dtype)), name


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
    assert layer.A_imag[0, -1].item() == pytest.approx(31 * torch.pi)
    layer.load_state_dict(lg.mixer("s4d", dim=8).bfloat16().state_dict(), assign=True)
    assert layer.log_dt.dtype == torch.float32 and layer.C.dtype == torch.bfloat16
