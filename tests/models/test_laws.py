"""Two laws of encodings in a whole model, over tokens."""

import pytest
import torch

import longitude as lg
from longitude import testing


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", [*lg.list_encodings(), ["rope", "fox"], ["path", "fox"]], ids=str)
def test_model_in_pieces_padded_and_packed(spec) -> None:
    """Laws 3 and 4 in four layers with grouped heads, over tokens: logits and every gradient."""
    config = lg.LongitudeConfig(
        encoding=spec, num_hidden_layers=4, hidden_size=32, num_key_value_heads=2, max_position_embeddings=64
    )
    model = lg.LongitudeForCausalLM(config).double().eval()
    testing.fill(model.model.encodings)
    tokens = torch.randint(0, 256, (2, 17))
    near = {"atol": 1e-8, "rtol": 1e-8}

    with torch.no_grad():
        whole, cache, parts = model(tokens).logits, None, []
        for a, b in ((0, 7), (7, 8), (8, 9), (9, 17)):
            out = model(tokens[:, a:b], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, **near)

        padded = torch.randint(0, 256, (2, 22))
        seen = torch.ones(2, 22, dtype=torch.long)
        padded[0, 5:], seen[0, :5] = tokens[0], 0
        torch.testing.assert_close(model(padded, attention_mask=seen).logits[0, 5:], whole[0], **near)

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    ids = torch.tensor([[0] * 9 + [1] * 8] * 2)
    packed = model(tokens, labels=tokens, document_ids=ids)
    alone = [model(part, labels=part) for part in (tokens[:, :9], tokens[:, 9:])]
    torch.testing.assert_close(packed.logits, torch.cat([a.logits for a in alone], 1), **near)
    mean = (8 * alone[0].loss + 7 * alone[1].loss) / 15  # so many tokens are predicted; a loss is in float32
    torch.testing.assert_close(packed.loss, mean, atol=2e-6, rtol=0)
    torch.testing.assert_close(gradients(packed.loss), gradients(mean), atol=2e-6, rtol=0)
