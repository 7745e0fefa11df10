"""Stock transformers models with another encoding in the place of their rotation."""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import longitude as lg
from longitude.hf import from_pretrained, set_positions
from longitude.positions.base import ENCODINGS
from longitude.registry import options_of
from longitude.testing.battery.models import require_same_offloaded
from tests.support import close as near, in_pieces, parameter_gradients, refused, refused_calls

REFUSED = dict.fromkeys(("sinusoidal", "learned", "abacus", "coupled", "convolutional"), "input") | {
    **dict.fromkeys(("axial_rope", "swin", "swin_v2"), "2 axes"),
    "mrope": "3 axes",
}
WORKING = [name for name in lg.list_encodings() if name not in REFUSED]
PADDED = 6


def llama(layers):
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **shape))


def spec(name) -> dict[str, Any]:
    known = {"layout": "half", "window": 5, "group": 3, "chunk_size": 7, "local_size": 2}
    parameters = options_of(ENCODINGS[name])
    options = {option: value for option, value in known.items() if option in parameters}
    return {"name": name, **({"head_dim": 12} if name == "mrope" else {}), **options}


@pytest.fixture
def placed(stock):
    """A stock model with an encoding whose learned parameters are random numbers."""

    def make(kind, encoding, **more: Any) -> Any:
        model = stock(kind, **more)
        set_positions(model, encoding)
        for parameter in model.base_model.longitude_positions.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return model

    return make


close = partial(near, atol=1e-10)


def made_again(model: Any):
    """Activations are made again in backward; the method changed its name in 2026."""
    name = next(n for n in ("activation_checkpointing_enable", "gradient_checkpointing_enable") if hasattr(model, n))
    getattr(model, name)({"use_reentrant": False})


def test_the_models_own_rotation_put_back_changes_nothing(kind, ids, placed, stock):
    """base and rotary_dim that are left out are the model's own."""
    plain = stock(kind)(ids).logits
    close(placed(kind, {"name": "rope", "layout": "half", "angle_dtype": "float32"})(ids).logits, plain)
    assert (placed(kind, "nope")(ids).logits - plain).abs().max() > 0.1


def test_alibi_equals_a_dense_bias(kind, ids, placed, stock):
    """Press et al. 2021: slopes of four heads 1/4, 1/16, 1/64, 1/256; here as a mask of floats for sdpa."""
    reference, ours = stock(kind), placed(kind, "alibi")
    rotary = reference.base_model.rotary_emb
    rotary.inv_freq.zero_()  # cos 1, sin 0
    offset = torch.arange(17)[:, None] - torch.arange(17)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=torch.float64)
    seen = (offset >= 0) & (offset < (5 if kind == "mistral" else 99))
    bias = (-slopes[:, None, None] * offset).masked_fill(~seen, -torch.inf)[None].expand(2, -1, -1, -1)
    close(ours(ids).logits, reference(ids, attention_mask=bias).logits)
    ours(ids, labels=ids).loss.backward()
    reference(ids, labels=ids, attention_mask=bias).loss.backward()
    close({n: p.grad for n, p in ours.named_parameters()}, {n: p.grad for n, p in reference.named_parameters()})


