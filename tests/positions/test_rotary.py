"""rope, axial_rope, mrope and xpos: published numbers, ports of others, closed forms, and what scaling does to a rotation."""

import io
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import longitude as lg
from longitude.positions.rotary import AxialRotary, MultimodalRotary, RotaryTable, XPos
from longitude.positions.scaling import from_dict
from tests.support import close, golden, heads, random, refused, refused_calls

LAYOUTS = ("half", "interleaved")
GOLDEN = golden("rotary")


# ---- rope ------------------------------------------------------------------------------------------------------------
# Su et al. 2021, section 3.4.2, for position 2 and d = 4: angles 2 and 0.02.
@pytest.mark.parametrize(
    ("layout", "x", "want"),
    [
        ("interleaved", [1, 0, 0, 0], [-0.4161468, 0.9092974, 0, 0]),
        ("half", [1, 0, 0, 0], [-0.4161468, 0, 0.9092974, 0]),
        ("interleaved", [0, 0, 0, 1], [0, 0, -0.0199987, 0.9998000]),
        ("half", [0, 1, 0, 0], [0, 0.9998000, 0, 0.0199987]),
    ],
)
def test_published_rotation(layout: str, x: list, want: list) -> None:
    rotated = lg.Rotary(4, layout).rotate(torch.tensor([x], dtype=torch.float64), 2)
    close(rotated[0], torch.tensor(want, dtype=torch.float64), 5e-8)


@pytest.mark.parametrize("row", GOLDEN["rotated"], ids=lambda row: row["source"])
def test_rotations_equal_those_of_other_libraries(row: dict) -> None:
    x, want = torch.tensor(row["x"]), torch.tensor(row["rotated"])
    rope = lg.Rotary(x.shape[-1], "interleaved")
    for rotate in (rope.rotate_queries, rope.rotate_keys):
        close(rotate(x, 0), want, 2e-6)


