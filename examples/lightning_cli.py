"""A LightningCLI program; the configuration file brings the offload.

    python examples/lightning_cli.py fit --config configs/lightning_single.yaml
    python examples/lightning_cli.py fit --config configs/lightning_ddp.yaml
    python examples/lightning_cli.py fit --config configs/lightning_single.yaml --model.width=1024

Needs jsonargparse: pip install 'jsonargparse[signatures]'.
"""

from __future__ import annotations

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

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, OffloadMixin):
            print(f"rank {self.global_rank}: {strategy.offload_stats}")

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


if __name__ == "__main__":
    LightningCLI(LanguageModel, Text, seed_everything_default=0, save_config_kwargs={"overwrite": True})
