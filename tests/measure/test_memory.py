"""Perplexity keeps no logits beyond a chunk: with a vocabulary of 150,000 those of one window would be larger by far."""

import textwrap

import pytest

from longitude.measure.windows import LOGITS
from longitude.runs.machine import can_measure_peak
from tests.support import printed

READING = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from longitude.measure.text import losses_by_length
    from longitude.measure.windows import Bounded
    from longitude.runs.machine import memory_growth

    torch.set_num_threads(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=150_000, max_position_embeddings=4096, **sizes)).eval()
    tokens = torch.randint(0, 150_000, (4097,))

    def read(length):
        losses_by_length(model, [tokens[: length + 1]], lengths=[length], methods=["non-overlapping"],
                         span=length, reader=Bounded(model, 256))

    read(256)  # what is allocated once
    print(*(memory_growth(lambda: read(length)) for length in (256, 1024, 4096)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_measure_peak(), reason="the peak of a process is read from /proc")
def test_logits_of_a_window_are_never_together() -> None:
    """The logits of 4096 tokens are 2.5 GB; what is held is about three times LOGITS numbers, whatever the window's length."""
    short, middle, long = map(int, printed(textwrap.dedent(READING)).split())
    whole = 4 * 150_000 * 4096
    assert long < whole / 5, f"{long / 1e6:.0f} MB of {whole / 1e6:.0f}"
    assert max(short, middle, long) < 4 * 4 * LOGITS
    assert long < 1.5 * middle + 2**26
