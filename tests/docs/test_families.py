"""The page of families is what its script writes, and what it calls broken is broken in plain transformers as well."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.utils import logging

import make_families
from longitude.check import check

pytestmark = pytest.mark.slow
PAD, LENGTH = 3, 24
"""Tokens of padding, and all tokens."""


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("family", make_families.FAMILIES)
def test_what_check_says_of_a_family_stands_on_the_page(family):
    """Each law that is broken, whatever the version of transformers; and no other family has one."""
    broken = [one.law for one in check(make_families.toy(family)).values() if one.status == "failed"]
    rows = re.findall(rf"^\| `{family}` \| `(\w+)` \|", make_families.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert broken == rows
    assert all((family, law) in make_families.explained() for law in broken)


def positions() -> dict[str, make_families.Positions]:
    rows = [line.split(",") for line in make_families.MATRIX.read_text(encoding="utf-8").splitlines()[1:]]
    return {family: make_families.Positions(*cells[:2]) for family, *cells in rows}


@pytest.mark.parametrize("family", make_families.FAMILIES)
def test_what_extend_makes_of_a_family_stands_in_the_matrix(family):
    assert make_families.extended(family) == positions()[family].extended


def test_the_page_has_the_matrix_and_what_is_written_grows_only():
    text = make_families.PAGE.read_text(encoding="utf-8")
    assert text.endswith("\n".join(make_families.of_positions(positions())) + "\n")
    assert [*positions()] == make_families.FAMILIES
    assert sum(of.extended.startswith("written") for of in positions().values()) >= 118


# ---- the defects, without Longitude --------------------------------------------------------------------------------------
def made(family: str) -> tuple[Any, Tensor, Tensor]:
    """(the toy model, tokens [1, LENGTH], logits of a whole pass)."""
    model = make_families.toy(family)
    tokens = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, tokens, model(input_ids=tokens, use_cache=False).logits


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, in units of how much logits vary."""
    return float((got - want).abs().max() / want.std())


def of(law: str, *without: str) -> list[Any]:
    return [family for family, broken in make_families.explained() if broken == law and family not in without]


@pytest.mark.parametrize("family", of("left_padding"))
def test_padding_on_the_left_changes_a_row(family):
    model, tokens, _ = made(family)
    mask = torch.ones_like(tokens)
    mask[:, :PAD] = 0
    alone = model(input_ids=tokens[:, PAD:], use_cache=False).logits
    assert apart(model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, PAD:], alone) > 0.01


@pytest.mark.parametrize("family", of("cached_decoding", "prophetnet"))
def test_positions_behind_a_cache_are_others_than_in_a_whole_pass(family):
    """Those that the model counts itself, or those that generate() gives it."""
    model, tokens, want = made(family)
    gaps = []
    for at in (None, torch.arange(LENGTH)[None]):
        cache, half, logits = DynamicCache(config=model.config), LENGTH // 2, []
        for start, end in ((0, half), *((one, one + 1) for one in range(half, LENGTH))):
            options = {} if at is None else {"position_ids": at[:, start:end]}
            logits.append(model(input_ids=tokens[:, start:end], cache=cache, use_cache=True, **options).logits)
        gaps.append(apart(torch.cat(logits, 1), want))
    assert max(gaps) > 0.01 and min(gaps) < 1e-4


def test_logits_of_prophetnet_depend_on_how_many_tokens_follow():
    model, tokens, want = made("prophetnet")
    assert apart(model(input_ids=tokens[:, :10], use_cache=False).logits, want[:, :10]) > 0.001
    other = torch.cat([tokens[:, :10], tokens[:, 10:].flip(1)], 1)  # not on which
    assert apart(model(input_ids=other, use_cache=False).logits[:, :10], want[:, :10]) < 1e-4


@pytest.mark.parametrize("family", of("chunked_prefill"))
def test_a_chunk_behind_a_cache_does_not_begin_with_its_state(family):
    model, tokens, want = made(family)
    first = model(input_ids=tokens[:, :8], use_cache=True)
    name = next(name for name in ("cache", "cache_params", "past_key_values") if getattr(first, name, None) is not None)
    second = model(input_ids=tokens[:, 8:], use_cache=True, **{name: getattr(first, name)})
    assert apart(second.logits, want[:, 8:]) > 0.001  # jamba: 0.002


@pytest.mark.parametrize("family", of("cached_keys"))
def test_a_static_cache_that_says_it_can_be_cropped_cannot(family):
    model, tokens, _ = made(family)

    def rest(wrong: int) -> Tensor:
        """Logits of the last tokens behind so many wrong ones, which were taken back."""
        cache = StaticCache(config=model.config, max_cache_len=2 * LENGTH)
        cache.activate_past_recording()
        model(input_ids=tokens[:, : LENGTH // 2], cache=cache, use_cache=True)
        if wrong:
            assert cache.is_croppable
            model(input_ids=tokens[:, :wrong], cache=cache, use_cache=True)
            cache.crop(-wrong)
        parts = tokens[:, LENGTH // 2 :].split(1, 1)
        return torch.cat([model(input_ids=part, cache=cache, use_cache=True).logits for part in parts], 1)

    assert apart(rest(5), rest(0)) > 0.001


@pytest.mark.parametrize("family", of("layer_masks"))
def test_a_window_is_not_applied(family):
    """Of one layer: the first token changes what the last one gives, far beyond the window."""
    config = make_families.toy(family).config
    config.num_hidden_layers = 1
    model = type(make_families.toy(family))(config).eval()
    tokens = torch.arange(5, 5 + LENGTH)[None]
    other = torch.cat([tokens[:, :1] + 1, tokens[:, 1:]], 1)
    assert config.sliding_window < LENGTH // 2
    last = [model(input_ids=one, use_cache=False).logits[:, -1] for one in (tokens, other)]
    assert apart(last[1], last[0]) > 1e-4
