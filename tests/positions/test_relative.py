"""shaw: the paper's sign and order of rows."""

import torch

import longitude as lg


def test_shaw_golden() -> None:
    """Shaw et al. 2018, equations 3 and 4, one dimension, k = 1. With i - j for j - i it would be 1.751972, 2.058749."""
    encoding = lg.Shaw(1, max_distance=1).double()
    with torch.no_grad():
        encoding.key_table.copy_(torch.tensor([[0.1], [0.2], [0.3]]))
        encoding.value_table.copy_(torch.tensor([[0.0], [0.5], [1.0]]))
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(1, 1, 2, 1) for x in ([1, 2], [0.5, -1], [1, 3]))
    out = lg.attend(q, k, v, encoding=encoding, mask=lg.NoMask())
    torch.testing.assert_close(
        out.flatten(), torch.tensor([1.994540, 1.143310], dtype=torch.float64), atol=5e-7, rtol=0
    )


def test_shaw_written_out() -> None:
    """e_ij = q_i . (k_j + K[j - i]) / sqrt(d), o_i = sum_j a_ij (v_j + V[j - i]), clipped at max_distance."""
    encoding = lg.testing.example("shaw", max_distance=3)()
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    j_minus_i = (torch.arange(9) - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    keys, values = encoding.key_table[j_minus_i], encoding.value_table[j_minus_i]
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + keys) / 8**0.5
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    want = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + values)
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding), want)


def test_shaw_without_values() -> None:
    encoding = lg.Shaw(8, values=False)
    assert encoding.key_table.shape == (33, 8) and encoding.value_table is None
    assert [name for name, _ in encoding.named_parameters()] == ["key_table"]
