"""swin and swin_v2: transformers' attention in a window, and the formulas as loops."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import Swinv2Config
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

import longitude as lg
from longitude.positions.axes import ContinuousBias, SwinTable
from tests.support import by_head, close, gradients, random, refused

GRID = torch.cartesian_prod(torch.arange(3), torch.arange(5))
PLACES = {"q_positions": GRID, "k_positions": GRID}


def scores_of(encoding: lg.Encoding, heads: int = 3, **options) -> torch.Tensor:
    """The bias of all pairs: logarithms of the weights of queries of zeros, up to a number per row."""
    q = torch.zeros(1, heads, 15, 8, dtype=torch.float64)
    weights = lg.attend(q, q, q, encoding=encoding, mask=lg.NoMask(), return_weights=True, **(PLACES | options))[1]
    return weights.log()


def test_equals_swin() -> None:
    theirs = SwinRelativePositionBias(num_heads=3, window_size=(3, 5))
    ours = SwinTable(3, (3, 5)).double()
    with torch.no_grad():
        torch.nn.init.normal_(theirs.relative_position_bias_table)
        ours.table.copy_(theirs.relative_position_bias_table.T)
        close(scores_of(ours), theirs().double().reshape(1, 3, 15, 15).log_softmax(-1), atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("trained", [(0, 0), (2, 4)])
def test_equals_swin_v2(trained: tuple[int, int], backend: str) -> None:
    """In the window of training, and in a larger one. Their coordinates are float32, so they agree as far as that."""
    torch.manual_seed(0)
    theirs = Swinv2SelfAttention(Swinv2Config(), 24, 3, (3, 5), trained).double().eval()
    ours = ContinuousBias(3, trained if any(trained) else (3, 5)).double()
    ours.mlp.load_state_dict(theirs.continuous_position_bias_mlp.state_dict())
    x = random(2, 15, 24)
    q, k, v = (by_head(p(x), 3) for p in (theirs.query, theirs.key, theirs.value))
    q, k = F.normalize(q, dim=-1) * theirs.logit_scale.exp(), F.normalize(k, dim=-1)
    out = lg.attend(q, k, v, encoding=ours, mask=lg.NoMask(), scale=1.0, backend=backend, **PLACES)
    close(out.transpose(1, 2).flatten(2), theirs(x)[0], atol=1e-6)


@pytest.mark.parametrize("name", ["swin", "swin_v2"])
def test_written_out_with_gradients(name: str) -> None:
    """Three axes, causal, each row of the batch at other positions, keys that two heads share; also few pairs far apart."""
    encoding = lg.testing.example(name, sides=(3, 4, 9))()
    positions = torch.randint(0, 3, (2, 7, 3), generator=torch.Generator().manual_seed(0))
    positions[0, 3, 2] = 8
    q, k, v = (random(2, heads, 7, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    offsets = [*itertools.product(*(range(1 - side, side) for side in (3, 4, 9)))]

    def bias(offset: tuple[int, ...]) -> torch.Tensor:
        if name == "swin":
            return encoding.table[:, offsets.index(offset)]
        u = [math.copysign(math.log2(1 + 8 * abs(d) / (w - 1)) / 3, d) for d, w in zip(offset, (3, 4, 9), strict=True)]
        first, _, last = encoding.mlp
        return 16 * (last.weight @ (first.weight @ torch.tensor(u, dtype=torch.float64) + first.bias).relu()).sigmoid()

    want = torch.zeros(2, 4, 7, 8, dtype=torch.float64)
    for row, i in itertools.product(range(2), range(7)):
        biases = torch.stack([bias(tuple((positions[row, i] - positions[row, j]).tolist())) for j in range(i + 1)], -1)
        for head in range(4):
            scores = k[row, head // 2, : i + 1] @ q[row, head, i] / 8**0.5 + biases[head]
            want[row, head, i] = scores.softmax(-1) @ v[row, head // 2, : i + 1]
    tensors = [q, k, v, *encoding.parameters()]
    for backend in ("reference", "chunked"):
        got = lg.attend(q, k, v, encoding=encoding, q_positions=positions, k_positions=positions, backend=backend)
        close(got, want, atol=1e-11)
        for ours, loop in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
            close(ours, loop, atol=1e-10)


def test_a_rotation_of_axes_may_stand_beside_it() -> None:
    """A term of one axis may not: it would not know which number to read."""
    table, rotation = lg.testing.example("swin", sides=(3, 5))(), lg.AxialRotary(8, "half")
    q = random(1, 4, 15, 8)
    together = lg.attend(q, q, q, encoding=[table, rotation], **PLACES)
    turned = rotation.rotate(q, GRID)
    close(together, lg.attend(turned, turned, q, encoding=table, **PLACES))
    with refused("positions", "terms"):
        lg.attend(q, q, q, encoding=[table, lg.ALiBi(4)], **PLACES)


def test_refuses_what_it_has_no_number_for() -> None:
    q = random(1, 2, 15, 8)
    with refused("SwinTable", "distances", "axis 1", "0 .. 4", "swin_v2"):
        lg.attend(q, q, q, encoding=SwinTable(2, (3, 4)).double(), **PLACES)
    for kind in (SwinTable, ContinuousBias):
        assert "sides=(3, 4)" in repr(kind(2, (3, 4)))
        with refused(kind.__name__, "(7,)"):
            kind(2, (7,))
