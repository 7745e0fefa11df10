"""What the backend `triton` takes, refuses and says, without a GPU: the chip is a stand-in."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longitude as lg
from longitude.attention.backends import refuses
from longitude.attention.backends.triton import backend, launch
from longitude.attention.masks import Prefix
from longitude.attention.operation import choose, requests
from longitude.native import gpu as kernels
from longitude.native.gpu import switched_off
from longitude.positions.composed import compose
from tests.attention.backends.one_request import masks, problem
from tests.support import Reads, close, refused

pytest.importorskip("triton", "3.4", reason="the extra gpu, of Linux, is not installed")
APART = {"q_positions": torch.arange(20) * 2, "k_positions": torch.arange(20)}
ANYWHERE = replace(backend.TRITON, devices=None)


def request(**options):
    return problem(20, 20, **{"dtype": torch.float16, **options})[0]


@pytest.mark.parametrize(
    ("r", "why"),
    [
        (lambda: request(dtype=torch.float32), "bfloat16 and float16, not in torch.float32"),
        (lambda: request(dv=129), "head_dim up to 128, not 129"),
        (lambda: request(names="fire+alibi"), "FIRE"),
        (lambda: request(names="fire", **APART), "pass one int p"),
        (lambda: request(names="inkling"), "OffsetVectors"),
        (lambda: request(**APART), "pass one int p"),
        (lambda: request(mask=lg.Causal() & lg.Documents(torch.arange(20) % 2)), "not contiguous"),
        (lambda: request(mask=masks(20)["another order"]), "token order"),
        (lambda: request(mask=Prefix(3) & lg.Documents(torch.arange(20) % 2)), "not contiguous"),
        (lambda: request(mask=lg.Causal() & lg.Padding(torch.arange(20) != 3)), "middle"),
        (lambda: request(mask=lg.Global(torch.tensor([2])) | lg.Window(3)), "joined by &"),
        (lambda: replace(request(), weights=True), "the weights"),
        (lambda: replace(request(), dropout=0.1), "dropout"),
    ],
)
def test_refusals(r, why):
    assert why in refuses(ANYWHERE, r())


def test_without_triton(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert "'longitude[gpu]'" in refuses(ANYWHERE, request())


@pytest.mark.parametrize("names", ["alibi", "sandwich", "t5"])
def test_layers_share_what_no_parameter_decides(names):
    """A fixed bias, and the buckets of a learned one: the first layer computes them, and parameters of a second one count."""
    r, (_, _, _, _, *learned) = problem(20, 20, names=names)
    with Reads() as first:
        backend.inputs_of(r)
    for entries in learned:
        torch.nn.init.normal_(entries)
    with Reads() as second:
        table = backend.inputs_of(r).terms.table
    offsets = torch.arange(-19, 20)
    close(table, r.terms[0].at(offsets).float())
    assert second.operations < 0.8 * first.operations


class Chip:
    """What is asked of the first GPU."""

    def __init__(self, monkeypatch, capability=(8, 0), forward=None):
        backend._not_compiled.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a chip")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(backend, "needs_operator", lambda *tensors: False)
        if forward is not None:
            monkeypatch.setattr(launch, "forward", forward)

    is_cuda = True
    device = torch.device("cpu")
    dtype, shape = torch.float16, (1, 1, 8, 16)


def ask(chip):
    r = request()
    r.q, r.v = chip, chip
    return backend.of_chip(r)


def test_a_kernel_that_does_not_compile_is_said_once(monkeypatch):
    def broken(x):
        raise RuntimeError("no register is left\nand more")

    chip = Chip(monkeypatch, forward=broken)
    with pytest.warns(UserWarning, match="LONGITUDE_BACKENDS=-triton switches it off"):
        why = ask(chip)
    versions = f"torch {torch.__version__}, triton {version('triton')}"
    assert f"do not run on a chip ({versions}): RuntimeError: no register is left" in why and "\n" not in why
    assert ask(chip) == why  # and a second warning would be an error
    backend._not_compiled.cache_clear()


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    """It would fail, and the backend be refused from then on."""
    monkeypatch.setattr(kernels, "captured", lambda device: True)
    chip = Chip(monkeypatch)
    with refused("CUDA"):
        ask(chip)
    monkeypatch.setattr(kernels, "captured", lambda device: False)
    if not torch.cuda.is_available():
        assert ask(chip) is None
    backend._not_compiled.cache_clear()


def test_a_chip_that_is_too_old_is_refused_in_compiled_calls(monkeypatch):
    """Dynamo has to know the answer, without a break of the graph."""
    chip = Chip(monkeypatch, capability=(7, 5))
    assert "8.0" in (why := ask(chip)) and "7.5" in why
    doubled = torch.compile(lambda x: x * 2 if backend.of_device(x.device) else x, fullgraph=True, backend="eager")
    torch.testing.assert_close(doubled(torch.ones(3)), torch.full((3,), 2.0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(backend, "needs_operator", lambda *tensors: True)
    assert ask(chip) == why


@pytest.mark.parametrize(
    ("dtype", "width", "length", "chosen"),
    [
        (torch.bfloat16, 64, 512, ("sdpa", "triton", "triton")),
        (torch.float32, 64, 512, ("sdpa", "sdpa", "reference")),
        (torch.float64, 64, 8192, ("sdpa", "chunked", "chunked")),
        (torch.bfloat16, 192, 8192, ("sdpa", "chunked", "chunked")),
    ],
)
def test_what_auto_takes_on_cuda(dtype, width, length, chosen):
    """Without a bias, with a fixed one and with one that learns."""
    with FakeTensorMode():
        q = torch.empty(1, 4, length, width, device="cuda", dtype=dtype)
        for encoding, name in zip((None, lg.ALiBi(4), lg.T5Bias(4)), chosen, strict=True):
            (part,) = requests(q, q, q, compose(encoding), None, lg.Causal())
            assert choose([part.request], "auto").name == name


def test_blocks_of_every_chip():
    """Those of the nearest generation for chips that come; none for vectors that are too wide."""
    for major in (8, 9, 10, 11, 12, 13):
        for width in (16, 32, 64, 128):
            for several in (False, True):
                blocks = launch.blocks_for(major, width, several)
                assert len(blocks) == len(launch.KERNELS)
                assert blocks[1].Q % blocks[1].K == 0, "diagonals are of squares"
                assert max(max(block.Q, block.K) for block in blocks) <= launch.EDGE
    assert launch.blocks_for(12, 64) == launch.blocks_for(8, 64) == launch.blocks_for(13, 64)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["fox+t5", "fire"])
def test_compiled_calls_have_the_shapes_of_real_ones(names):
    """`torch.compile` and `torch.export` see the operators by these."""
    r, _ = problem(20, 24, names=names, kv_heads=1, dv=24)
    operators = backend.OPERATORS
    x = operators.flat(backend.inputs_of(r))
    torch.library.opcheck(
        operators.forward, x, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    with torch.no_grad():
        out, lse = operators.forward(*x)
        arguments = torch.ones_like(out), None, out, lse, True, *x
        torch.library.opcheck(operators.backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("named", ["triton", "-reference"])
def test_what_cannot_be_switched_off(named, monkeypatch):
    monkeypatch.setenv("LONGITUDE_BACKENDS", named)
    with refused("LONGITUDE_BACKENDS", repr(named)):
        switched_off()


@pytest.mark.slow
@pytest.mark.parametrize(("named", "said"), [("-table, -triton", "switches it off"), ("-tritn", "got tritn")])
def test_switched_off(named, said):
    code = """
import torch, longitude as lg
from longitude.attention.backends.table import backend
backend.DecodingStep.__call__ = None  # a decoded token asks no backend for its refusal
config = lg.LongitudeConfig(
    vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, encoding="alibi", max_position_embeddings=64
)
lg.LongitudeForCausalLM(config).generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3)
q = torch.randn(1, 2, 8, 4)
print(lg.explain(q, q, q, encoding=lg.encoding("alibi", num_heads=2))[1].refusal)
"""
    environment = {**os.environ, "LONGITUDE_BACKENDS": named}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert said in (done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr)
