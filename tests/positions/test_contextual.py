"""cope, fox, path, path_fox: the papers' formulas written out, and numbers.

golden/contextual.json holds those of flash-linear-attention and x-transformers; golden/make_contextual.py says how they came.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import longitude as lg
from tests.support import refused_calls

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "contextual.json").read_text())


def golden(table: str, name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[table][name], dtype=torch.float64)


@pytest.mark.parametrize("name", ["fox", "path", "path_fox"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_equals_flash_linear_attention(name: str, chunk: int, backend: str) -> None:
    """Its naive forms, in float32, two heads of queries on one of keys; the gate is scaled with reflections alone."""
    q, k, v, w, out = (golden("gated", n).transpose(0, 1)[None] for n in ("q", "k", "v", "w", name))
    b, g = (golden("gated", n).T[None] for n in ("b", "g"))
    encoding = {
        "fox": lambda: lg.FoX(5, 2),
        "path": lambda: lg.PaTH(5, 2, 3, num_kv_heads=1, chunk_size=chunk),
        "path_fox": lambda: lg.encoding("path_fox", dim=5, num_heads=2, head_dim=3, num_kv_heads=1, chunk_size=chunk),
    }[name]()
    columns = {"path": {"reflection": w, "strength": b}, "fox": {"forgotten": g.cumsum(-1)}}
    context = columns.get(name, columns["path"] | columns["fox"])
    got = lg.attend(q, k, v, encoding=encoding, context=context, backend=backend)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=0)


def test_fox_equals_x_transformers() -> None:
    encoding = lg.FoX(5, 2).double()
    with torch.no_grad():
        encoding.forget.weight.copy_(golden("forgetting", "weight"))
        encoding.forget.bias.copy_(golden("forgetting", "bias"))
    level = encoding.context(golden("forgetting", "x")[None])[0]["forgotten"][0]
    torch.testing.assert_close(
        level[:, :, None] - level[:, None], golden("forgetting", "difference"), atol=2e-6, rtol=0
    )


def test_cope_equals_x_transformers() -> None:
    """It adds q . E unscaled."""
    encoding = lg.CoPE(3, max_position=4, scaled=False).double()
    with torch.no_grad():
        encoding.table.copy_(golden("counted", "table"))
    q, k, added = (golden("counted", n)[None] for n in ("q", "k", "added"))
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    want = (q @ k.mT / 3**0.5 + added).masked_fill(ahead, -torch.inf).softmax(-1) @ k
    torch.testing.assert_close(lg.attend(q, k, k, encoding=encoding), want, atol=2e-6, rtol=0)


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


def test_fox_scale_gate() -> None:
    """The difference of levels, times the scale of the scores; an explicit scale, too."""
    encoding = lg.testing.example("fox", scale_gate=True)()
    context, _ = encoding.context(torch.randn(1, 7, 16, dtype=torch.float64))
    q, k, v = torch.randn(3, 1, 4, 7, 8, dtype=torch.float64)
    level, ahead = context["forgotten"], torch.ones(7, 7, dtype=torch.bool).triu(1)
    for scale in (None, 0.7):
        scores = (8**-0.5 if scale is None else scale) * (q @ k.mT + level[..., :, None] - level[..., None, :])
        want = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding, context=context, scale=scale), want)
    assert (lg.FoX(16, 4).terms(context)[0].scaled, encoding.terms(context)[0].scaled) == (False, True)


def test_fox_decay_times() -> None:
    """Where x is zero, head h has forgotten all but 1/e after T_h tokens: here 2, 8, 32."""
    encoding = lg.FoX(4, 3, decay_times=(2, 32))
    f = torch.sigmoid(encoding.forget.bias.double())
    torch.testing.assert_close(-1 / f.log(), torch.tensor([2.0, 8.0, 32.0], dtype=torch.float64), atol=2e-5, rtol=0)
    assert lg.FoX(4, 3, decay_times=[2, 2]).forget.bias.tolist() == pytest.approx([-math.log(math.expm1(0.5))] * 3)
    torch.nn.init.zeros_(encoding.forget.bias)
    encoding.reset_parameters()
    assert bool(encoding.forget.bias.ne(0).all())
    torch.manual_seed(0)
    plain, (_, linear) = lg.FoX(4, 3), (torch.manual_seed(0), torch.nn.Linear(4, 3))
    assert torch.equal(plain.forget.bias, linear.bias) and torch.equal(plain.forget.weight, linear.weight)


def test_fox_sums_in_float64() -> None:
    context, carry = lg.FoX(16, 4).bfloat16().context(torch.randn(1, 7, 16, dtype=torch.bfloat16))
    assert context["forgotten"].dtype == carry.dtype == torch.float64
    x = torch.full((1, 60_000, 1), 8.0)
    encoding = lg.FoX(1, 1)
    with torch.no_grad():
        encoding.forget.weight.fill_(1.0)
        encoding.forget.bias.zero_()
    want = 60_000 * torch.nn.functional.logsigmoid(torch.tensor(8.0)).double()
    context, carry = encoding.context(x)
    torch.testing.assert_close(carry.squeeze(), want, atol=0, rtol=1e-9)
    torch.testing.assert_close(context["forgotten"][0, 0, -1], want, atol=0, rtol=1e-9)


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


def test_cope_defaults() -> None:
    encoding = lg.CoPE(8)
    assert encoding.table.shape == (8, 64) and not encoding.table.any()
    assert encoding.max_position == 64 and encoding.scaled is True


@pytest.mark.parametrize("scaled", [True, False])
def test_cope_written_out(scaled: bool) -> None:
    """z_ij between the two nearest columns of E, scaled like the score or not, positions clipped to the last."""
    encoding = lg.testing.example("cope", max_position=3, scaled=scaled)()
    factor = 8**0.5 if scaled else 1.0
    q, k, v = torch.randn(3, 1, 1, 9, 8, dtype=torch.float64)
    scores, want = q[0, 0] @ k[0, 0].T / 8**0.5, torch.zeros(9, 8, dtype=torch.float64)
    for i in range(9):
        row = []
        for j in range(i + 1):
            place = min(sum(torch.sigmoid(scores[i, n]).item() for n in range(j, i + 1)), 2.0)
            low, high = (
                q[0, 0, i] @ encoding.table[:, at].detach() / factor for at in (math.floor(place), math.ceil(place))
            )
            row.append(scores[i, j] + low + (high - low) * (place - math.floor(place)))
        want[i] = torch.stack(row).softmax(-1) @ v[0, 0, : i + 1]
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding)[0, 0].detach(), want)


def test_cope_in_the_dtype_of_queries() -> None:
    """A table of another dtype is read in that of the queries: the scores of a float64 problem stay so."""
    encoding, exact = lg.testing.example("cope")().float(), lg.testing.example("cope")()
    exact.load_state_dict(encoding.state_dict())
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding), lg.attend(q, k, v, encoding=exact))


# ---- PaTH: Yang et al. 2025, equations 2 to 4 ---------------------------------------------------------------------------------
def test_path_golden() -> None:
    """Two dimensions, three tokens, seen from the last. In the wrong order of reflections the first score is 0.395."""
    encoding = lg.PaTH(4, 1, 2).double()
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


@pytest.mark.parametrize("rank", [32, 4, None])
@pytest.mark.parametrize("kernel", [3, 2, 1])
def test_path_columns_written_out(rank: int | None, kernel: int) -> None:
    """w = l2norm(silu(causal depthwise conv(up(down(x))))), b = 2 sigmoid(linear(x)); rank None: one matrix."""
    encoding = lg.testing.example("path", rank=rank, kernel=kernel)()
    assert encoding.up.weight.shape == (16, 16 if rank is None else rank) and encoding.up.bias is None
    assert rank is None or encoding.down.weight.shape == (rank, 16) and encoding.down.bias is None
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    stream = encoding.up(encoding.down(x)).mT
    taps = encoding.taps.T[:, None]  # [channels, 1, kernel], the newest token last
    mixed = F.conv1d(F.pad(stream, (kernel - 1, 0)), taps, groups=stream.shape[1])
    w = F.silu(mixed).unflatten(1, (2, 8)).transpose(2, 3)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    context, _ = encoding.context(x)
    torch.testing.assert_close(context["reflection"], w)
    torch.testing.assert_close(context["strength"], 2 * torch.sigmoid(encoding.strength(x)).mT)
    assert context["strength"].min() > 0 and context["strength"].max() < 2


def test_path_length_of_reflectors() -> None:
    """x / sqrt(|x|^2 + 1e-6): of length one, unless it is next to nothing."""
    encoding = lg.testing.example("path")()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    length = encoding.context(x)[0]["reflection"].norm(dim=-1)
    torch.testing.assert_close(length, torch.ones_like(length), atol=1e-3, rtol=0)
    small = encoding.context(1e-4 * x)[0]["reflection"]
    mixed = F.conv1d(F.pad(encoding.up(encoding.down(1e-4 * x)).mT, (2, 0)), encoding.taps.T[:, None], groups=16)
    mixed = F.silu(mixed).unflatten(1, (2, 8)).transpose(2, 3)
    torch.testing.assert_close(small, mixed / (mixed.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert float(small.detach().norm(dim=-1).max()) < 0.9


def test_path_chunks_and_documents() -> None:
    """The convolution goes on over chunks, and does not reach into another document."""
    encoding, x = lg.testing.example("path")(), torch.randn(2, 9, 16, dtype=torch.float64)
    whole, tail = encoding.context(x)
    first, carry = encoding.context(x[:, :1])
    second, carry = encoding.context(x[:, 1:5], carry)
    third, end = encoding.context(x[:, 5:], carry)
    for name in ("reflection", "strength"):
        torch.testing.assert_close(torch.cat([first[name], second[name], third[name]], 2), whole[name])
    torch.testing.assert_close(end, tail)
    second, _ = encoding.context(x[:, 5:], encoding.context(x[:, :5])[1], torch.zeros(2, 4).long())
    torch.testing.assert_close(
        second["reflection"], whole["reflection"][:, :, 5:]
    )  # without documents all are of number 0
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [3, 3, 3, 3, 3, 3, 3, 3, 2]])
    packed, _ = encoding.context(x, None, documents)
    alone = torch.cat([encoding.context(x[:1, :4])[0]["reflection"], encoding.context(x[:1, 4:])[0]["reflection"]], 2)
    torch.testing.assert_close(packed["reflection"][:1], alone)
    torch.testing.assert_close(packed["reflection"][1:, :, 8:], encoding.context(x[1:, 8:])[0]["reflection"])
    for same in (documents.int(), documents - 4):  # numbers of any width and sign
        torch.testing.assert_close(encoding.context(x, None, same)[0]["reflection"], packed["reflection"])


def test_path_in_bfloat16_reflects_in_float32() -> None:
    context, _ = lg.PaTH(16, 4, 8).bfloat16().context(torch.randn(1, 7, 16, dtype=torch.bfloat16))
    assert {column.dtype for column in context.values()} == {torch.float32}


def test_path_defaults() -> None:
    """As the authors' layer; a cache carries keys past the columns instead of keeping these."""
    torch.manual_seed(0)
    encoding = lg.PaTH(24, 4, 8)
    shapes = {name: tuple(p.shape) for name, p in encoding.named_parameters()}
    assert shapes == {
        "taps": (3, 32), "down.weight": (32, 24), "up.weight": (32, 32), "strength.weight": (4, 24), "strength.bias": (4,)
    }  # fmt: skip
    torch.manual_seed(1), encoding.reset_parameters(), torch.manual_seed(1)
    uniform = (2 * torch.rand(3, 32) - 1) / 3**0.5
    torch.testing.assert_close(encoding.taps.detach(), uniform, atol=1e-6, rtol=0)
    assert lg.PaTH(24, 4, 8, num_kv_heads=2).taps.shape == (3, 16)
    assert "down.weight" not in dict(lg.PaTH(24, 4, 8, rank=None).named_parameters())
    assert encoding.passing_columns == {"reflection", "strength"}
    context, _ = encoding.context(torch.randn(1, 5, 24))
    assert [e.terms(context)[0].chunk for e in (encoding, lg.PaTH(24, 4, 8, chunk_size=5))] == [128, 5]


