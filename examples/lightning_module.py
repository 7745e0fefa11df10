"""A model of Longitude's as a LightningModule: decay for matrices alone, and the loss at a longer length while it trains.

pip install lightning
python examples/lightning_module.py --encoding t5
"""

import argparse

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import longitude as lg


class Decoder(lightning.LightningModule):
    """Next tokens. `model` may be a stock model of transformers, too."""

    def __init__(self, model: torch.nn.Module, lr: float = 0.01, weight_decay: float = 0.1):
        super().__init__()
        self.model, self.lr, self.weight_decay = model, lr, weight_decay
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        loss = self.model(ids, labels=ids, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, ids: Tensor, _: int) -> None:
        self.log("longer", self.model(ids, labels=ids, use_cache=False).loss, batch_size=len(ids))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(lg.parameter_groups(self.model, self.weight_decay, self.lr))


def steps_of_ten(length: int, rows: int = 24) -> Tensor:
    """Sequences [rows, length] that count in steps of 1 to 12, modulo ten."""
    return torch.arange(rows)[:, None] % 12 * torch.arange(1, length + 1) % 10 + 3


def fit(module: Decoder, epochs: int, short: int = 16, long: int = 64, **options: object) -> dict[str, float]:
    """Train at one length, validate at another -> what Lightning logged."""
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(module, *(DataLoader(steps_of_ten(n), batch_size=8, shuffle=n == short) for n in (short, long)))
    return {name: float(value) for name, value in trainer.logged_metrics.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoding", default="alibi")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    lightning.seed_everything(0)
    config = lg.LongitudeConfig(vocab_size=16, hidden_size=64, num_hidden_layers=2, encoding=options.encoding)
    module = Decoder(lg.LongitudeForCausalLM(config))
    logged = fit(module, options.epochs, logger=False, enable_checkpointing=False)
    print(f"{options.encoding}: loss {module.losses[-1]:.3f} at 16 tokens, {logged['longer']:.3f} at 64")


if __name__ == "__main__":
    main()