@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_float32_angles_equal_llama_to_the_bit(base: float, dim: int) -> None:
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_theta=base)
    positions = torch.tensor([[0, 1, 2, 77, 4095, 131_071]])
    cos, sin = (t[0, :, : dim // 2] for t in LlamaRotaryEmbedding(config)(torch.zeros(1), positions))
    table = lg.Rotary(dim, "half", base=base, angle_dtype="float32").prepare(positions[0])
    assert torch.equal(table.cos, cos) and torch.equal(table.sin, sin)
    exact = lg.Rotary(dim, "half", base=base).prepare(positions[0])
    assert 1e-4 < float((table.cos - exact.cos).abs().max()) < 0.1  # what that rounding costs at 131,071


def test_scaling_changes_the_frequencies() -> None:
    x, spec, positions = torch.randn(5, 16, dtype=torch.float64), {"name": "linear", "factor": 4.0}, torch.arange(5)
    for scaling in (spec, from_dict(spec)):
        scaled = lg.Rotary(16, "half", base=500.0, rotary_dim=8, scaling=scaling)
        want = lg.Rotary(16, "half", base=500.0, rotary_dim=8).rotate(x, positions)
        close(scaled.rotate(x, 4 * positions), want, 1e-14)
    assert "factor=4.0" in repr(scaled) and "scaling" not in repr(lg.Rotary(16, "half"))
    rounded = lg.Rotary(16, "half", scaling=spec, angle_dtype="float32").prepare(torch.tensor([400]))
    close(rounded.cos, lg.Rotary(16, "half", angle_dtype="float32").prepare(torch.tensor([100])).cos, 2e-5)


def test_factors_of_scaling() -> None:
    """YaRN, s = 40: cos and sin times 0.1 ln 40 + 1 = 1.3688879; DeepSeek-V2's g(0.707)^2 = 1.5896262 for the scores."""
    yarn, positions = {"name": "yarn", "factor": 40.0, "original_max_length": 4096}, torch.arange(20)
    rope = lg.Rotary(16, "half", scaling=yarn)
    cos, sin = rope.prepare(positions)
    close(torch.hypot(cos, sin), torch.full((20, 8), 1.3688879), 1e-6)
    assert rope.softmax_factor == 1.0
    deepseek = lg.Rotary(16, "half", scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 0.707})
    assert deepseek.softmax_factor == pytest.approx(1.5896262, abs=1e-7)
    close(torch.stack(deepseek.prepare(positions)), torch.stack([cos, sin]) / 1.3688879, 1e-6)


def test_pairs_that_stand_have_no_angle_in_float32_either() -> None:
    whole, part = (lg.Rotary(16, "half", proportion=p, angle_dtype="float32").frequencies().inverse for p in (1, 0.75))
    assert torch.equal(part, torch.cat([whole[:6], torch.zeros(2)]).to(part))


class Faster(lg.Rotary):
    """A rotation of one's own, whose angles follow a number that may change."""

    speed = 1.0

    def frequencies(self, length=None, device=None):
        plain = super().frequencies(length, device)
        return plain._replace(inverse=self.speed * plain.inverse)


def test_frequencies_of_ones_own_are_made_each_time() -> None:
    rope, x = Faster(4, "half"), torch.randn(5, 4, dtype=torch.float64)
    for rope.speed in (1.0, 3.0):
        close(rope.rotate(x, torch.arange(5)), lg.Rotary(4, "half").rotate(x, int(rope.speed) * torch.arange(5)))


def test_angles_follow_an_option_that_is_changed() -> None:
    rope, x, positions = lg.Rotary(4, "half"), torch.randn(5, 4, dtype=torch.float64), torch.arange(5)
    with torch.inference_mode():
        rope.rotate(x, positions)
    rope.base = 50.0
    close(rope.rotate(x, positions), lg.Rotary(4, "half", base=50.0).rotate(x, positions))
    assert not rope.rotate(x, positions).is_inference()
    rope.scaling = lg.scaling.Linear(2.0)
    close(rope.rotate(x, 2 * positions), lg.Rotary(4, "half", base=50.0).rotate(x, positions))
    rope.rotary_dim = 2
    want = lg.Rotary(4, "half", base=50.0, rotary_dim=2, scaling=rope.scaling)
    close(rope.rotate(x, positions), want.rotate(x, positions))
    rope.proportion = 0.0001
    close(rope.rotate(x, positions), x)


def test_a_model_loaded_on_another_device_rotates_on_the_cpu() -> None:
    """A pickle may move every tensor; "meta" stands for an accelerator."""
    rope, x, file = lg.Rotary(4, "half"), torch.randn(5, 4, dtype=torch.float64), io.BytesIO()
    want = rope.rotate(x, torch.arange(5))
    torch.save(rope, file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    assert torch.equal(loaded.rotate(x, torch.arange(5)), want)


# ---- axial_rope and mrope --------------------------------------------------------------------------------------------
def angles_of(rope: lg.Rotary, *coordinates: int) -> list[float]:
    """The angles at one position, up to whole rotations."""
    cos, sin = rope.prepare(torch.tensor([coordinates]), dtype=torch.float64)
    return torch.atan2(sin, cos)[0].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_axial_angles(layout: str) -> None:
    """Qwen2-VL's vision tower: d = 16, phi = 1, 0.1, 0.01, 0.001, (h, w) = (2, 5); and three axes, phi = 1, 0.1."""
    want = [2, 0.2, 0.02, 0.002, 5 - 2 * np.pi, 0.5, 0.05, 0.005]
    assert angles_of(AxialRotary(16, layout), 2, 5) == pytest.approx(want, abs=1e-12)
    three = AxialRotary(12, layout, axes=3, base=100.0)
    assert angles_of(three, 1, 2, 3) == pytest.approx([1, 0.1, 2, 0.2, 3, 0.3], abs=1e-12)


@pytest.mark.parametrize("make", [AxialRotary, MultimodalRotary])
def test_shapes_of_positions(make) -> None:
    """[L], [B, L] and [B, L, 1] stand on the diagonal; [L, axes] and [B, L, axes] have each coordinate."""
    rope, x = make(24, "half"), torch.randn(2, 3, 5, 24)
    n = rope.axes
    line = torch.arange(5) + torch.tensor([[0], [40]])
    diagonal = line[..., None].expand(2, 5, n)
    want = rope.rotate(x, diagonal)
    for positions in (line, line[..., None]):
        close(rope.rotate(x, positions), want, 0)
    for positions in (line[0], diagonal[0], 0):
        close(rope.rotate(x[:1], positions), want[:1], 0)
    grid = torch.stack([line + 7 * axis for axis in range(n)], -1)
    rows = torch.cat([rope.rotate(x[b : b + 1], grid[b]) for b in range(2)])
    close(rope.rotate(x, grid), rows, 0)
    assert not torch.allclose(rows, want, atol=0.1)
    for wrong in ([2, 5, n + 1], [2, 5, n, 1], []):
        with refused(f"[B, L, {n}]", what=type(rope).__name__, got=str(wrong)):
            rope.prepare(torch.zeros(wrong, dtype=torch.long))


def test_default_sections_are_the_published_ones() -> None:
    """Qwen2-VL 16:24:24 of 64 pairs; Qwen3-VL 24:20:20. Time takes what division leaves."""
    kinds = {
        "contiguous": {128: (16, 24, 24), 32: (4, 6, 6), 24: (4, 4, 4), 8: (2, 1, 1), 2: (1, 0, 0)},
        "interleaved": {128: (24, 20, 20), 32: (6, 5, 5), 24: (6, 3, 3), 8: (2, 1, 1), 2: (1, 0, 0)},
    }
    for arrangement, wanted in kinds.items():
        for head_dim, sections in wanted.items():
            assert MultimodalRotary(head_dim, "half", arrangement=arrangement).sections == sections
    assert MultimodalRotary(64, "half", rotary_dim=32).sections == (4, 6, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ["contiguous", "interleaved"])
def test_text_is_rope_to_the_bit(arrangement: str, layout: str) -> None:
    x = torch.randn(1, 2, 9, 32)
    for options in ({}, {"rotary_dim": 16, "base": 500.0}, {"scaling": {"name": "linear", "factor": 2.0}}):
        mrope = MultimodalRotary(32, layout, arrangement=arrangement, **options)
        want = lg.Rotary(32, layout, **options).rotate(x, 1000)
        for positions in (1000, torch.arange(1000, 1009)[:, None].expand(-1, 3)):
            assert torch.equal(mrope.rotate(x, positions), want)


# ---- xpos ------------------------------------------------------------------------------------------------------------
LAST = 131_071


def magnitude(table: RotaryTable) -> torch.Tensor:
    return torch.hypot(table.cos, table.sin)


# Sun et al. 2022, with gamma = 0.4: zeta of the first and the last pair, and its root for scale_base = 512.
@pytest.mark.parametrize(
    ("head_dim", "zeta", "root"),
    [(4, [0.2857143, 0.6428571], [0.9975562, 0.9991374]), (64, [0.2857143, 0.9776786], [0.9975562, 0.9999559])],
)
def test_published_xpos_magnitudes(head_dim: int, zeta: list, root: list) -> None:
    tables = XPos(head_dim, "half").prepare(torch.tensor([1, 512]), dtype=torch.float64)
    want = torch.tensor([root, zeta], dtype=torch.float64)
    close(magnitude(tables.queries)[:, [0, -1]], want, 5e-8)
    close(magnitude(tables.keys)[:, [0, -1]], 1 / want, 5e-7)


@pytest.mark.parametrize("row", GOLDEN["xpos"], ids=lambda row: f"{row['source']}-{row['scale_base']}")
def test_xpos_scores_equal_those_of_other_libraries(row: dict) -> None:
    q, k, want = (torch.tensor(row[name]) for name in ("q", "k", "scores"))
    order = {"interleaved": [*range(q.shape[-1])], "half": [*range(0, q.shape[-1], 2), *range(1, q.shape[-1], 2)]}
    for layout, pairs in order.items():
        xpos = XPos(q.shape[-1], layout, scale_base=row["scale_base"])
        close(xpos.rotate_queries(q[..., pairs], 3) @ xpos.rotate_keys(k[..., pairs], 3).mT, want, 5e-6)


def closed_form(q: np.ndarray, k: np.ndarray, n: int, m: int, layout: str, scale_base: float, gamma: float) -> float:
    """Sum over pairs of zeta^((n - m)/scale_base) times rope's score, in plain numpy."""
    pairs = len(q) // 2
    first = np.arange(0, 2 * pairs, 2) if layout == "interleaved" else np.arange(pairs)
    second = first + (1 if layout == "interleaved" else pairs)
    angle = (n - m) * 10_000.0 ** (-np.arange(pairs) / pairs)
    zeta = (np.arange(pairs) / pairs + gamma) / (1 + gamma)
    dot, cross = q[first] * k[first] + q[second] * k[second], q[second] * k[first] - q[first] * k[second]
    return float((zeta ** ((n - m) / scale_base) * (dot * np.cos(angle) - cross * np.sin(angle))).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("scale_base", "gamma"), [(512, 0.4), (100.0, 0.1), (2048, 3.0)])
def test_xpos_scores_equal_the_closed_form_anywhere(layout: str, scale_base: float, gamma: float) -> None:
    """Through the tables of the query's block, from near and far; and where no length is given."""
    q, k = np.random.default_rng(0).normal(size=(2, 8))
    xpos, x = XPos(8, layout, scale_base=scale_base, gamma=gamma), torch.tensor(np.stack([q, k]))[:, None, None, None]
    block = xpos.length_at(0, 0)
    for n in (0, 1, block - 1, block, block + 1, 5000, 100_003, LAST):
        for m in {n, n - 1, n - 7, n - 700, n - block, n // 2, 0}:
            if m < 0:
                continue
            want = pytest.approx(closed_form(q, k, n, m, layout, scale_base, gamma), abs=2e-9)  # float64 at 131,071
            length = xpos.length_at(n, LAST)
            rotated_q = xpos.queries(x[0], xpos.prepare(torch.tensor([n]), length, torch.float64))
            rotated_k = xpos.keys(x[1], xpos.prepare(torch.tensor([m]), length, torch.float64))
            assert float((rotated_q * rotated_k).sum()) == want
            if (scale_base, n) == (512, 5000):
                assert float((xpos.rotate_queries(x[0], n) * xpos.rotate_keys(x[1], m)).sum()) == want


def test_blocks_of_xpos() -> None:
    """The length is the end of the query's block, whatever the newest key: decoding sees the tables of a whole pass."""
    xpos = XPos(8, "half")
    half = int(math.log(16) * 512 / math.log(1.4 / 0.4))  # where zeta_0 is about to fall to 1/16
    assert xpos.length_at(0, 0) == xpos.length_at(2 * half - 1, 10**6) == 2 * half
    query = torch.tensor([[0, 2 * half - 1, 2 * half, LAST]])
    assert torch.equal(xpos.length_at(query, query), (query // (2 * half) + 1) * 2 * half)
    assert XPos(8, "half", scale_base=1e-9).length_at(5, 5) == 6  # never an empty block
    assert XPos(8, "half", gamma=1e300).length_at(LAST, LAST) == 2**41  # nor one that no int64 holds


@pytest.mark.parametrize(("scale_base", "gamma"), [(512, 0.4), (37.5, 0.4), (512, 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_xpos_overflows_at_no_position(dtype: torch.dtype, scale_base: float, gamma: float) -> None:
    """Queries and keys at all of 0 .. 131,071 by the tables of any block: finite, and those that meet no larger than 16."""
    xpos = XPos(4, "interleaved", scale_base=scale_base, gamma=gamma).to(dtype)
    positions = torch.arange(0, LAST + 1, 257)
    x = torch.full((1, 1, len(positions), 4), 30.0, dtype=dtype)
    for n in (0, 5000, 100_003, LAST):
        end = xpos.length_at(n, LAST)
        tables = xpos.prepare(positions, end, dtype)
        assert bool(xpos.queries(x, tables).isfinite().all()) and bool(xpos.keys(x, tables).isfinite().all())
        assert max(float(magnitude(table).max()) for table in tables) < 16.01
        for table in xpos.prepare(torch.arange(end - xpos.length_at(0, 0), end), end, dtype):
            assert 1 / 16.1 < float(magnitude(table).min()) < 0.1 < 10 < float(magnitude(table).max()) < 16.01


def test_xpos_without_a_length_takes_positions_that_fit_the_dtype() -> None:
    """Magnitudes up to the root of the greatest number; float64 reaches beyond 131,071."""
    x, xpos = torch.ones(1, 4), XPos(4, "half")
    for dtype, reach in ((torch.float16, 2266), (torch.bfloat16, 18_129), (torch.float32, 18_130)):
        assert bool(xpos.rotate_keys(x.to(dtype), reach - 1).isfinite().all())
        with refused("XPos", str(dtype), f"0 .. {reach - 1}"):
            xpos.rotate_keys(x.to(dtype), reach)
    assert bool(xpos.rotate_keys(x.double(), LAST).isfinite().all())


# ---- what is refused -------------------------------------------------------------------------------------------------
AT = torch.tensor
test_wrong_options = refused_calls(
    [
        (lambda: lg.Rotary(7, "half"), "rope", "rotary_dim"),
        (lambda: lg.Rotary(8, "half", rotary_dim=10), "head_dim=8", "10"),
        (lambda: lg.Rotary(8, "half").rotate(torch.zeros(2, 6), 0), "[B, H, L, 8]", "[1, 1, 2, 6]"),
        (lambda: lg.Rotary(8, "half").prepare(AT(3)), "Rotary", "[L]", "[B, L]", "[B, L, 1]"),
        (lambda: lg.Rotary(8, "half").prepare(torch.zeros(2, 3, 2).long()), "[B, L]", "[B, L, 1]", "[2, 3, 2]"),
        (lambda: AxialRotary(14, "half"), "multiple", "AxialRotary", "head_dim", "4"),
        (lambda: MultimodalRotary(16, "half", sections=[2, 3, 4]), "rotary_dim", "8", "[2, 3, 4]"),
        (lambda: MultimodalRotary(16, "half", sections=[9, 0, -1]), "rotary_dim", "2", "8", "[9, 0, -1]"),
        (lambda: MultimodalRotary(16, "half", sections=[2, 3, 3], arrangement="interleaved"), "3", "2"),
    ]
)


# ---- learned frequencies ---------------------------------------------------------------------------------------------
def test_learned_frequencies_are_the_module_of_transformers():
    """cos, sin and the gradient of alpha, at positions past any training; theirs has angles in float32."""
    pytest.importorskip("transformers.models.mistral_large4", reason="transformers is older than the model")
    from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(head_dim=16, max_position_embeddings=64, rope_parameters=parameters)
    theirs, ours = MistralLarge4TextRotaryEmbedding(config), lg.Rotary(16, "half", 500.0, learned_frequencies=True)
    assert ours.alpha.tolist() == theirs.alpha.tolist() == [0.0] * 8
    drawn = random(8, dtype=torch.float32) / 4
    for module in (ours, theirs):
        module.load_state_dict({"alpha": drawn})
    positions = torch.tensor([[0, 1, 2, 63, 64, 130]])
    want, got = theirs(drawn, positions), ours.prepare(positions)
    direction = random(1, 1, 6, 8, seed=4, dtype=torch.float32)
    for mine, other in zip(got, want, strict=True):
        close(mine[:, 0], other[..., :8], 2e-5)
        [mine] = torch.autograd.grad((mine * direction).sum(), ours.alpha, retain_graph=True)
        [other] = torch.autograd.grad((other[..., :8] * direction[:, 0]).sum(), theirs.alpha, retain_graph=True)
        close(mine, other, 2e-3)  # an angle's rounding, times the angle


@pytest.mark.parametrize("scaling", [None, lg.scaling.YaRN(8, 64), lg.scaling.Linear(2.0)], ids=str)
def test_alpha_of_zero_changes_nothing_and_multiplies_what_is_scaled(scaling):
    learned, plain = (lg.Rotary(16, "half", scaling=scaling, learned_frequencies=b) for b in (True, False))
    close(learned.frequencies().inverse.detach(), plain.frequencies().inverse)
    torch.nn.init.constant_(learned.alpha, math.log(3.0))
    close(learned.frequencies().inverse.detach(), 3 * plain.frequencies().inverse, 1e-6)
    assert learned.learned and not learned.shared and plain.shared and not plain.state_dict()


def test_gradients_of_frequencies_count_from_the_middle_of_a_grid():
    """They are those of the angles p theta, whatever the center: scores depend on offsets alone."""
    grid = lg.AxialRotary(16, "half", mixed=True, num_kv_heads=2).double()
    places = torch.tensor([[0, 0], [0, 9], [2, 0], [7, 3], [5, 5]])[None] + 100
    q, k = random(1, 2, 5, 16), random(1, 2, 5, 16, seed=1)
    (learned,) = grid.parameters()
    got = lg.attend(q, k, k, encoding=grid, q_positions=places, k_positions=places)
    tables = grid.prepare(places, dtype=torch.float64)
    want = lg.attend(grid.queries(q, tables), grid.keys(k, tables), k)
    gradients = (torch.autograd.grad((y * random(*got.shape, seed=2)).sum(), learned)[0] for y in (got, want))
    close(got, want, 1e-12)
    close(*gradients, 1e-9)


# ---- mixed frequencies of two axes -----------------------------------------------------------------------------------
def mixed(kv_heads=2, layout="interleaved", **options):
    torch.manual_seed(0)
    return AxialRotary(16, layout, mixed=True, num_kv_heads=kv_heads, **options)


@pytest.mark.parametrize("batched", [False, True])
def test_mixed_frequencies_are_the_products_of_the_paper(batched: bool) -> None:
    """Heo et al. 2024, equation 14: pairs as complex numbers times e^(i (u p_x + v p_y)); with gradients of u, v, q and k."""
    own = mixed().double()
    x = random(2, 4, 6, 16).requires_grad_(), random(2, 2, 6, 16, seed=1).requires_grad_()
    grid = torch.tensor([[0, 0], [0, 1], [2, 0], [7, 3], [300, 41], [5, 5]])
    places = torch.stack([grid, grid.flip(-1) + 3]) if batched else grid
    inputs = *x, own.theta
    got = lg.attend(*x, x[1], encoding=own, q_positions=places, k_positions=places, mask=lg.NoMask())
    u, v = own.theta[:, None] if batched else own.theta  # [heads, pairs]
    turn = torch.exp(1j * (places[..., None, :, :1] * u[..., None, :] + places[..., None, :, 1:] * v[..., None, :]))
    q, k = (torch.view_as_complex(one.unflatten(-1, (-1, 2))) for one in (x[0], x[1].repeat_interleave(2, 1)))
    q, k = q * turn.repeat_interleave(2, -3), k * turn.repeat_interleave(2, -3)
    want = (torch.einsum("bhic,bhjc->bhij", q, k.conj()).real / 4).softmax(-1) @ x[1].repeat_interleave(2, 1)
    close(got, want, 1e-11)
    direction = random(*got.shape, seed=3)
    for mine, other in zip(*(torch.autograd.grad(y, inputs, direction) for y in (got, want)), strict=True):
        close(mine, other, 1e-8)


def test_mixed_frequencies_start_as_those_of_the_axes_turned() -> None:
    """Each head by one angle: pairs k of both halves are at right angles, as long as the axial frequency."""
    u, v = mixed(base=10.0).theta.detach().double()
    axial = AxialRotary(16, "half", base=10.0).frequencies().inverse[:4]
    close((u**2 + v**2).sqrt(), axial.repeat(2).expand(2, 8), 1e-6)
    close(u[:, :4] * u[:, 4:] + v[:, :4] * v[:, 4:], torch.zeros(2, 4).double(), 1e-6)
    angles = torch.atan2(v, u)
    close(angles[:, :4], angles[:, :1].expand(2, 4), 1e-6)
    assert (angles[0, 0] - angles[1, 0]).abs() > 1e-2


def test_mixed_options_that_do_not_go_together() -> None:
    for options in ({"axes": 4}, {"kv_heads": None}):
        with refused(what="AxialRotary"):
            mixed(**options)
    with refused(what="AxialRotary", got="[1, 3, 5, 16]"):
        mixed().rotate(torch.zeros(1, 3, 5, 16), 0)


# ---- values that rotate ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scaling", [None, lg.scaling.YaRN(8, 64)], ids=str)  # YaRN's has a factor of cos and sin
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotated_values_turn_by_the_offset_of_key_and_query(layout, scaling):
    """o_i = sum_j a_ij R_(j - i) v_j, the weights those of RoPE, in plain complex numbers; wherever the sequence begins."""
    options = {"rotary_dim": 6, "scaling": scaling}
    turning, plain = lg.Rotary(8, layout, **options, rotate_values=True), lg.Rotary(8, layout, **options)
    (q, k, v), places = heads(9), torch.arange(9)
    _, a = lg.attend(q, k, v, encoding=plain, return_weights=True)
    first, second = ([0, 1, 2], [3, 4, 5]) if layout == "half" else ([0, 2, 4], [1, 3, 5])
    pairs = torch.complex(v[..., first], v[..., second]).repeat_interleave(2, 1)
    angles = (places[None] - places[:, None])[..., None] * plain.frequencies().inverse
    turned = torch.einsum("bhij,ijc,bhjc->bhic", a.to(pairs.dtype), torch.polar(torch.ones_like(angles), angles), pairs)
    for start in (0, 1000):
        at = {"q_positions": start, "k_positions": start}
        out, weights = lg.attend(q, k, v, encoding=turning, return_weights=True, **at)
        close(weights, a, 1e-11)
        close(torch.complex(out[..., first], out[..., second]), turned, 1e-11)
        close(out[..., 6:], a @ v.repeat_interleave(2, 1)[..., 6:], 1e-11)  # the part of a head that does not rotate


def test_rotated_values_are_those_of_deepseek_v4():
    """Its attention from norms to the output projection: one head of keys, which are the values, a window and sinks."""
    pytest.importorskip("transformers.models.deepseek_v4", reason="transformers is older than the model")
    from transformers.models.deepseek_v4 import DeepseekV4Config, modeling_deepseek_v4 as v4

    config = DeepseekV4Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=16, q_lora_rank=8, o_groups=2,
        o_lora_rank=8, layer_types=["sliding_attention"], sliding_window=5, partial_rotary_factor=0.5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer, seen = v4.DeepseekV4Attention(config, 0), {}
    for name, parameter in layer.named_parameters():
        parameter.data = random(*parameter.shape, seed=len(name), dtype=torch.float32)
    layer.q_b_norm.register_forward_hook(lambda _, args, out: seen.update(q=out))
    layer.kv_norm.register_forward_hook(lambda _, args, out: seen.update(kv=out[:, None]))
    layer.o_a_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    x, places = random(2, 11, 32, dtype=torch.float32), torch.arange(11)[None] + 7
    allowed = lg.Window(5).allowed(torch.arange(11), torch.arange(11)) & lg.Causal().allowed(places[0], places[0])
    tables = v4.DeepseekV4RotaryEmbedding(config)(x, places, "main")
    hidden = torch.where(allowed, 0.0, -torch.inf)[None, None]
    layer(x, {"main": tables}, position_ids=places, attention_mask=hidden)
    q, kv = (seen[name].roll(8, -1) for name in ("q", "kv"))  # the part that rotates stands last there
    rope, sink = lg.Rotary(16, "interleaved", rotary_dim=8, rotate_values=True), lg.LearnedSink(4)
    sink.load_state_dict({"logits": layer.sinks.detach()})
    for backend in ("auto", "reference"):
        at = {"q_positions": 7, "k_positions": 7, "mask": lg.Causal() & lg.Window(5), "backend": backend}
        out = lg.attend(q, kv, kv, encoding=[rope, sink], **at).roll(8, -1)
        close(out.transpose(1, 2).reshape(2, 11, 64), seen["out"].reshape(2, 11, 64), 2e-6)


@pytest.mark.parametrize("mixer", ["latent", "hierarchical", "performer"])
def test_mixers_whose_values_have_no_position_refuse_to_rotate_them(mixer):
    rope = {"name": "rope", "rotate_values": True}
    sizes = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="Rotary"):
        lg.LongitudeForCausalLM(lg.LongitudeConfig(**sizes, mixer=mixer, encodings=[rope]))
    with pytest.raises(ValueError, match="Rotary"):
        lg.Composed([lg.ReRoPE(8, "half", window=4), lg.Rotary(8, "half", rotate_values=True)])
