"""DeepSpeed's ZeRO 3: its hooks give a module its parameters while that module is called, and take them away again."""

import copy
import socket

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
import longitude.hf
from longitude.testing.battery.models import in_calls, language_model, of_attention, token_ids
from longitude.testing.examples import example, mixer_example

# it warns of what it does itself, and as it compiles
pytestmark = [pytest.mark.slow, pytest.mark.ecosystem, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

deepspeed = pytest.importorskip(
    "deepspeed", reason="it is compiled against the torch that is installed; make ecosystem tries"
)
SAME = 1e-5
"""Models are in float32: ZeRO 3 holds no other parameters in full precision."""


@pytest.fixture(scope="module", autouse=True)
def _processes():
    """One process; DeepSpeed compiles its communication when the first one starts, in minutes."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
        for name, value in (places | ranks).items():
            patch.setenv(name, value)
        free.close()
        deepspeed.init_distributed(dist_backend="gloo")
        yield
        dist.destroy_process_group()


@torch.no_grad()
def require_same(model) -> None:
    """Partitioned parameters change no logits, in one call and in three with a cache."""
    ids = token_ids(2, 9)

    def answers(model):
        return model(ids, use_cache=False).logits, in_calls(model, ids, (0, 3, 6, 9), lambda a, b: None)

    model = model.float()
    want = answers(model)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = deepspeed.initialize(model=copy.deepcopy(model), config=config)[0]
    assert not sum(parameter.numel() for parameter in engine.module.parameters())
    for logits, expected in zip(answers(engine.module), want, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=SAME)
    engine.destroy()


@pytest.mark.parametrize("name", lg.list_encodings())
def test_encodings(name):
    require_same(of_attention(example(name)))


@pytest.mark.parametrize("name", lg.list_mixers())
def test_mixers(name):
    require_same(language_model(*[mixer_example(name)] * 2))


@pytest.mark.parametrize("name", ["alibi", "t5", "cope", "fox", "rope:layout=half,learned_frequencies=true"])
def test_stock_models(name):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape)).eval()
    longitude.hf.set_positions(model, name)
    for parameter in model.base_model.longitude_positions.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    require_same(model)
