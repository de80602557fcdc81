"""A small real model."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

FEATURES = 24


class SmallModel(L.LightningModule):
    """Attention, LayerNorm, GELU and dropout; `training_step` does not go through `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(FEATURES, 4, 48, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(FEATURES, 3)
        self.losses: list[float] = []

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self.inner(x_BTF)).mean(1)

    def loss(self, x_BTF: Tensor) -> Tensor:
        target_B = (x_BTF.float().sum((1, 2)) > 0).long()
        return nn.functional.cross_entropy(self.head(self.inner(x_BTF)).mean(1), target_B)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def loader(self) -> DataLoader[Tensor]:
        data = torch.randn(24, 5, FEATURES, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=4)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
