"""Retention, RWKV6, Mamba2 and Performer as layers: cache, documents, padding, precision, registry, checkpoints."""

import json
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.initialization import guard_torch_init_functions

import longitude as lg
from longitude.attention.mixer import MIXERS, mixer_resolved
from longitude.recurrent import RWKV6, Mamba2, Performer, Retention
from longitude.registry import options_of

EXACT = torch.float64
OPTIONS = {
    "retention": {"dim": 32, "num_heads": 4},
    "rwkv6": {"dim": 32, "num_heads": 4, "mix_rank": 4, "decay_rank": 6},
    "mamba2": {"dim": 32, "head_dim": 8, "state_size": 6, "groups": 2},
    "performer": {"dim": 32, "num_heads": 4, "num_kv_heads": 2},
}
KINDS = {"retention": Retention, "rwkv6": RWKV6, "mamba2": Mamba2, "performer": Performer}
LAYERS = {name: partial(kind, **OPTIONS[name]) for name, kind in KINDS.items()}


@pytest.fixture(params=LAYERS)
def name(request) -> str:
    return request.param


def built(name: str):
    """With every parameter moved, so that each matters."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


def tokens(batch: int = 3, length: int = 29) -> Tensor:
    return torch.randn(batch, length, 32, dtype=EXACT)


def assert_close(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-10)


def test_pieces_and_single_tokens_equal_the_whole(name):
    layer, x = built(name), tokens()
    whole = layer(x)
    for parts in (x.split(1, 1), x.split([11, 1, 17], 1)):
        cache = layer.cache_layer()
        assert_close(torch.cat([layer(part, cache=cache) for part in parts], 1), whole)
        assert cache.get_seq_length() == 29


def test_the_state_has_one_size_and_is_wide(name):
    layer, x = built(name).bfloat16(), tokens().bfloat16()
    cache, shapes = layer.cache_layer(), []
    for part in x.split([1, 20, 8], 1):
        assert layer(part, cache=cache).dtype == torch.bfloat16
        shapes.append([part.shape for part in cache.state])
        assert {part.dtype for part in cache.state} == {torch.float32}
    assert shapes[0] == shapes[1] == shapes[2]


def test_packed_documents_equal_separate_ones_and_padding_is_not_there(name):
    layer, x = built(name), tokens()
    documents = torch.tensor([[-1] * 4 + [0] * 9 + [1] * 16, [0] * 20 + [1] * 5 + [-1] * 4, [0] * 29])
    pieces = ((0, 4, 13), (0, 13, 29), (1, 0, 20), (1, 20, 25), (2, 0, 29))
    wanted = {piece: layer(x[piece[0], None, piece[1] : piece[2]])[0] for piece in pieces}
    packed = layer(x, documents=documents)
    assert torch.isfinite(packed).all()
    cache = layer.cache_layer()
    in_parts = [layer(x[:, :15], documents=documents[:, :15], cache=cache)]
    in_parts.append(layer(x[:, 15:], documents=documents, cache=cache))
    for out in (packed, torch.cat(in_parts, 1)):
        for (row, start, stop), alone in wanted.items():
            assert_close(out[row, start:stop], alone)


def test_a_row_goes_on_after_padding_as_if_it_were_alone(name):
    layer, x = built(name), tokens()
    documents = torch.zeros(3, 29, dtype=torch.long)
    documents[0, :7] = -1
    cache, alone = layer.cache_layer(), layer.cache_layer()
    layer(x[:, :20], documents=documents[:, :20], cache=cache)
    layer(x[:1, 7:20], cache=alone)
    for held, wanted in zip(cache.state, alone.state, strict=True):
        if name != "retention":  # its keys are turned by position, and say so in the state
            assert_close(held[:1], wanted)
    assert_close(layer(x[:, 20:], documents=documents, cache=cache)[:1], layer(x[:1, 20:], cache=alone))


def test_every_layer_has_the_three_forms(name):
    layer, x = built(name), tokens()
    for mode in ("parallel", "recurrent"):
        other = lg.mixer(name, **{**OPTIONS[name], "mode": mode}).double()
        other.load_state_dict(layer.state_dict())
        assert_close(other(x), layer(x))
    with pytest.raises(ValueError, match=rf"mode 'fast'.*{type(layer).__name__}"):
        lg.mixer(name, **OPTIONS[name], mode="fast")


def test_what_a_checkpoint_filled_is_not_drawn_anew(name):
    """transformers marks parameters that it has loaded, and asks the whole layer to draw what is missing."""
    layer = built(name)
    own = {
        key: p for key, p in layer.named_parameters() if "_proj" not in key and "norm" not in key and "conv" not in key
    }
    for missing in own:
        before = {key: p.detach().clone() for key, p in own.items()}
        for key, parameter in own.items():
            parameter._is_hf_initialized = key != missing
        with guard_torch_init_functions():
            layer.reset_parameters()
        for key, parameter in own.items():
            assert torch.equal(parameter, before[key]) or key == missing, key
        assert not torch.equal(own[missing], before[missing])


def test_every_parameter_learns(name):
    layer = built(name)
    layer(tokens()).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


def test_fresh_layers_are_sensible(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, 200, 32)
    out = layer(x)
    assert torch.isfinite(out).all() and 0.005 < float(out.detach().std()) < 2
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.isfinite(gradient).all()


def test_by_name_with_options_that_json_can_hold(name):
    kind = MIXERS[name]
    assert kind is type(LAYERS[name]())
    options = {option for option, p in options_of(kind).items() if p.kind is not p.VAR_KEYWORD}
    full = mixer_resolved(name, {}, dim=32, num_heads=4, num_kv_heads=4, head_dim=8)
    assert set(full) == options and json.loads(json.dumps(full)) == full
    assert lg.mixer(name, **full)(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_a_checkpoint_is_all_there_is(name):
    """Made without storage, given storage, then the numbers: nothing is missing."""
    layer = built(name)
    with torch.device("meta"):
        twin = LAYERS[name]().double().eval()
    twin.to_empty(device="cpu")
    twin.load_state_dict(layer.state_dict())
    x = tokens()
    torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=1e-12)
    assert not list(layer.buffers())


def test_reset_parameters_fills_what_a_model_does_not(name):
    """A model fills Linear and RMSNorm itself."""
    layer = LAYERS[name]()
    torch.nn.utils.vector_to_parameters(
        torch.full((sum(p.numel() for p in layer.parameters()),), torch.nan), layer.parameters()
    )
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.RMSNorm):
            module.reset_parameters()
    layer.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in layer.parameters())
    assert torch.isfinite(layer(torch.randn(2, 50, 32))).all()


def test_bad_input(name):
    layer, x = built(name), tokens()
    kind = type(layer).__name__
    with pytest.raises(ValueError, match=r"x: expected \[B, L, 32\].*got \[3, 29, 31\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=f"mask: {kind} mixes"):
        layer(x, mask=lg.Window(4))
    with pytest.raises(ValueError, match=f"return_weights: {kind}"):
        layer(x, return_weights=True)
    with pytest.raises(ValueError, match=f"ALiBi adds to scores, and {kind} has none"):
        layer(x, encoding=lg.ALiBi(num_heads=4))
    if not layer.rotates:
        with pytest.raises(ValueError, match=f"Rotary turns queries and keys, and {kind} has none"):
            layer(x, encoding=lg.encoding("rope", head_dim=8, layout="half"))
    other = built("mamba2" if name != "mamba2" else "rwkv6")
    cache = other.cache_layer()
    other(x, cache=cache)
    with pytest.raises(ValueError, match=f"cache: expected a state of {kind}, got one of {type(other).__name__}"):
        layer(x, cache=cache)
    for option in ("num_heads", "head_dim", "chunk_size"):
        if option in options_of(type(layer)):
            with pytest.raises(ValueError, match=f"{option}.*of 1 or more"):
                lg.mixer(name, **{"dim": 32, **({} if name == "mamba2" else {"num_heads": 4}), option: 0})
