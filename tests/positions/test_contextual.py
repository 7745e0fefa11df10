"""cope, fox, path: the papers' formulas written out, and numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

import longitude as lg


# ---- FoX: Lin et al. 2025, equation 6 ---------------------------------------------------------------------------------------
def test_fox_golden() -> None:
    """A constant forget gate of 0.9; seen from token 3. It is ALiBi with the slope -ln 0.9."""
    encoding = lg.FoX(4, 1).double()
    with torch.no_grad():
        encoding.forget.weight.zero_()
        encoding.forget.bias.fill_(math.log(9))
    context, _ = encoding.context(torch.randn(1, 4, 4, dtype=torch.float64))
    q, k, v = torch.zeros(3, 1, 1, 4, 2, dtype=torch.float64)
    _, weights = lg.attend(q, k, v, encoding=encoding, context=context, return_weights=True)
    bias = (weights[0, 0, 3] / weights[0, 0, 3, 3]).log()
    assert bias.tolist() == pytest.approx([-0.3160815, -0.2107210, -0.1053605, 0], abs=5e-8)
    q, k, v = torch.randn(3, 1, 1, 4, 2, dtype=torch.float64)
    alibi = lg.ALiBi(1, slopes=[-math.log(0.9)])
    fox = lg.attend(q, k, v, encoding=encoding, context=context)
    torch.testing.assert_close(fox, lg.attend(q, k, v, encoding=alibi))


def test_fox_written_out() -> None:
    """D_ij = sum of ln f_l for l = j+1 .. i, added after the scaling."""
    encoding = lg.testing.example("fox")()
    x, (q, k, v) = torch.randn(1, 7, 16, dtype=torch.float64), torch.randn(3, 1, 4, 7, 8, dtype=torch.float64)
    log_f = torch.sigmoid(x @ encoding.forget.weight.T + encoding.forget.bias).log()[0]
    decay = torch.full((4, 7, 7), -math.inf, dtype=torch.float64)
    for i in range(7):
        for j in range(i + 1):
            decay[:, i, j] = log_f[j + 1 : i + 1].sum(0)
    want = (q @ k.mT / 8**0.5 + decay).softmax(-1) @ v
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding, context=encoding.context(x)[0]), want)


def test_fox_sums_in_float32() -> None:
    context, carry = lg.FoX(16, 4).bfloat16().context(torch.randn(1, 7, 16, dtype=torch.bfloat16))
    assert context["forgotten"].dtype == torch.float32
    assert carry.dtype == torch.float64


# ---- CoPE: Golovneva et al. 2024, equations 4 to 7 ---------------------------------------------------------------------------
def test_cope_golden() -> None:
    """Scores of zero open every gate by half: seen from token 3, positions 2, 1.5, 1, 0.5; E reads 0, 1, 2, 3."""
    encoding = lg.CoPE(1, max_position=4).double()
    with torch.no_grad():
        encoding.table.copy_(torch.arange(4.0)[None])
    q, k, v = torch.ones(1, 1, 4, 1).double(), torch.zeros(1, 1, 4, 1).double(), torch.zeros(1, 1, 4, 1).double()
    _, weights = lg.attend(q, k, v, encoding=encoding, return_weights=True)
    added = (weights[0, 0, 3] / weights[0, 0, 3, 3]).log() + 0.5
    assert added.tolist() == pytest.approx([2, 1.5, 1, 0.5], abs=1e-12)


def test_cope_written_out() -> None:
    """z_ij between the two nearest columns of E, scaled like the score, positions clipped to the last."""
    encoding = lg.testing.example("cope", max_position=3)()
    q, k, v = torch.randn(3, 1, 1, 9, 8, dtype=torch.float64)
    scores, want = q[0, 0] @ k[0, 0].T / 8**0.5, torch.zeros(9, 8, dtype=torch.float64)
    for i in range(9):
        row = []
        for j in range(i + 1):
            place = min(sum(torch.sigmoid(scores[i, n]).item() for n in range(j, i + 1)), 2.0)
            low, high = (
                q[0, 0, i] @ encoding.table[:, at].detach() / 8**0.5 for at in (math.floor(place), math.ceil(place))
            )
            row.append(scores[i, j] + low + (high - low) * (place - math.floor(place)))
        want[i] = torch.stack(row).softmax(-1) @ v[0, 0, : i + 1]
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding)[0, 0].detach(), want)


# ---- PaTH: Yang et al. 2025, equations 2 to 4 ---------------------------------------------------------------------------------
def test_path_golden() -> None:
    """Two dimensions, three tokens, seen from the last. In the wrong order of reflections the first score is 0.395."""
    encoding = lg.PaTH(4, 1, 2)
    tensor = {"dtype": torch.float64}
    q = torch.tensor([[0, 0], [0, 0], [1, 2]], **tensor)[None, None]
    k = torch.tensor([[0.5, -1], [1, -1], [0.25, 0.5]], **tensor)[None, None]
    context = {
        "reflection": torch.tensor([[1, 0], [0.6, 0.8], [1, 0]], **tensor)[None, None],
        "strength": torch.tensor([[[1.0, 1.5, 0.5]]], **tensor),
    }
    _, weights = lg.attend(q, k, k, encoding=encoding, context=context, return_weights=True)
    assert weights[0, 0, 2].tolist() == pytest.approx([0.2231513, 0.0972222, 0.6796264], abs=1e-7)
    scores = torch.tensor([-0.325, -1.5, 1.25], **tensor)
    torch.testing.assert_close(weights[0, 0, 2], (scores / 2**0.5).softmax(-1))


def test_path_columns_written_out() -> None:
    """w = l2norm(silu(causal depthwise conv(up(down(x))))), b = 2 sigmoid(linear(x))."""
    encoding = lg.testing.example("path")()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    stream = encoding.up(encoding.down(x)).mT
    taps = encoding.taps.T[:, None]  # [channels, 1, kernel], the newest token last
    mixed = F.conv1d(F.pad(stream, (2, 0)), taps, groups=stream.shape[1])
    w = F.silu(mixed).unflatten(1, (2, 8)).transpose(2, 3)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    context, _ = encoding.context(x)
    torch.testing.assert_close(context["reflection"], w)
    torch.testing.assert_close(context["strength"], 2 * torch.sigmoid(encoding.strength(x)).mT)
    assert context["strength"].min() > 0 and context["strength"].max() < 2


def test_path_of_strength_zero_is_no_position() -> None:
    q, k, v = torch.randn(3, 1, 4, 7, 8, dtype=torch.float64)
    encoding = lg.PaTH(16, 4, 8).double()
    context, _ = encoding.context(torch.randn(1, 7, 16, dtype=torch.float64))
    still = {**context, "strength": 0 * context["strength"]}
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding, context=still), lg.attend(q, k, v))


def test_path_written_out() -> None:
    """q_i H_i ... H_(j+1) k_j with the matrices themselves, heads of keys shared by groups of queries."""
    encoding = lg.testing.example("path")()
    q, x = torch.randn(1, 4, 6, 8, dtype=torch.float64), torch.randn(1, 6, 16, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    context, _ = encoding.context(x)
    w, b = context["reflection"], context["strength"]
    H = torch.eye(8, dtype=torch.float64) - b[..., None, None] * w[..., :, None] * w[..., None, :]
    want = torch.zeros_like(q)
    for h in range(4):
        for i in range(6):
            scores, product = [], torch.eye(8, dtype=torch.float64)
            for j in range(i, -1, -1):
                scores.append(q[0, h, i] @ product @ k[0, h // 2, j] / 8**0.5)
                product = product @ H[0, h // 2, j]
            want[0, h, i] = torch.stack(scores[::-1]).softmax(-1) @ v[0, h // 2, : i + 1]
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding, context=context), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lg.FoX(0, 4), "dim"),
        (lambda: lg.CoPE(8, max_position=0), "max_position"),
        (lambda: lg.PaTH(16, 4, 8, num_kv_heads=0), "num_kv_heads"),
        (lambda: lg.PaTH(16, 4, 8, kernel=0), "kernel"),
        (lambda: lg.FoX(16, 4).context(torch.zeros(1, 7, 15)), r"FoX: expected tokens x \[B, L, 16\], got \[1, 7, 15\]"),
        (lambda: lg.attend(*torch.zeros(3, 1, 6, 7, 8), encoding=lg.FoX(16, 4), context={"forgotten": torch.zeros(1, 4, 7)}),
         "FoX was built for 4 heads, q has 6"),
    ],
)  # fmt: skip
def test_wrong_options(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
