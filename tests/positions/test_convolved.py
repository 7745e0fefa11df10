"""convolutional: transformers' wav2vec 2.0, packed and padded rows, and the sum as a loop."""

import pytest
import torch
from transformers import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PositionalConvEmbedding

import longitude as lg
from longitude.positions.convolved import Convolutional
from tests.support import close, gradients, random, refused


@pytest.mark.parametrize(("kernel", "groups"), [(1, 24), (4, 3), (5, 1), (128, 3)])
def test_equals_wav2vec2(kernel: int, groups: int) -> None:
    sizes = {"hidden_size": 24, "num_conv_pos_embeddings": kernel, "num_conv_pos_embedding_groups": groups}
    theirs = Wav2Vec2PositionalConvEmbedding(Wav2Vec2Config(**sizes)).double()
    ours = Convolutional(24, kernel, groups).double()
    size, direction = theirs.conv.parametrizations.weight.original0, theirs.conv.parametrizations.weight.original1
    ours.load_state_dict({"size": size, "direction": direction, "shift": theirs.conv.bias})
    x = random(2, 11, 24).requires_grad_()
    got, want = ours.embed(x, torch.arange(11)), x + theirs(x)
    close(got, want)
    for mine, of_theirs in zip(
        gradients(got, [x, ours.size, ours.direction, ours.shift]),
        gradients(want, [x, size, direction, theirs.conv.bias]),
        strict=True,
    ):
        close(mine, of_theirs)


def test_written_out() -> None:
    """w = g v / |v|, of each tap; an even kernel has one more token before than after."""
    ours = lg.testing.example("convolutional", kernel=4, groups=2)()
    x, weight = random(1, 7, 16), ours.size * ours.direction / ours.direction.square().sum((0, 1)).sqrt()
    added = torch.zeros_like(x)
    for t in range(7):
        for channel in range(16):
            of_group = slice(channel // 8 * 8, channel // 8 * 8 + 8)
            taps = [weight[channel, :, n] @ x[0, t + n - 2, of_group] for n in range(4) if 0 <= t + n - 2 < 7]
            added[0, t, channel] = sum(taps) + ours.shift[channel]
    close(ours.embed(x, torch.arange(7)), x + torch.nn.functional.gelu(added))


def encoder() -> lg.LongitudeForMaskedLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lg.LongitudeForMaskedLM(lg.LongitudeConfig(**sizes, encoding="convolutional")).double().eval()


@torch.no_grad()
def test_documents_and_padding_are_as_if_alone() -> None:
    model, ids = encoder(), torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    packed = model(ids, document_ids=documents).logits
    close(packed[0], torch.cat([model(ids[:1, :5]).logits[0], model(ids[:1, 5:]).logits[0]]))
    close(packed[1:], model(ids[1:]).logits)
    for mask, real in (([1] * 9 + [0] * 3, slice(0, 9)), ([0] * 3 + [1] * 9, slice(3, 12))):
        padded = model(ids[:1], attention_mask=torch.tensor([mask])).logits
        close(padded[:, real], model(ids[:1, real]).logits)
    assert (model(ids).logits - model(ids.flip(1)).logits.flip(1)).abs().max() > 1e-3  # order counts


def test_padded_rows_compile() -> None:
    model, ids = encoder(), torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    run = torch.compile(lambda ids, mask: model(ids, attention_mask=mask).logits, backend="eager", fullgraph=True)
    close(run(ids, mask), model(ids, attention_mask=mask).logits)


def test_a_decoder_refuses_it() -> None:
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with refused("LongitudeForMaskedLM"):
        lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, encoding="convolutional"))
    with refused("Convolutional", "5", "32"):
        Convolutional(32, groups=5)
