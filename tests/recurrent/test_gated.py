"""LSTM and GRU: torch's own layers, by their parameters, in one pass and step by step."""

import pytest
import torch

from longitude.recurrent import GRU, LSTM
from longitude.testing import fill
from tests.support import close

KINDS = [(LSTM, torch.nn.LSTM), (GRU, torch.nn.GRU)]


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
@pytest.mark.parametrize("flagged", [False, True])
def test_it_is_torchs(ours, theirs, flagged):
    """Outputs and gradients; flagged: with a document in the second half, so that it goes step by step."""
    mixer, layer = fill(ours(6, inner=8)).double(), theirs(6, 8, batch_first=True).double()
    layer.load_state_dict({name: p for name, p in mixer.state_dict().items() if name != "output.weight"})
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    halves = [slice(0, 5), slice(5, 11)] if flagged else [slice(0, 11)]
    want = torch.cat([mixer.output(layer(x[:, half])[0]) for half in halves], 1)
    got = mixer(x, documents=torch.tensor([0] * 5 + [1] * 6).expand(2, 11) if flagged else None)
    weight = torch.randn_like(want)
    wanted = (x, *layer.parameters()), (x, *(mixer.get_parameter(name) for name, _ in layer.named_parameters()))
    close(*((y, *torch.autograd.grad((y * weight).sum(), of)) for y, of in zip((want, got), wanted)), rtol=1e-12)


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_initial_values_are_torchs(ours, theirs):
    """Uniform within 1/sqrt(inner), weights and biases alike."""
    mixer = ours(64, inner=100)
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        parameter = getattr(mixer, name)
        assert parameter.shape == getattr(theirs(64, 100), name).shape
        assert 0.095 < parameter.abs().max() <= 0.1