def test_scaled_cos_and_sin_are_taken_away(ids, placed):
    """YaRN multiplies them; without rotation nothing of that is left."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
    close(placed("llama", "nope", rope_parameters=yarn)(ids).logits, placed("llama", "nope")(ids).logits)


def test_a_mask_of_four_dimensions(ids, placed):
    """Documents as a mask are documents by position_ids; an encoding that reads tokens would not see them."""
    two = torch.cat([torch.arange(7), torch.arange(10)])[None].expand(2, -1)
    document = (torch.arange(17) >= 7).long()
    mask = (document[:, None] == document) & torch.ones(17, 17, dtype=torch.bool).tril()
    for name in ("alibi", "self_extend", "ssmax"):
        model = placed("llama", spec(name))
        got = model(ids, attention_mask=mask.expand(2, 1, 17, 17), position_ids=two, use_cache=False).logits
        close(got, model(ids, position_ids=two, use_cache=False).logits)
    with refused("attention_mask", "[B, 1, L, keys]", "[B, tokens]"):
        placed("llama", "fox")(ids, attention_mask=mask.expand(2, 1, 17, 17))


@pytest.mark.one_in(47)
@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_chunks_padding_and_packing(kind, name, mode, ids, mask, placed):
    """Decoding with the cache is the whole pass, left padding and other documents change nothing."""
    with mode():
        model = placed(kind, spec(name))
        places = (mask.cumsum(1) - 1).clamp(min=0)
        whole = model(ids, attention_mask=mask, position_ids=places).logits
        close(whole[:1, PADDED:], model(ids[:1, PADDED:]).logits)
        pieces = in_pieces(model, ids, (9, 15, 16, 17), attention_mask=mask, position_ids=places)
        close(pieces[mask.bool()], whole[mask.bool()])
        two = torch.cat([torch.arange(7), torch.arange(10)])[None]
        packed = model(ids, position_ids=two, use_cache=False).logits
        close(packed[:, :7], model(ids[:, :7]).logits)
        close(packed[:, 7:], model(ids[:, 7:]).logits)
        close(model(ids[:1], cu_seq_lens_q=torch.tensor([0, 7, 17]), use_cache=False).logits, packed[:1])


@pytest.mark.one_in(17)
@pytest.mark.parametrize("name", [*WORKING, "rope:layout=half,learned_frequencies=true+t5+fox"])
def test_offloaded_to_memory_or_disk(name, ids, placed):
    require_same_offloaded(placed("llama", spec(name) if name in WORKING else name), ids[:, :9])


def test_rotated_values_in_a_stock_model(ids, placed, stock):
    """They are cached rotated, and turned back wherever the sequence begins."""
    model = placed("llama", {"name": "rope", "layout": "half", "rotate_values": True})
    whole = model(ids).logits
    close(in_pieces(model, ids, range(1, 18)), whole)
    close(model(ids, position_ids=torch.arange(17)[None] + 30).logits, whole)
    assert (whole - stock()(ids).logits).abs().max() > 1e-3


def test_frequencies_that_follow_the_length(ids, placed, stock):
    """Keys stay raw in the cache: each query row has its own frequencies; and each document, which begins again."""
    dynamic = {"name": "dynamic", "factor": 4.0, "original_max_length": 4, "follow": "row"}
    model = placed("llama", {"name": "rope", "layout": "half", "scaling": dynamic})
    close(in_pieces(model, ids, range(1, 18)), model(ids).logits)
    packed = model(ids[:1], cu_seq_lens_q=torch.tensor([0, 7, 17]), use_cache=False).logits
    close(packed[:, 7:], model(ids[:1, 7:]).logits)
    assert (model(ids).logits - stock()(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["self_extend", "dual_chunk", "rerope"])
def test_offsets_of_its_own_rotation(name, ids, placed, stock):
    """Base and rotary_dim are the model's own, so a window of all positions changes nothing, and a small one the far tokens."""
    wide = spec(name) | {option: 99 for option in ("window", "chunk_size") if option in spec(name)}
    plain, near = stock("llama")(ids).logits, placed("llama", spec(name))(ids).logits
    close(placed("llama", wide)(ids).logits, plain, atol=1e-5)  # its tables are in float32
    close(near[:, :5], plain[:, :5], atol=1e-5)
    assert (near[:, 8:] - plain[:, 8:]).abs().max() > 1e-3


def test_offsets_of_a_scaled_rotation(ids, placed, stock):
    """The model's own scaling stays: Llama 3's; one that follows the length is refused."""
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8}  # fmt: skip
    wide = {"name": "rerope", "layout": "half", "window": 99}
    plain = stock("llama", rope_parameters=llama3)(ids).logits
    close(placed("llama", wide, rope_parameters=llama3)(ids).logits, plain, atol=1e-5)
    assert (plain - stock("llama")(ids).logits).abs().max() > 1e-3
    with refused("DynamicNTK", "factor=2.0", "original_max_length=64", "max_length=None"):
        placed("llama", wide, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["kerple_log", "path_fox", "self_extend"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation(name, beams, ids, mask, placed):
    model = placed("mistral", spec(name))
    options = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "num_beams": beams, "do_sample": False}
    assert model.generate(ids, **options).tolist() == model.generate(ids, use_cache=False, **options).tolist()


@pytest.mark.parametrize("name", ["alibi", "fire", "shaw", "path_fox", "rope", "dual_chunk"])
def test_saved_and_loaded(name, ids, tmp_path, monkeypatch, placed):
    """By us it comes back whole; plain transformers, which would silently rotate, refuses it."""
    model = placed("llama", spec(name))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    close(loaded(ids).logits, model(ids).logits, atol=1e-12)
    close(loaded.state_dict(), model.state_dict(), atol=0.0)
    assert loaded.config.longitude_positions == model.config.longitude_positions
    assert from_pretrained(tmp_path, dtype=torch.bfloat16)(ids).logits.dtype == torch.bfloat16
    with refused("longitude.hf.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.delitem(ROPE_INIT_FUNCTIONS, "longitude")  # where Longitude is not imported
    with pytest.raises(KeyError, match="longitude"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_that_lack_the_encoding_are_refused(tmp_path, placed):
    placed("llama", "t5").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.longitude_positions.0.table"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with refused("model.longitude_positions", "0.table"):
        from_pretrained(tmp_path)


def test_activations_made_again_give_the_same_gradients(ids, placed):
    model = placed("llama", "fox").train()
    plain = parameter_gradients(model(ids, labels=ids).loss, model)
    made_again(model)
    close(parameter_gradients(model(ids, labels=ids).loss, model), plain)
    assert all(gradient.abs().max() > 0 for gradient in plain)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        *((spec(name), [message]) for name, message in REFUSED.items()),
        ({"name": "alibi", "num_heads": 3}, ["alibi", "num_heads=3", "4"]),
        ({"name": "rope", "layout": "half", "head_dim": 8}, ["rope", "head_dim=8", "4"]),
        (lg.ALiBi(num_heads=4), ["set_positions", "name"]),
        ([], ["set_positions", "[]"]),
        (None, ["set_positions", "None"]),
        ("kerpel_log", ["'kerple_log'"]),
        ("rope", ["layout='half'"]),
        ({"name": "self_extend", "layout": "half"}, ["self_extend", "window"]),
    ],
    ids=str,
)
def test_what_can_never_run_is_refused_and_changes_nothing(encoding, message, ids, stock):
    model = stock()
    before, config = model(ids).logits, model.config
    with refused(*message):
        set_positions(model, encoding)
    assert model.config is config and config._attn_implementation == "sdpa"
    assert not hasattr(config, "longitude_positions")
    close(model(ids).logits, before, atol=1e-12)


def test_wrong_use_is_refused(ids, tmp_path, placed, stock):
    with refused("set_positions", "GPT2Model", "rotary_emb"):
        set_positions(stock("gpt2", n_embd=16, n_layer=2, n_head=4), "alibi")
    with refused("future", "lg.Causal"):
        placed("llama", "fox", is_causal=False)(ids)
    model = placed("llama", "alibi")
    with refused("static"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=20))
    filled = stock()(ids, use_cache=True).cache
    with refused("cache", "DynamicCache"):
        model(ids, cache=filled)
    with refused("attention_mask", "[17, 17]", "[2, 1, 17, 17]"):
        model(ids, attention_mask=torch.ones(2, 4, 17, 17, dtype=torch.bool))
    model.set_attn_implementation("sdpa")
    with refused("'sdpa'"):
        model(ids)
    stock().save_pretrained(tmp_path)
    with refused("longitude_positions"):
        from_pretrained(tmp_path)