# ---- PaTH-FoX: Yang et al. 2025 -----------------------------------------------------------------------------------------------
def test_path_fox_is_its_parts() -> None:
    build = lg.testing.example("path_fox")
    encoding = build()
    path, fox = encoding
    assert isinstance(path, lg.PaTH) and isinstance(fox, lg.FoX)
    assert fox.scale_gate is True and (path.rank, path.kernel, path.chunk_size, path.heads) == (32, 3, 128, 2)
    assert lg.encoding("path_fox", dim=16, num_heads=4, head_dim=8).members[0].heads == 4
    other = lg.encoding("path_fox", dim=16, num_heads=4, head_dim=8, rank=5, kernel=2, chunk_size=7, scale_gate=False)
    path, gate = other
    assert (path.rank, path.kernel, path.chunk_size, gate.scale_gate) == (5, 2, 7, False)
    x, q = torch.randn(1, 7, 16, dtype=torch.float64), torch.randn(1, 4, 7, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 7, 8, dtype=torch.float64)
    context, _ = encoding.context(x)
    unreflected = {**context, "strength": 0 * context["strength"]}
    alone = lg.attend(q, k, v, encoding=fox, context={"forgotten": context["forgotten"]})
    torch.testing.assert_close(lg.attend(q, k, v, encoding=encoding, context=unreflected), alone)


