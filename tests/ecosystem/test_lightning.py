"""Lightning trains our models as any module."""

import pytest
import torch

pytest.importorskip("lightning", reason="the extra `ecosystem` is not installed: make ecosystem")

import lightning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ecosystem,
    # what Lightning asks of torch's pytrees
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch, _):
        loss = self.model(batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def test_it_trains(model, tmp_path):
    rows = torch.arange(12)[:, None] * torch.arange(1, 9)[None] % 10 + 3
    module = Module(model)
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    run = lightning.Trainer(max_epochs=8, accelerator="cpu", default_root_dir=tmp_path, **off)
    run.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    assert len(module.losses) == 24 and sum(module.losses[-3:]) < 0.9 * sum(module.losses[:3])
