"""Accelerate: a loop of one's own around our models, with accumulated gradients; its state is saved and continued."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import longitude as lg
from tests.support import close

pytestmark = [pytest.mark.slow, pytest.mark.ecosystem]

ROWS = torch.arange(16)[:, None] * torch.arange(1, 10) % 13 + 3


@pytest.fixture(autouse=True)
def _own_state():
    """Accelerate keeps one state for a process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepared(model, **options):
    accelerator = Accelerator(cpu=True, **options)
    optimizer = torch.optim.AdamW(lg.parameter_groups(model, 0.1, 0.01))
    loader = torch.utils.data.DataLoader(ROWS, batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def trained(accelerator, model, optimizer, loader):
    for ids in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(ids, labels=ids, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
    return list(accelerator.unwrap_model(model).parameters())


def test_accumulated_steps_are_those_of_a_plain_loop(model):
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(lg.parameter_groups(plain, 0.1, 0.01))
    for batch in ROWS.split(8):
        sum(plain(ids, labels=ids, use_cache=False).loss / 2 for ids in batch.split(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(trained(*prepared(model, gradient_accumulation_steps=2)), list(plain.parameters()), 1e-5)


def test_a_saved_state_continues(model, tmp_path):
    """A second model from the folder goes on as the first one; nothing in it is a pickle of weights."""
    other = copy.deepcopy(model)
    accelerator, *parts = prepared(model)
    trained(accelerator, *parts)
    accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state" / "model.safetensors").exists()
    wanted = [p.detach().clone() for p in trained(accelerator, *parts)]
    accelerator, *parts = prepared(other)
    accelerator.load_state(str(tmp_path / "state"))
    close([p.detach() for p in trained(accelerator, *parts)], wanted, 1e-6)
