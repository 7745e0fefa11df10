"""cope, fox, path, path_fox: the papers' formulas written out, and numbers.

golden/contextual.json holds those of flash-linear-attention and x-transformers; golden/make_contextual.py says how they came.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import longitude as lg
from longitude.positions.contextual import sum_by_doubling
from tests.support import close, golden, random, refused_calls

TABLES = golden("contextual")


def table(group: str, name: str) -> torch.Tensor:
    return torch.tensor(TABLES[group][name], dtype=torch.float64)


def filled(parameter: torch.Tensor, values: torch.Tensor | float) -> None:
    parameter.data.copy_(torch.as_tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("name", ["fox", "path", "path_fox"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_equals_flash_linear_attention(name: str, chunk: int, backend: str) -> None:
    """Its naive forms, in float32, two heads of queries on one of keys; the gate is scaled with reflections alone."""
    q, k, v, w, out = (table("gated", n).transpose(0, 1)[None] for n in ("q", "k", "v", "w", name))
    b, g = (table("gated", n).T[None] for n in ("b", "g"))
    encoding = {
        "fox": lambda: lg.FoX(5, 2),
        "path": lambda: lg.PaTH(5, 2, 3, num_kv_heads=1, chunk_size=chunk),
        "path_fox": lambda: lg.encoding("path_fox", dim=5, num_heads=2, head_dim=3, num_kv_heads=1, chunk_size=chunk),
    }[name]()
    columns = {"path": {"reflection": w, "strength": b}, "fox": {"forgotten": g.cumsum(-1)}}
    context = columns.get(name, columns["path"] | columns["fox"])
    got = lg.attend(q, k, v, encoding=encoding, context=context, backend=backend)
    close(got, out, 2e-6)


def test_fox_equals_x_transformers() -> None:
    encoding = lg.FoX(5, 2).double()
    filled(encoding.forget.weight, table("forgetting", "weight"))
    filled(encoding.forget.bias, table("forgetting", "bias"))
    level = encoding.context(table("forgetting", "x")[None])[0]["forgotten"][0]
    close(level[:, :, None] - level[:, None], table("forgetting", "difference"), 2e-6)


def test_cope_equals_x_transformers() -> None:
    """It adds q . E unscaled."""
    encoding = lg.CoPE(3, max_position=4).double()
    filled(encoding.table, 3**0.5 * table("counted", "table"))
    q, k, added = (table("counted", n)[None] for n in ("q", "k", "added"))
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    want = (q @ k.mT / 3**0.5 + added).masked_fill(ahead, -torch.inf).softmax(-1) @ k
    close(lg.attend(q, k, k, encoding=encoding), want, 2e-6)


# ---- FoX: Lin et al. 2025, equation 6 ---------------------------------------------------------------------------------------
def test_published_fox() -> None:
    """A constant forget gate of 0.9; seen from token 3. It is ALiBi with the slope -ln 0.9."""
    encoding = lg.FoX(4, 1).double()
    filled(encoding.forget.weight, 0)
    filled(encoding.forget.bias, math.log(9))
    context, _ = encoding.context(torch.randn(1, 4, 4, dtype=torch.float64))
    q, k, v = torch.randn(3, 1, 1, 4, 2, dtype=torch.float64)
    _, weights = lg.attend(0 * q, k, v, encoding=encoding, context=context, return_weights=True)
    bias = (weights[0, 0, 3] / weights[0, 0, 3, 3]).log()
    assert bias.tolist() == pytest.approx([-0.3160815, -0.2107210, -0.1053605, 0], abs=5e-8)
    fox = lg.attend(q, k, v, encoding=encoding, context=context)
    close(fox, lg.attend(q, k, v, encoding=lg.ALiBi(1, slopes=[-math.log(0.9)])))


def test_fox_scale_gate() -> None:
    """The difference of levels, times the scale of the scores; an explicit scale, too."""
    encoding = lg.testing.example("fox", scale_gate=True)()
    context, _ = encoding.context(torch.randn(1, 7, 16, dtype=torch.float64))
    q, k, v = torch.randn(3, 1, 4, 7, 8, dtype=torch.float64)
    level, ahead = context["forgotten"], torch.ones(7, 7, dtype=torch.bool).triu(1)
    for scale in (None, 0.7):
        scores = (8**-0.5 if scale is None else scale) * (q @ k.mT + level[..., :, None] - level[..., None, :])
        want = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v
        close(lg.attend(q, k, v, encoding=encoding, context=context, scale=scale), want)


@pytest.mark.parametrize("calls", [[11], [4, 3, 4]], ids=str)
def test_padding_inside_a_document_forgets_nothing(calls: list[int]) -> None:
    """As after a prompt that is padded on the right: tokens have the levels that they have without padding."""
    encoding, x = lg.testing.example("fox")(), random(1, 11, 16)
    documents = torch.tensor([[0, 0, 0, -1, -1, 0, -1, 1, 1, -1, 1]])
    levels, carry, real = [], None, documents[0] >= 0
    for some, marks in zip(x.split(calls, 1), documents.split(calls, 1), strict=True):
        columns, carry = encoding.context(some, carry, marks)
        levels.append(columns["forgotten"])
    want, _ = encoding.context(x[:, real], None, documents[:, real])
    close(torch.cat(levels, -1)[..., real], want["forgotten"])


def test_fox_sums_in_float64() -> None:
    encoding, x = lg.FoX(1, 1), torch.full((1, 60_000, 1), 8.0)
    filled(encoding.forget.weight, 1)
    filled(encoding.forget.bias, 0)
    want = 60_000 * F.logsigmoid(torch.tensor(8.0)).double()
    context, carry = encoding.context(x)
    for level in (carry[0].squeeze(), context["forgotten"][0, 0, -1]):
        close(level, want, 0, 1e-9)


# ---- CoPE: Golovneva et al. 2024, equations 4 to 7 ---------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [[1, 7, 3, 9], [64], [100]], ids=str)
def test_a_sum_by_doubling_begins_again_in_each_document(sizes: list[int]) -> None:
    """Values, and gradients, which stay within a document: those of another may be infinite."""
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[None]
    x, direction = random(2, sum(sizes)).requires_grad_(), random(2, sum(sizes), seed=1)
    ours, want = sum_by_doubling(x, documents), torch.cat([part.cumsum(-1) for part in x.split(sizes, -1)], -1)
    close(ours, want)
    close(torch.autograd.grad(ours, x, direction)[0], torch.autograd.grad(want, x, direction)[0])


def test_published_cope() -> None:
    """Scores of zero open every gate by half: seen from token 3, positions 2, 1.5, 1, 0.5; E reads 0, 1, 2, 3."""
    encoding = lg.CoPE(1, max_position=4).double()
    assert not encoding.table.any()  # at first
    filled(encoding.table, torch.arange(4.0)[None])
    k = torch.zeros(1, 1, 4, 1).double()
    _, weights = lg.attend(k + 1, k, k, encoding=encoding, return_weights=True)
    added = (weights[0, 0, 3] / weights[0, 0, 3, 3]).log() + 0.5
    assert added.tolist() == pytest.approx([2, 1.5, 1, 0.5], abs=1e-12)


# ---- PaTH: Yang et al. 2025, equations 2 to 4 ---------------------------------------------------------------------------------
def test_published_path() -> None:
    """Two dimensions, three tokens, seen from the last. In the wrong order of reflections the first score is 0.395."""
    encoding = lg.PaTH(4, 1, 2).double()
    q, k, w = torch.tensor(
        [[[0, 0], [0, 0], [1, 2]], [[0.5, -1], [1, -1], [0.25, 0.5]], [[1, 0], [0.6, 0.8], [1, 0]]], dtype=torch.float64
    )[:, None, None]
    context = {"reflection": w, "strength": torch.tensor([[[1.0, 1.5, 0.5]]], dtype=torch.float64)}
    _, weights = lg.attend(q, k, k, encoding=encoding, context=context, return_weights=True)
    assert weights[0, 0, 2].tolist() == pytest.approx([0.2231513, 0.0972222, 0.6796264], abs=1e-7)
    scores = torch.tensor([-0.325, -1.5, 1.25], dtype=torch.float64) / 2**0.5
    close(weights[0, 0, 2], scores.softmax(0))


@pytest.mark.parametrize("rank", [32, 4, None])
@pytest.mark.parametrize("kernel", [3, 2, 1])
@pytest.mark.parametrize("size", [1, 1e-4])
def test_path_columns_written_out(rank: int | None, kernel: int, size: float) -> None:
    """w = l2norm(silu(causal depthwise conv(up(down(x))))), b = 2 sigmoid(linear(x)); rank None: one matrix."""
    encoding = lg.testing.example("path", rank=rank, kernel=kernel)()
    assert encoding.up.weight.shape == (16, 16 if rank is None else rank) and encoding.up.bias is None
    x = size * torch.randn(2, 7, 16, dtype=torch.float64)
    stream = encoding.up(encoding.down(x)).mT
    taps = encoding.taps.T[:, None]  # [channels, 1, kernel], the newest token last
    mixed = F.conv1d(F.pad(stream, (kernel - 1, 0)), taps, groups=stream.shape[1])
    w = F.silu(mixed).unflatten(1, (2, 8)).transpose(2, 3)
    context, _ = encoding.context(x)
    close(context["reflection"], w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    close(context["strength"], 2 * torch.sigmoid(encoding.strength(x)).mT)


def test_path_defaults() -> None:
    """As the authors' layer."""
    encoding = lg.PaTH(24, 4, 8)
    shapes = {name: tuple(p.shape) for name, p in encoding.named_parameters()}
    assert shapes == {
        "taps": (3, 32), "down.weight": (32, 24), "up.weight": (32, 32), "strength.weight": (4, 24), "strength.bias": (4,)
    }  # fmt: skip
    torch.manual_seed(1), encoding.reset_parameters(), torch.manual_seed(1)
    close(encoding.taps.detach(), (2 * torch.rand(3, 32) - 1) / 3**0.5, 1e-6)
    assert lg.PaTH(24, 4, 8, num_kv_heads=2).taps.shape == (3, 16)


# ---- PaTH-FoX: Yang et al. 2025 -----------------------------------------------------------------------------------------------
def test_path_fox_is_its_parts() -> None:
    sizes = {"dim": 16, "num_heads": 4, "head_dim": 8}
    path, fox = lg.encoding("path_fox", **sizes)
    assert fox.scale_gate is True and (path.rank, path.kernel, path.chunk_size, path.heads) == (32, 3, 128, 4)
    path, fox = lg.encoding("path_fox", **sizes, num_kv_heads=2, rank=5, kernel=2, chunk_size=7, scale_gate=False)
    assert fox.scale_gate is False and (path.rank, path.kernel, path.chunk_size, path.heads) == (5, 2, 7, 2)


test_wrong_options = refused_calls(
    [
        (lambda: lg.PaTH(16, 4, 8).context(torch.zeros(1, 7, 15)), "PaTH", "[B, L, 16]", "1", "7"),
        (lambda: lg.PaTH(16, 4, 8).context(torch.zeros(7, 16)), "[B, L, 16]", "[7, 16]"),
        (lambda: lg.PaTH(32, 4, 8, num_kv_heads=3), "num_kv_heads", "num_heads=4", "3"),
    ]
)
