"""Schemes that follow the length, in deep models: exact around the original length, or refusing to drift."""

from itertools import pairwise

import pytest
import torch

import longitude as lg

L0 = 8
LISTS = [1.0, 1.1], [2.0, 4.0]
SCHEMES = {
    "dynamic": lambda follow: lg.scaling.DynamicNTK(
        2.0, L0, max_length=None if follow != "declared" else 24, follow=follow
    ),
    "dynamic, steps of 5": lambda follow: lg.scaling.DynamicNTK(
        2.0, L0, max_length=24, follow=follow, step=5 if follow == "row" else None
    ),
    "longrope": lambda follow: lg.scaling.LongRoPE(*LISTS, L0, factor=4.0, follow=follow),
}


def model_of(build, scheme: str, follow: str, layers: int = 4):
    return build({"name": "rope", "scaling": SCHEMES[scheme](follow)}, num_hidden_layers=layers)


def in_pieces(model, x, cuts, **masks) -> torch.Tensor:
    cache, outs = None, []
    for a, b in pairwise(cuts):
        own = {name: mask[:, :b] for name, mask in masks.items()}
        out = model(x[:, a:b], past_key_values=cache, use_cache=True, **own)
        cache = out.past_key_values
        outs.append(out.logits)
    return torch.cat(outs, 1)


@pytest.mark.one_in(7)
@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, L0 - 1, L0, L0 + 1, 13])
@pytest.mark.parametrize("follow", ["declared", "row"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_pass_is_pieces_is_one_by_one(build, ids, scheme, follow, prompt) -> None:
    model, x = model_of(build, scheme, follow), ids(2, 19)
    whole = model(x, use_cache=False).logits
    torch.testing.assert_close(in_pieces(model, x, [0, prompt, *range(prompt + 1, 20)]), whole, atol=1e-10, rtol=0)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    padded = model(x, attention_mask=mask, use_cache=False).logits
    alone = model(x[1:, 3:], use_cache=False).logits
    torch.testing.assert_close(padded[1, 3:], alone[0], atol=1e-10, rtol=0)
    parts = in_pieces(model, x, [0, prompt, 16, 17, 19], attention_mask=mask)
    torch.testing.assert_close(parts[0], padded[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(parts[1, 3:], padded[1, 3:], atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_is_a_plain_rotation_of_its_own_length(scheme) -> None:
    """Each query alone, against keys turned by the frequencies of its length: by hand."""
    scaling = SCHEMES[scheme]("row")
    rope = lg.Rotary(4, "half", scaling=scaling)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 19, 4, generator=generator, dtype=torch.float64)
    rows = []
    for t in range(19):
        length = scaling.length_at(t, 18)
        assert length == t + 1 or t < L0 or "," in scheme or scheme == "longrope"
        theta = lg.rope_frequencies(4, scaling=scaling, length=length)
        angle = torch.arange(t + 1)[:, None] * theta.inverse
        cos, sin = (torch.cat([f(angle), f(angle)], -1) * theta.attention_factor for f in (torch.cos, torch.sin))

        def turned(x, cos=cos, sin=sin):
            a, b = x.chunk(2, -1)
            return x * cos[-x.shape[2] :] + torch.cat([-b, a], -1) * sin[-x.shape[2] :]

        rows.append(lg.attend(turned(q[:, :, t, None]), turned(k[:, :, : t + 1]), v[:, :, : t + 1]))
    torch.testing.assert_close(lg.attend(q, k, v, encoding=rope), torch.cat(rows, 2), atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_the_published_rule_never_drifts(build, ids, scheme) -> None:
    """Exact while nothing changes; where a cached token would have been made otherwise, refused."""
    model, x = model_of(build, scheme, "sequence"), ids(2, 19)
    whole = model(x[:, :L0], use_cache=False).logits
    torch.testing.assert_close(in_pieces(model, x, range(L0 + 1)), whole, atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="prefill again from the start, or pass follow='row' or 'declared'"):
        in_pieces(model, x, [0, *range(L0, 11)])
    beyond = model(x[:, : L0 + 1], use_cache=False).logits
    assert (beyond[:, :L0] - whole).abs().max() > 1e-3  # the published rule changes what was before
    if scheme == "longrope":  # one list beyond: a cache that began there goes on
        long = model(x, use_cache=False).logits
        torch.testing.assert_close(in_pieces(model, x, [0, L0 + 1, *range(L0 + 2, 20)]), long, atol=1e-10, rtol=0)
    else:
        with pytest.raises(ValueError, match="prefill again"):
            in_pieces(model, x, [0, L0 + 1, L0 + 2])


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_nor_after_tokens_were_taken_back(build, ids, scheme) -> None:
    """Cached tokens were made beyond the border: a shorter sequence would have been made otherwise. A refused call leaves
    every layer of the cache as it was."""
    model, x = model_of(build, scheme, "sequence"), ids(1, 14)
    cache = model(x[:, :12], use_cache=True).past_key_values
    cache.crop(L0 - 2 - 12)
    with pytest.raises(ValueError, match="prefill again"):
        model(x[:, L0 - 2 : L0 - 1], past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [L0 - 2] * 4
    cache = model(x[:, :L0], use_cache=True).past_key_values
    for _ in range(2):
        with pytest.raises(ValueError, match="prefill again"):
            model(x[:, L0 : L0 + 1], past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [L0] * 4


@torch.no_grad()
def test_row_with_raw_keys_and_the_published_rule_differ_in_deep_models_only_by_their_rule(build, ids) -> None:
    """The last token of a whole pass: one layer sees the same keys under both rules; two layers do not."""
    x = ids(1, 13)
    for layers, same in ((1, True), (2, False)):
        row, sequence = (
            model_of(build, "dynamic", follow, layers)(x, use_cache=False).logits[:, -1]
            for follow in ("row", "sequence")
        )
        assert torch.allclose(row, sequence, atol=1e-10) == same


def test_save(build, ids, tmp_path) -> None:
    model, x = model_of(build, "dynamic", "row"), ids(2, 14)
    model.save_pretrained(tmp_path)
    loaded = lg.LongitudeForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.encoding == model.config.encoding and loaded.config.encoding["scaling"]["follow"] == "row"
    torch.testing.assert_close(loaded(x).logits, model(x).logits, atol=1e-12, rtol=0)
