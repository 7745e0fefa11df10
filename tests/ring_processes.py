"""What tests of a shared sequence run in each of several processes: the same in one process, and how far both are apart."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import longitude as lg
import longitude.hf
from tests.models.conftest import mixer_spec
from tests.support import LargestTensor, built, gradients, heads, random

LENGTH, BATCH, VOCABULARY = 37, 2, 29
KNOWN = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dim": 32, "max_length": 64}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PACKED = torch.tensor([[0] * 11 + [1] * 26, [3] * 25 + [2] * 12])
PADDED = torch.tensor([[0] * 20 + [-1] * 17, [-1] * 9 + [2] * 28])
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


# ---- attend ----------------------------------------------------------------------------------------------------------
def of_attend(label: str, documents: Tensor | None, mask: lg.Mask) -> float:
    """Output, logsumexp, and gradients of q, k, v and of what is learned."""
    encoding = built(label, KNOWN)
    inputs = [x.requires_grad_() for x in heads(LENGTH)]
    learned = [*inputs, *encoding.parameters()]
    alone = mask
    if documents is not None:
        alone = mask & lg.Documents(documents) & lg.Padding(documents >= 0)
    share = lg.attention.SequenceSlice(LENGTH, documents=documents)
    want = [x.where(x.isfinite(), 0.0) for x in lg.attend(*inputs, encoding=encoding, mask=alone, return_lse=True)]
    cut = [share.cut(x, 2) for x in inputs]
    got = [x.where(x.isfinite(), 0.0) for x in lg.attend(*cut, encoding=encoding, mask=mask & share, return_lse=True)]
    loss = sum((x * share.cut(random(*y.shape, seed=7), 2)).sum() for x, y in zip(got, want, strict=True))
    found = summed(list(torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)))  # type: ignore[arg-type]
    wanted = [sum(pair) for pair in zip(*(gradients(x, learned) for x in want), strict=True)]
    return apart([*(x.detach() for x in got), *found], [*(share.cut(x.detach(), 2) for x in want), *wanted])  # type: ignore[list-item]


def attended(labels: tuple[str, ...]) -> Iterator[Gap]:
    for label in labels:
        yield f"attend {label}", of_attend(label, None, lg.Causal())
        yield f"attend {label} packed", of_attend(label, PACKED, lg.Causal())
        yield f"attend {label} padded window", of_attend(label, PADDED, lg.Window(9))


# ---- models ----------------------------------------------------------------------------------------------------------
def of_model(model: nn.Module, packed: bool, padded: bool = False) -> float:
    """Loss, and gradients of all parameters."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, :5] = -100
    if packed:
        batch["labels"][:, 1:][PACKED[:, 1:] != PACKED[:, :-1]] = -100  # which a stock model would predict
        batch["seq_idx"] = PACKED
        batch["position_ids"] = lg.attention.documents.places_of(PACKED)
    if padded:
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [28]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    results = []
    for call in (batch, lg.models.cut_sequence(batch)):
        model.zero_grad()
        loss = model(**call, use_cache=False).loss
        loss.backward()
        results.append(
            [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]
        )
    return apart(summed(results[1]), results[0])


def ours(encoding: str, **options: object) -> lg.LongitudeForCausalLM:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, encoding=encoding, **SHAPE, **options
    )
    return lg.LongitudeForCausalLM(config).double().train()


def llama(encoding: str | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, intermediate_size=40, **SHAPE)
    )
    model.set_attn_implementation("longitude")
    if encoding is not None:
        lg.hf.set_positions(model, encoding)
    model = model.double().train()
    model.loss_function = exact_loss  # transformers' own rounds logits to float32
    return model


def exact_loss(
    logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch=None, **_
) -> Tensor:
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    total = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return total / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def of_llama(label: str | None) -> Iterator[Gap]:
    yield f"llama {label}", of_model(llama(label), packed=False)
    yield f"llama {label} packed", of_model(llama(label), packed=True)


def quick() -> Iterator[Gap]:
    yield from attended(("rope", "t5"))
    yield "attend alibi both directions", of_attend("alibi", PACKED, lg.NoMask())
    checkpointed = ours("t5")
    checkpointed.gradient_checkpointing_enable()
    yield "model t5 packed, recomputed", of_model(checkpointed, packed=True)
    yield from of_llama("alibi")


def more() -> Iterator[Gap]:
    yield from attended(("alibi", "fire", "shaw"))
    for label in ("rope", "alibi", "t5"):
        yield f"model {label}", of_model(ours(label), packed=False)
        yield f"model {label} packed", of_model(ours(label), packed=True)
    yield "model t5 padded", of_model(ours("t5"), packed=False, padded=True)
    for label in (None, "t5"):
        yield from of_llama(label)


def every() -> Iterator[Gap]:
    """Every encoding: equal, or refused."""
    for label in (*lg.list_encodings(), "rope+clipped", "t5+ssmax"):
        try:
            encoding = built(label, {**KNOWN, "window": 5, "chunk_size": 9, "local_size": 3})
            lg.attention.sequence_slice.require_sliceable(encoding)
            yield f"attend {label}", of_attend(label, PACKED, lg.Causal())
        except ValueError as refused:
            if "use one process" not in str(refused):
                raise
            yield f"refused {label}", 0.0
    yield from quick()
    yield from more()
    yield "window model", of_model(ours("alibi", mixer={"name": "window", "size": 7}), packed=True)


# ---- whole sequences, other rows of a batch ----------------------------------------------------------------------------
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


def memory() -> Iterator[Gap]:
    """Numbers behind the largest tensor of a forward and backward pass of attention, for each token of the whole sequence."""
    length = 1024
    share = lg.attention.SequenceSlice(length)
    encoding = built("t5", KNOWN)
    cut = [share.cut(x, 2).requires_grad_() for x in heads(length, batch=1)]
    with LargestTensor() as largest:
        lg.attend(*cut, encoding=encoding, mask=lg.Causal() & share).sum().backward()
    yield "numbers", largest.elements / length
