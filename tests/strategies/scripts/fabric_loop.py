"""A training loop as Fabric's documentation writes it, plain and offloaded; a script of several ranks, too."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from tests.strategies.models import FEATURES
from tests.strategies.scripts.ranks import RANKS
from tests.strategies.scripts.recording import digest, folder_of_rank
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tidegate
from tidegate import OffloadConfig

__all__ = ["CASES", "STEPS", "train"]

STEPS = 20
BATCH = 2

CASES: dict[str, dict[str, Any]] = {
    "every batch": {},
    "every batch, steps widened": {"widened": True},
    "every fourth batch": {"every": 4},
    "every fourth batch, steps widened": {"every": 4, "widened": True},
    "a method beside forward, steps widened": {"widened": True, "method": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(FEATURES, 4, 48, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self.inner(x_BTF)).mean(1)

    def logits(self, x_BTF: Tensor) -> Tensor:
        return self(x_BTF)


def train(
    fabric: Fabric,
    config: OffloadConfig | None,
    *,
    every: int = 1,
    widened: bool = False,
    method: bool = False,
) -> dict[str, Any]:
    """Runs STEPS optimiser steps.

    Args:
        fabric: Launched.
        config: None trains without offload.
        every: Batches an optimiser step.
        widened: Whether the loss belongs to the step.
        method: Call a method beside `forward`, which Fabric sends around the hooks of its wrapper.
    """
    torch.manual_seed(7)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if method:
        model.mark_forward_method("logits")
    windows = STEPS * every * BATCH * fabric.world_size
    data = torch.randn(windows, 5, FEATURES, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))  # type: ignore[arg-type]
    session = None if config is None else tidegate.attach(model, config, rank=fabric.global_rank)
    torch.manual_seed(3 + fabric.global_rank)
    losses, gradients = [], []
    spill_dirs: set[str] = set()
    for index, batch in enumerate(loader):
        last = (index + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not last):
            with session.step() if session is not None and widened else contextlib.nullcontext():
                logits = model.logits(batch) if method else model(batch)
                loss = nn.functional.cross_entropy(logits, (batch.sum((1, 2)) > 0).long()) / every
            fabric.backward(loss)
        losses.append(loss.item())
        if session is not None:
            session.stats()  # waits for the writes, which make the directory
            spill_dirs.update(map(str, session.spill_dirs))
        if last:
            gradients.append(digest(p.grad for p in net.parameters() if p.grad is not None))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    result = {
        "losses": losses,
        "gradients": gradients,
        "weights": digest(model.state_dict().values()),
        "names": list(model.state_dict()),
        "spill_dirs": sorted(spill_dirs),
    }
    if session is not None:
        stats = session.stats()
        result |= {"written": stats.written["disk"], "pending": stats.pending["disk"], "steps": stats.steps}
        session.close()
    return result


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    result: dict[str, Any] = {}
    for case, options in CASES.items():
        result[case] = {"plain": train(fabric, None, **options)}
        result[case]["offloaded"] = train(fabric, OffloadConfig(), **options)
        fabric.barrier()
        result[case]["left"] = os.listdir(os.environ["TIDEGATE_DISK_PATHS"])
        fabric.barrier()
    (folder_of_rank(Path(sys.argv[1]), fabric.global_rank) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
