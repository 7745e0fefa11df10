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
        ({"name": "rope", "learned_frequencies": True}, ["attention"] * 2, {"alpha"}),
        ({"name": "axial_rope", "mixed": True}, ["attention"] * 2, {"theta"}),
    ],
    ids=["no parameter", "S4D", "learned frequencies", "RoPE-Mixed"],
)
@torch.no_grad()
def test_every_way_to_16_bits_is_the_same_model(encoding, mixers, kept, build, ids, tmp_path):
    model, x = build(encoding, mixers=mixers).float(), ids(1, 40)
    assert model._keep_in_fp32_modules_strict == kept  # transformers asks each model
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = lg.LongitudeForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        moved = build(encoding, mixers=mixers).to(dtype)
        moved.load_state_dict(model.state_dict())
        for other in (loaded, moved):
            assert other.dtype == dtype and other(x).logits.dtype == dtype
            for name, p in other.named_parameters():
                assert p.dtype == (torch.float32 if name.rsplit(".", 1)[-1] in kept else dtype), name
                assert torch.equal(p, model.get_parameter(name).to(p.dtype)), name