test_wrong_options = refused_calls(
    [
        (lambda: lg.FoX(0, 4), "dim"),
        (lambda: lg.CoPE(8, max_position=0), "max_position"),
        (lambda: lg.PaTH(16, 4, 8, num_kv_heads=0), "num_kv_heads"),
        (lambda: lg.PaTH(16, 4, 8, kernel=0), "kernel"),
        (lambda: lg.PaTH(16, 4, 8, rank=0), "rank"),
        (lambda: lg.PaTH(16, 4, 8, chunk_size=0), "chunk_size"),
        (lambda: lg.PaTH(0, 4, 8), "PaTH: expected dim"),
        (lambda: lg.PaTH(16, 0, 8), "num_heads"),
        (lambda: lg.PaTH(16, 4, 0), "head_dim"),
        (lambda: lg.FoX(16, 0), "num_heads"),
        (lambda: lg.FoX(16, 4, decay_times=(0, 5)), r"FoX: expected decay_times\[0\] above 0, got 0"),
        (lambda: lg.FoX(16, 4, decay_times=(5, -1)), r"FoX: expected decay_times\[1\] above 0, got -1"),
        (lambda: lg.FoX(16, 4, decay_times=5), r"FoX: expected decay_times to be \(first, last\) in tokens, got 5"),
        (lambda: lg.FoX(16, 4, decay_times=(5,)), r"decay_times to be \(first, last\)"),
        (lambda: lg.CoPE(0), "head_dim"),
        (lambda: lg.PaTH(16, 4, 8).context(torch.zeros(1, 7, 15)), r"PaTH: expected tokens x \[B, L, 16\], got \[1, 7, 15\]"),
        (lambda: lg.PaTH(16, 4, 8).context(torch.zeros(7, 16)), r"expected tokens x \[B, L, 16\], got \[7, 16\]"),
        (lambda: lg.FoX(16, 4).context(torch.zeros(1, 7, 15)), r"FoX: expected tokens x \[B, L, 16\], got \[1, 7, 15\]"),
        (lambda: lg.attend(*torch.zeros(3, 1, 6, 7, 8), encoding=lg.FoX(16, 4), context={"forgotten": torch.zeros(1, 4, 7)}),
         "FoX was built with num_heads=4, q has 6"),
    ]
)  # fmt: skip
