"""A LightningCLI program; the configuration file brings the offload.

    python examples/lightning_cli.py fit --config configs/lightning_single.yaml
    python examples/lightning_cli.py fit --config configs/lightning_ddp.yaml
    python examples/lightning_cli.py fit --config configs/lightning_single.yaml --model.width=1024

Needs jsonargparse: pip install 'jsonargparse[signatures]'. A fit under one of tidegate's strategies ends with 0 only if
something moved.
"""

from __future__ import annotations

import sys

import lightning as L
import torch
from corpus import StandardLibrary
from lightning.pytorch.cli import LightningCLI
from plain_pytorch import CausalLM
from torch import Tensor
from torch.utils.data import DataLoader

from tidegate.strategies import OffloadMixin


class LanguageModel(L.LightningModule):
    """A small transformer over bytes.

    Args:
        width: Features.
        layers: Blocks.
        context: Tokens that it sees.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 256, layers: int = 4, context: int = 128, learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = CausalLM(width, layers, context=context)
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model.loss(batch["input_ids"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model.loss(batch["input_ids"]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Text(L.LightningDataModule):
    """The source of Python's standard library.

    Args:
        windows: Windows of text in an epoch.
        batch: Windows in a batch.
        context: Tokens that the model sees of each.
    """

    def __init__(self, windows: int = 160, batch: int = 16, context: int = 128) -> None:
        super().__init__()
        self.windows, self.batch, self.context = windows, batch, context

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(StandardLibrary(self.windows, self.context + 1), self.batch)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(StandardLibrary(self.batch, self.context + 1), self.batch)


def main() -> int:
    # Without a logger Lightning would write config.yaml into the working directory, over one that is there.
    cli = LightningCLI(LanguageModel, Text, save_config_callback=None, seed_everything_default=0)
    strategy = cli.trainer.strategy
    if cli.subcommand != "fit" or not isinstance(strategy, OffloadMixin):
        return 0
    stats = strategy.offload_stats
    print(f"rank {cli.trainer.global_rank}: {stats}")
    return 0 if stats is not None and stats.moved else 1


if __name__ == "__main__":
    sys.exit(main())