def test_by_layer(ids, mask, tmp_path, stock, placed):
    """Every second layer without position: SmolLM3's own pattern, saved and loaded, with padding and a cache."""
    rope = {"name": "rope", "layout": "half", "angle_dtype": "float32"}
    plain = stock("smollm3", num_key_value_heads=2, no_rope_layer_interval=2)
    model = stock("smollm3", num_key_value_heads=2, no_rope_layer_interval=2)
    want = plain(ids, attention_mask=mask).logits[mask.bool()]
    set_positions(model, {"layers": [rope, "nope"]})
    close(model(ids, attention_mask=mask).logits[mask.bool()], want)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, dtype=torch.float64)
    close(again(ids, attention_mask=mask).logits[mask.bool()], want)
    layers = again.config.longitude_positions["layers"]
    assert [[spec["name"] for spec in layer] for layer in layers] == [["rope"], ["nope"]]
    both = placed("llama", {"layers": [[rope, "ssmax"], ["nope", "sink"]]})
    kinds = [type(encoding).__name__ for encoding in both.base_model.longitude_positions]
    assert kinds == ["Rotary", "SSMax", "NoPosition", "LearnedSink"]
    close(in_pieces(both, ids, (9, 10, 17)), both(ids).logits)
    shared = placed("llama", {"layers": [rope]})
    assert len(shared.base_model.longitude_positions) == 1
    labels = [("rope:layout=half+ssmax..nope", {"layers": [[{"name": "rope", "layout": "half"}, "ssmax"], "nope"]})]
    for label, spelled in [*labels, ("t5:max_distance=32+sink", [{"name": "t5", "max_distance": 32}, "sink"])]:
        assert placed("llama", label).config.longitude_positions == placed("llama", spelled).config.longitude_positions


test_wrong_layers = refused_calls([
    (lambda: set_positions(llama(3), {"layers": ["alibi", "nope"]}),
     "set_positions", "3", "2"),
    (lambda: set_positions(llama(2), {"layers": ["alibi"], "base": 3}), "'layers'", "['alibi']", "'base'", "3"),
    (lambda: set_positions(llama(2), {"layers": ["sinusoidal"]}), "set_positions", "lg.LongitudeConfig"),
])  # fmt: skip


def test_bases_by_type_of_layer(ids, stock):
    """Gemma 3 has two: left out for all layers, none of them is meant; layer by layer, each keeps its own."""
    of_types = {"sliding_attention": 1e4, "full_attention": 500.0}
    parameters = {name: {"rope_type": "default", "rope_theta": base} for name, base in of_types.items()}
    more: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 5}
    more |= {"layer_types": list(of_types), "rope_parameters": parameters}
    rope = {"name": "rope", "layout": "half"}
    plain = stock("gemma3_text", **more)(ids).logits
    model = stock("gemma3_text", **more)
    with refused("sliding_attention", "10000.0", "full_attention", "500.0"):
        set_positions(model, rope)
    set_positions(model, {"layers": [rope]})
    near(model(ids).logits, plain, 1e-5)
    based = stock("gemma3_text", **more)
    set_positions(based, {**rope, "base": 500.0})
    wanted = {name: {"rope_type": "default", "rope_theta": 500.0} for name in of_types}
    near(based(ids).logits, stock("gemma3_text", **{**more, "rope_parameters": wanted})(ids).logits, 1e-5)
    assert (based(ids).logits - plain).abs().max() > 1e-3
