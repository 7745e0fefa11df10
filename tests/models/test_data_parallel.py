"""FSDP2 and DDP: two processes with half of a batch each are one with all of it."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import longitude as lg
from tests.models.conftest import mixer_spec

LENGTH, VOCABULARY = 37, 29
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
Gap = tuple[str, float]


def in_processes(count: int, work: Callable[[], Iterator[Gap]], folder: Path) -> dict[str, float]:
    """The gaps that the first of `count` gloo processes finds; all do the same work.

    They are forks of a process that has imported this module once."""
    store, results = folder / "store", folder / "gaps.json"
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_process, (count, work, str(store), str(results)), nprocs=count, start_method="forkserver")
    return json.loads(results.read_text())


def _process(rank: int, count: int, work: Callable[[], Iterator[Gap]], store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    gaps = dict(work())
    if rank == 0:
        Path(results).write_text(json.dumps(gaps))
    dist.destroy_process_group()


def apart(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, over the largest number."""
    largest = max(float(x.abs().max()) for x in want)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) / largest


def summed(gradients: list[Tensor]) -> list[Tensor]:
    """Over the processes."""
    gradients = [x.clone() for x in gradients]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def ours(encoding: str, **options: object) -> lg.LongitudeForCausalLM:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, encoding=encoding, **SHAPE, **options
    )
    return lg.LongitudeForCausalLM(config).double().train()


def data_parallel() -> Iterator[Gap]:
    """FSDP2 and DDP over the rows of a batch: the loss and the gradients of one process, with every encoding and mixer."""
    rank, count = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(VOCABULARY, (2 * count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = [{"encoding": name} for name in lg.list_encodings()]
    labels += [{"encoding": "auto", "mixer": mixer_spec(name)} for name in lg.list_mixers()]
    for options in labels:
        for way in ("FSDP2", "DDP"):
            alone, model = ours(**options).eval(), ours(**options).eval()  # in training some draw places
            want = alone(ids, labels=ids, use_cache=False).loss
            want.backward()
            wrapped: nn.Module = model
            if way == "DDP":
                wrapped = nn.parallel.DistributedDataParallel(model)
            else:
                for block in model.model.layers:
                    fully_shard(block)
                fully_shard(model)
            loss = wrapped(ids[rank::count], labels=ids[rank::count], use_cache=False).loss
            loss.backward()
            (total,) = summed([loss.detach()])
            grads = [p.grad.full_tensor() if way == "FSDP2" else p.grad for p in model.parameters()]  # type: ignore[union-attr]
            wanted = [want.detach(), *(p.grad for p in alone.parameters())]
            yield f"{way} {options}", apart([total / count, *grads], wanted)  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.timeout(900)  # 116 models in two processes
def test_two_processes_are_one(tmp_path):
    gaps = in_processes(2, data_parallel, tmp_path)
    assert len(gaps) == 2 * (len(lg.list_encodings()) + len(lg.list_mixers()))
    assert {name: gap for name, gap in gaps.items() if not gap < 1e-12} == {}
