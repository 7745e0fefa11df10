"""RWKV-6: numbers worked out by hand."""

import pytest
import torch

from longitude.recurrent import RWKV6, rwkv6

EXACT = torch.float64


@pytest.mark.parametrize("mode", ["chunked", "parallel", "recurrent"])
def test_by_hand(mode):
    """w = 1/2, u = 2, r = k = 1, v = 1, 2, 3: 2*1; 1 + 2*2; (1/2 + 2) + 2*3; a state of 1/4 + 2/2 + 3."""
    one = torch.ones(1, 1, 3, 1, dtype=EXACT)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=EXACT).view(1, 1, 3, 1)
    out, state = rwkv6(one, one, v, (one / 2).log(), torch.full((1, 1), 2.0, dtype=EXACT), mode=mode, chunk_size=2)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 5.0, 8.5], dtype=EXACT))
    torch.testing.assert_close(state.flatten(), torch.tensor([4.25], dtype=EXACT))


def test_channels_decay_alone():
    """A channel that keeps everything and one that forgets at once."""
    r = k = torch.ones(1, 1, 4, 2, dtype=EXACT)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=EXACT).view(1, 1, 4, 1)
    log_w = torch.tensor([0.0, -1000.0], dtype=EXACT).expand(1, 1, 4, 2)
    out, _ = rwkv6(r, k, v, log_w, torch.zeros(1, 2, dtype=EXACT))
    # the forgetful one still contains the token just before: its decay acts when the next one comes
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 2.0, 21.0, 211.0], dtype=EXACT))


def test_initial_decays_reach_from_slow_to_fast():
    layer = RWKV6(64, 4)
    w = torch.exp(-torch.exp(layer.time_decay.detach().flatten()))
    assert (w.diff() < 0).all()
    torch.testing.assert_close(w[[0, -1]], torch.exp(-torch.exp(torch.tensor([-6.0, -1.0]))))
    assert not layer.time_maa_w1.any() and not layer.time_decay_w1.any()  # nothing depends on the data yet
