"""Memory of earlier segments: what a layer saw before, without its gradients."""

import pytest
import torch


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


@pytest.mark.parametrize("spec", ["transformer_xl", "rope", "path_fox", "xpos", "sinusoidal", "fire", "mrope"])
def test_a_segment_with_memory_is_the_end_of_a_whole_pass(build, ids, spec):
    """Hidden states do not depend on what comes later, so remembering all of them changes nothing; gradients stop there."""
    model, x = build(spec), ids(length=14)
    whole = model(x, use_cache=False).logits
    first = model(x[:, :5], output_hidden_states=True)
    second = model(x[:, 5:], memories=first.hidden_states, output_hidden_states=True)
    close(second.logits, whole[:, 5:])
    assert second.past_key_values is None
    third = model(
        x[:, 9:],
        memories=[torch.cat(pair, 1) for pair in zip(first.hidden_states, (h[:, :4] for h in second.hidden_states))],
    )
    close(third.logits, whole[:, 9:])
    kept = [h.detach().requires_grad_() for h in first.hidden_states]
    assert torch.autograd.grad(model(x[:, 5:], memories=kept).logits.sum(), kept, allow_unused=True) == (None,) * len(
        kept
    )
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    padded = model(x, attention_mask=mask, use_cache=False).logits
    first = model(x[:, :5], attention_mask=mask[:, :5], output_hidden_states=True)
    close(model(x[:, 5:], attention_mask=mask, memories=first.hidden_states).logits, padded[:, 5:])


def test_memories_that_cannot_be(build, ids):
    model, x = build("rope"), ids(length=6)
    states = model(x, output_hidden_states=True, use_cache=True)
    for options, message in (
        ({"memories": states.hidden_states[:1]}, "memories: expected 2, one for each layer, got 1"),
        (
            {"memories": states.hidden_states, "past_key_values": states.past_key_values},
            "neither a cache nor position_ids",
        ),
        ({"memories": states.hidden_states, "position_ids": x}, "neither a cache nor position_ids"),
        (
            {"memories": [h[:1] for h in states.hidden_states]},
            r"memory: expected \[2, M, 16\] and no cache, got \[1, 6, 16\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(x, **options)
