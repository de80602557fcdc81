"""Lightning's own demonstration models, and one that trains on two loaders."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["PEERS", "build"]


class TwoLoaders(BoringModel):
    """Half of every batch comes from either loader; the shorter one starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def train_dataloader(self) -> Any:
        loaders = {
            "first": DataLoader(RandomDataset(32, 24), batch_size=2),  # type: ignore[var-annotated]
            "second": DataLoader(RandomDataset(32, 8), batch_size=1),  # type: ignore[var-annotated]
        }
        return self.combined(loaders)

    def combined(self, loaders: dict[str, Any]) -> Any:
        return loaders

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self(batch["first"])) + self.loss(self.other(batch["second"])).sqrt()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.loss(self(batch)), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("tested", self.loss(self.other(batch)), sync_dist=True)


class TwoCombinedLoaders(TwoLoaders):
    def combined(self, loaders: dict[str, Any]) -> Any:
        return CombinedLoader(loaders, "min_size")


PEERS: dict[str, type[BoringModel]] = {
    kind.__name__: kind for kind in (BoringModel, ManualOptimBoringModel, TwoLoaders, TwoCombinedLoaders)
}


def build(name: str, rank: int = 0) -> BoringModel:
    """Equal weights for every rank; its data and its dropout follow from the seed set here."""
    torch.manual_seed(7)
    model = PEERS[name]()
    torch.manual_seed(3 + rank)
    return model
