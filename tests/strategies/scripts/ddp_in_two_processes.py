"""Twenty optimiser steps in each of DDP's ways, plain and offloaded, in one process group."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from tests.strategies.models import FEATURES, SmallModel
from tests.strategies.scripts.ranks import RANKS
from tests.strategies.scripts.recording import Record, digest, folder_of_rank, offload_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tidegate.strategies import OffloadDDPStrategy

STEPS = 20
BATCH = 2


class Branches(SmallModel):
    """Has a branch that only some steps of some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(FEATURES, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if (batch_idx + self.global_rank) % 3 == 0:
            loss = loss + self.branch(batch).square().mean()
        return loss


BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}

Case = tuple[type[SmallModel], Callable[[], Strategy | str], Callable[[], Strategy | str], dict[str, Any]]

CASES: dict[str, Case] = {
    "every batch": (SmallModel, lambda: "ddp", lambda: "tidegate_ddp", {}),
    "every fourth batch": (SmallModel, lambda: "ddp", lambda: "tidegate_ddp", {"accumulate_grad_batches": 4}),
    "static graph": (
        SmallModel,
        lambda: DDPStrategy(static_graph=True),
        lambda: OffloadDDPStrategy(static_graph=True),
        {},
    ),
    "many buckets": (SmallModel, lambda: DDPStrategy(**BUCKETS), lambda: OffloadDDPStrategy(**BUCKETS), {}),
    "unused branch": (
        Branches,
        lambda: "ddp_find_unused_parameters_true",
        lambda: "tidegate_ddp_find_unused_parameters_true",
        {},
    ),
}


def train(kind: type[SmallModel], strategy: Strategy | str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(7)
    model = kind()
    windows = RANKS * BATCH * STEPS * options.get("accumulate_grad_batches", 1)
    data = torch.randn(windows, 5, FEATURES, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3 + rank)
    record = Record()
    trainer = quiet_trainer(strategy, folder, devices=RANKS, callbacks=[record], limit_val_batches=0, **options)
    trainer.fit(model, DataLoader(data, batch_size=BATCH))  # type: ignore[arg-type]
    torch.distributed.barrier()
    left = os.listdir(os.environ["TIDEGATE_DISK_PATHS"])
    torch.distributed.barrier()
    return {
        "losses": record.losses,
        "gradients": record.gradients,
        "weights": digest(model.state_dict().values()),
        "steps": trainer.global_step,
        "strategy": type(trainer.strategy).__name__,
        "spill_dirs": sorted(record.spill_dirs),
        "left": left,
        **offload_of(trainer),
    }


def main() -> None:
    folder = folder_of_rank(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
    result = {
        case: {
            "plain": train(kind, plain(), folder, options),
            "offloaded": train(kind, offloaded(), folder, options),
        }
        for case, (kind, plain, offloaded, options) in CASES.items()
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
