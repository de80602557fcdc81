"""Data-parallel training in which SIGKILL takes the second rank in mid-step."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from tests.strategies.models import SmallModel
from tests.strategies.scripts.ranks import RANKS
from tests.strategies.scripts.recording import folder_of_rank, quiet_trainer
from torch import Tensor

from tidegate.strategies import OffloadDDPStrategy


class Dies(SmallModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.global_step == 3:
            strategy = self.trainer.strategy
            assert isinstance(strategy, OffloadDDPStrategy)
            assert strategy.session is not None
            strategy.session.stats()  # waits for the writes, which make the directory
            (folder / "result.json").write_text(json.dumps([str(path) for path in strategy.session.spill_dirs]))
            if self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


folder = folder_of_rank(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
torch.manual_seed(7)
quiet_trainer("tidegate_ddp", folder, devices=RANKS, max_epochs=3, limit_val_batches=0).fit(Dies())
