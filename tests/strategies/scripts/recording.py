"""What a Lightning run did, in numbers that JSON carries exactly: for comparing runs of several processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor

__all__ = ["Record", "digest", "folder_of_rank", "offload_of", "quiet_trainer", "through_all_loops"]


class Record(Callback):
    """Losses of all batches, gradients of all optimiser steps, and the spill directories that were seen."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[str] = []
        self.spill_dirs: set[str] = set()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        session = getattr(trainer.strategy, "session", None)
        if session is not None:
            session.stats()  # waits for the writes, which make the directory
            self.spill_dirs.update(map(str, session.spill_dirs))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.gradients.append(digest(p.grad for p in pl_module.parameters() if p.grad is not None))


def through_all_loops(
    model: L.LightningModule, strategy: Strategy | str, folder: Path, **options: Any
) -> dict[str, Any]:
    """Fits, validates, tests and predicts with one Trainer; what came out, and what moved after each."""
    record = Record()
    trainer = quiet_trainer(strategy, folder, callbacks=[record], **options)
    trainer.fit(model)
    moved = [offload_of(trainer)["written"]]
    validated = trainer.validate(model, verbose=False)
    tested = trainer.test(model, verbose=False)
    predicted = trainer.predict(model)
    assert predicted is not None
    moved.append(offload_of(trainer)["written"])
    return {
        "losses": record.losses,
        "gradients": record.gradients,
        "weights": digest(model.state_dict().values()),
        "validated": validated,
        "tested": tested,
        "predicted": digest(_tensors(predicted)),
        "moved": moved,
        "spill_dirs": sorted(record.spill_dirs),
    }


def quiet_trainer(strategy: Strategy | str, folder: Path, **options: Any) -> L.Trainer:
    """Without logger, bars and files."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(strategy=strategy, **(quiet | options))


def offload_of(trainer: L.Trainer) -> dict[str, Any]:
    """Bytes on disk so far, and those that no backward has asked for yet; zero for other strategies."""
    stats = getattr(trainer.strategy, "offload_stats", None)
    if stats is None:
        return {"written": 0, "pending": 0}
    return {"written": sum(stats.written.values()), "pending": sum(stats.pending.values())}


def digest(tensors: Iterable[Tensor]) -> str:
    """Equal for tensors of equal bits."""
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def folder_of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def _tensors(nested: Any) -> Iterable[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)
