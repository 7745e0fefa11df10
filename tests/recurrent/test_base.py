"""What all seven layers share beyond the laws of longitude.testing.mixers: published loops, initial values, refusals."""

from functools import partial

import pytest
import torch
from transformers.initialization import guard_torch_init_functions

import longitude as lg
from longitude.attention.mixer import MIXERS, mixer_resolved
from longitude.recurrent.base import RecurrentMixer
from longitude.registry import options_of
from tests.sceptic import recurrences
from tests.support import close, random, refused_calls

NAMES = [name for name in lg.list_mixers() if issubclass(MIXERS[name], RecurrentMixer)]


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


def built(name: str, **options):
    """With every parameter changed, so that each matters."""
    torch.manual_seed(0)
    known = {"dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    layer = lg.mixer(name, **mixer_resolved(name, options, **known))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("name", ["retention", "rwkv6", "s4d"])
def test_each_layer_is_its_loop_over_tokens(name):
    """The loops of tests/sceptic, written from the papers; other layers are those of transformers."""
    layer, x = built(name).double(), random(2, 11, 32)
    parameters = {key: p.numpy() for key, p in layer.state_dict().items()}
    options = {**mixer_resolved(name, {}, dim=32, num_heads=4, num_kv_heads=4, head_dim=8), "num_heads": 4}
    first = {"first": 5} if name == "retention" else {}
    loop = partial(getattr(recurrences, name), p=parameters, o=options, **first)
    close(layer(x, positions=5), torch.stack([torch.tensor(loop(row.numpy())) for row in x]), atol=1e-10)


def test_what_a_checkpoint_filled_is_not_drawn_again(name):
    """transformers marks parameters that it has loaded, and has the whole layer draw what is missing."""
    layer = built(name)
    foreign = "_proj.weight norm ln_x conv receptance key. value. gate. output.".split()  # filled by the model
    own = {key: p for key, p in layer.named_parameters() if not any(part in key for part in foreign)}
    for missing in own:
        before = {key: p.detach().clone() for key, p in own.items()}
        for key, parameter in own.items():
            parameter._is_hf_initialized = key != missing
        with guard_torch_init_functions():
            layer.reset_parameters()
        for key, parameter in own.items():
            assert torch.equal(parameter, before[key]) or key == missing, key
        assert not torch.equal(own[missing], before[missing])


def making(name: str, **options):
    """A call that makes a mixer of width 32, in four heads where it has heads."""
    known = {"num_heads": 4} if "num_heads" in options_of(MIXERS[name]) else {}
    return partial(lg.mixer, name, **{"dim": 32, **known, **options})


test_refusals = refused_calls(
    [
        (making("mamba2", dim=48), "96", "head_dim=64"),
        (making("mamba2", dim=64, groups=3), "groups=3"),
        (making("retention", dim=9, num_heads=3), "head_dim"),
        (making("retention", dim=10, num_heads=3), "num_heads"),
        (making("s4d", state_size=7), "state_size", "7"),
    ]
)
