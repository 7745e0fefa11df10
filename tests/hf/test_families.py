"""Every causal family of the installed transformers with our attention: the logits of its own, or one sentence."""

import copy
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import make_families
from longitude.hf import set_positions
from longitude.hf.stock import KEY
from tests.support import in_pieces, refused

PADDING_IN_STATES = {"recurrent_gemma"}
"""Its recurrences read padding, whose tokens attend to nothing: zeros here, a mean of all values there."""
LARGEST = 20e6
"""Parameters of a toy; families with images whose towers stay large are left out."""


def toy(family):
    """A small model in eager attention, and its logits whole and padded; None where it cannot be made, or run, here."""
    default = make_families.AutoModelForCausalLM.from_config

    def small(config):
        with torch.device("meta"):
            if sum(p.numel() for p in default(config).parameters()) > LARGEST:
                raise MemoryError
        return default(config, attn_implementation="eager")

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(make_families.AutoModelForCausalLM, "from_config", small)
            model = make_families.toy(family)
        return model, logits(model)
    except Exception:  # configs whose sizes depend on each other, kernels that want a GPU
        return None


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    padded = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    return model(ids, use_cache=False).logits, padded


def outcome(family, model, want):
    """ "equal", "refused", or what is wrong."""
    try:
        ours = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="longitude").eval()
        ours.load_state_dict(model.state_dict())
        got = logits(ours)
    except ValueError as error:
        return "refused" if str(error).startswith("attn_implementation='longitude'") else repr(error)
    except Exception as error:
        return repr(error)
    gaps = [relative(a, b) for a, b in zip(got, want)][: 1 + (family not in PADDING_IN_STATES)]
    return "equal" if max(gaps) < 1e-4 else f"differs by {gaps}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_family_is_right_or_refused():
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    outcomes = {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if (made := toy(family)) is not None:
            outcomes[family] = outcome(family, *made)
    assert {family: what for family, what in outcomes.items() if what not in ("equal", "refused")} == {}
    cannot = {family for family, what in outcomes.items() if what == "refused"}
    assert {"bloom", "falcon", "gpt_neo", "doge", "mpt"} <= cannot
    assert len(outcomes) - len(cannot) > 80


def own_and_ours(family):
    """The same toy in eager attention and in ours, with weights that let attention matter."""
    made, generator = make_families.toy(family), torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data = 3 * p if p.dim() > 1 else p + 0.3 * torch.randn(p.shape, generator=generator)
    for backend in ("eager", "longitude"):
        model = type(made)._from_config(copy.deepcopy(made.config), attn_implementation=backend).eval()
        model.load_state_dict(made.state_dict())
        yield model


def relative(got, want):
    return float((got - want).detach().abs().max() / want.detach().abs().max())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", ["inkling_text", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_biases_and_chosen_keys_are_those_of_the_model(family):
    """Inkling adds to the scores; DeepSeek and GLM choose keys, or compress them."""
    module = family.removesuffix("_text")
    pytest.importorskip(f"transformers.models.{module}", reason="transformers is older than the model")
    theirs, ours = own_and_ours(family)
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    padded = {"attention_mask": (torch.arange(40) >= torch.tensor([[6], [0]])).long()}
    real = padded["attention_mask"].bool()
    want, got = ([model(ids, use_cache=False).logits, model(ids, **padded).logits[real]] for model in (theirs, ours))
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-5
    with torch.no_grad():
        for mask in ({}, padded):
            assert relative(*(in_pieces(model, ids, (9, 10, 25, 40), **mask)[real] for model in (ours, theirs))) < 1e-5
    gradients = [
        [torch.autograd.grad(x.cos().sum(), list(model.parameters()), allow_unused=True) for x in outputs]
        for model, outputs in ((theirs, want), (ours, got))
    ]
    for a, b in zip(*reversed(gradients), strict=True):
        assert [x is None for x in a] == [x is None for x in b]
        assert relative(*(torch.cat([x.flatten() for x in side if x is not None]) for side in (a, b))) < 1e-5


REFUSED = {"falcon": "FalconForCausalLM", "bloom": "BloomForCausalLM"}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_is_refused_when_it_is_made(family):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "n_head": 2, "num_hidden_layers": 1}
    config = make_families.AutoConfig.for_model(family, **sizes)
    with refused("attn_implementation='longitude'", REFUSED[family]):
        AutoModelForCausalLM.from_config(config, attn_implementation="longitude")
    with refused("attn_implementation='longitude'", REFUSED[family]):
        AutoModelForCausalLM.from_config(config).set_attn_implementation("longitude")


UNPLACED = {"deepseek_v32": "DynamicIndexedLayer", "deepseek_v4": "DeepseekV4Attention", "gptj": "rope_parameters"}
UNPLACED |= {"deepseek_v2": "DeepseekV2Attention"}


@pytest.mark.parametrize("family", UNPLACED)
def test_attention_that_cannot_have_other_positions_is_named(family):
    model = make_families.toy(family)
    with refused(UNPLACED[family], what="set_positions"):
        set_positions(model, "alibi")
    assert getattr(model.config, KEY, None) is None and model(torch.arange(3, 9)[None]).logits.isfinite().all()
