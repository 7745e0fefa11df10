"""Other libraries do the same work as our encodings. Nothing here is timed."""

import pytest
import torch

import longitude as lg
from longitude.bench.cases import AttentionShape, Inputs
from peers import PEERS, installed

SMALL = AttentionShape(2, 4, 2, 8, 17)


def same_of_ours(name: str, learned: list[torch.Tensor]) -> lg.Encoding:
    """Our encoding with the numbers of a peer."""
    if "T5" in name:
        bias = lg.T5Bias(num_heads=4)
        scale = SMALL.head_dim**0.5 if name.startswith("x-") else 1.0
        with torch.no_grad():
            bias.table.copy_(learned[0] * scale)
        return bias
    if "rotary" in name or "Llama" in name:
        return lg.Rotary(head_dim=8, layout="half" if "Llama" in name else "interleaved")
    return lg.ALiBi(num_heads=4)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_does_the_same_work(peer):
    """The output of attend with our encoding, and its gradients of q, k and v; gradients reach what it has learned."""
    if peer.name not in installed():
        pytest.skip(f"{peer.package} is not installed")
    inputs = Inputs.of(SMALL)
    case, three = peer.case(inputs), [inputs.q, inputs.k, inputs.v]
    learned = list(case.wanted[3:])
    got = case.forward()[0]
    want = lg.attend(*three, encoding=same_of_ours(peer.name, learned))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    gradients = torch.autograd.grad(got, case.wanted, inputs.gradient)
    for theirs, own in zip(gradients, torch.autograd.grad(want, three, inputs.gradient), strict=False):
        torch.testing.assert_close(theirs, own, atol=1e-4, rtol=1e-4)
    assert len(learned) == ("T5" in peer.name)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[3:])
