"""`make bench-decode`: what is timed is a step of the model, and every row has its cache. Nothing here is timed in earnest."""

import pytest
import torch

from decode import Decoder


@pytest.mark.parametrize("label", ["nope+attention", "window:size=4", "retention"])
def test_a_step_is_the_whole_pass_one_token_further(label):
    """Behind each context; and a step behind one leaves the caches of the others alone."""
    decoder = Decoder(label, 40)
    caches = {n: cache for n, (cache, _) in zip((16, 33), decoder.filled((16, 33)), strict=True)}
    for n in (33, 16):
        assert caches[n].get_seq_length() == n
        tokens = torch.cat([decoder.ids[:, :n], decoder.ids[:, :1]], 1)
        with torch.no_grad():
            want = decoder.model(tokens, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(decoder.step(caches[n])(), want, atol=1e-4, rtol=1e-4)
