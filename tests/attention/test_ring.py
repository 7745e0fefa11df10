"""One sequence over several processes: attention, our models and a stock Llama are those of one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import MambaConfig, MambaForCausalLM

import longitude as lg
from longitude.models.cache_names import cache_in, named
from tests.ring_processes import LENGTH, every, heads, in_processes, llama, memory, more, ours, quick
from tests.support import refused


@pytest.mark.parametrize(("work", "cases"), [(quick, 10), pytest.param(more, 20, marks=pytest.mark.slow)])
def test_two_processes_are_one(work, cases, tmp_path):
    """Loss, output and gradients of attend, LongitudeForCausalLM and a stock Llama: rope, biases, packed, padded, recomputed."""
    gaps = in_processes(2, work, tmp_path)
    assert len(gaps) == cases
    assert {name: gap for name, gap in gaps.items() if not gap < 1e-12} == {}


@pytest.mark.slow
def test_three_processes_are_one_with_every_encoding(tmp_path):
    gaps = in_processes(3, every, tmp_path)
    assert sum(name.startswith("refused") for name in gaps) < len(gaps) / 3
    assert {name: gap for name, gap in gaps.items() if not gap < 1e-12} == {}


@pytest.mark.slow
def test_no_process_holds_more_than_its_part(tmp_path):
    """Nothing of the whole sequence, in forward or backward: four processes hold a quarter of what one does."""
    found = {}
    for count in (1, 4):
        (folder := tmp_path / str(count)).mkdir()
        found[count] = in_processes(count, memory, folder)["numbers"]
    assert found[4] <= found[1] / 3


# ---- what it is, and refuses, in a group of one ----------------------------------------------------------------------------
@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_parts_of_all_processes_are_the_sequence(alone, monkeypatch):
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(dist, "get_world_size", lambda group, count=count: count)
        share = lg.attention.SequenceSlice(LENGTH)
        parts = [part for rank in range(count) for part in share.parts_of(rank)]
        assert sorted(i for part in parts for i in range(part.start, part.stop)) == [*range(LENGTH)]
        sizes = [share.size(rank) for rank in range(count)]
        assert max(sizes) - min(sizes) <= 2


def test_labels_are_of_the_next_token_and_not_across_documents(alone):
    ids = torch.arange(10)[None]
    cut = lg.models.cut_sequence({"input_ids": ids, "labels": ids, "document_ids": torch.tensor([[0] * 4 + [1] * 6])})
    assert cut["shift_labels"].tolist() == [[1, 2, 3, -100, 5, 6, 7, 8, 9, -100]]
    assert cut["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert int(cut["num_items_in_batch"]) == 8


def test_without_processes_it_is_refused():
    with refused("torch.distributed.init_process_group"):
        lg.attention.SequenceSlice(8)


def sliced(**options):
    q, k, v = heads(LENGTH)
    mask = options.pop("mask", lg.Causal()) & lg.attention.SequenceSlice(LENGTH)
    return lg.attend(q, k, v, mask=mask, **options)


def calls():
    """(call, words): what cannot be right with a slice of a sequence is refused."""
    ids = torch.arange(10)[None]
    cope = lg.encoding("cope", head_dim=8).double()
    yield lambda: sliced(encoding=cope), ("SequenceSlice", "RowBias")
    yield lambda: sliced(dropout=0.1), ("SequenceSlice",)
    yield lambda: sliced(return_weights=True), ("return_weights",)
    yield lambda: sliced(q_positions=0), ("SequenceSlice",)
    yield lambda: sliced(mask=lg.Padding(torch.ones(LENGTH).bool())), ("valid=tensor",)
    yield lambda: sliced(backend="transport"), ("'transport'",)
    yield (
        lambda: sliced(encoding=lg.encoding("self_extend", head_dim=8, layout="half", window=4)),
        ("SequenceSlice", "SelfExtend"),
    )
    yield lambda: lg.attend(*heads(9), mask=lg.Causal() & lg.attention.SequenceSlice(10)), ("10", "0")
    yield lambda: lg.attention.SequenceSlice(1), ("SequenceSlice", "2")
    yield lambda: lg.models.cut_sequence({"labels": ids}), ("input_ids",)
    yield lambda: lg.models.cut_sequence({"input_ids": ids, "position_ids": ids[:, :3]}), ("position_ids", "[1, 3]")
    yield lambda: lg.models.cut_sequence({"input_ids": ids, "past_key_values": 1}), ("past_key_values",)
    cut = lg.models.cut_sequence({"input_ids": ids})
    yield lambda: ours("fox")(**cut), ("FoX",)
    yield lambda: ours("nope", mixer="mamba")(**cut), ("SequenceSlice", "MultiHeadAttention", "WindowAttention")
    yield lambda: ours("alibi", mixer={"name": "chunks", "size": 4})(**cut), ("ChunkAttention",)
    yield lambda: ours("rope")(**cut, use_cache=True), ("use_cache", "SequenceSlice")
    yield lambda: ours("rope")(**cut, labels=ids), ("shift_labels",)
    yield lambda: ours("rope")(**{**cut, "position_ids": 1 + ids}), ("SequenceSlice",)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1))
    yield lambda: mamba(**cut), ("attention_mask",)
    for theirs in ("sdpa", "eager"):
        other = llama()
        other.set_attn_implementation(theirs)
        yield lambda other=other: other(**cut), ("attn_implementation",)
    yield (
        lambda: llama()(**cut, use_cache=True, **named(filled())),
        ("attention_mask", "SequenceSlice", "use_cache=False"),
    )


def filled():
    with torch.no_grad():
        return cache_in(llama()(torch.arange(4)[None], use_cache=True))


def test_a_process_outside_of_the_group_is_refused(alone, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: -1)
    with refused(what="SequenceSlice"):
        lg.attention.SequenceSlice(LENGTH)


def test_what_cannot_be_right_is_refused(alone):
    for call, words in calls():
        with refused(*words):
            call()


def test_second_derivatives_are_refused(alone):
    q, k, v = (x.requires_grad_() for x in heads(LENGTH))
    out = lg.attend(q, k, v, mask=lg.Causal() & lg.attention.SequenceSlice(LENGTH))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_other_mixers_never_take_a_slice_for_a_sequence(alone):
    """Each is told apart by its class, refuses the mask, or gives what it gives without a slice."""
    for name in lg.list_mixers():
        mixer = None
        try:
            mixer = lg.mixer(name, **{"dim": 32, "num_heads": 4, **OPTIONS.get(name, {})}).double()
        except ValueError:
            mixer = lg.mixer(name, dim=32).double()
        x = torch.randn(1, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        try:
            out = mixer(x, mask=lg.Causal() & lg.attention.SequenceSlice(12))
        except ValueError:
            assert not mixer.shares_sequence, name
            continue
        torch.testing.assert_close(out, mixer(x))


OPTIONS = {"window": {"size": 5}, "chunks": {"size": 5}}
