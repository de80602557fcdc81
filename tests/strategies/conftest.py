"""Trainers without loggers and bars, and the configuration that moves everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from tests.strategies.models import SmallModel

from tidegate import OffloadConfig
from tidegate.strategies import OffloadStrategy


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


@pytest.fixture
def everything(spill: Path) -> OffloadConfig:
    """Every saved activation goes to disk, however small."""
    return OffloadConfig(tiers=("disk",), device_budget=0, min_bytes=0, disk_paths=(str(spill),))


@pytest.fixture
def strategy(everything: OffloadConfig) -> OffloadStrategy:
    return OffloadStrategy(offload=everything)


@pytest.fixture
def make_model() -> Callable[[], SmallModel]:
    """Builds models with equal weights and restarts the random numbers that dropout draws."""

    def build(kind: type[SmallModel] = SmallModel) -> SmallModel:
        torch.manual_seed(7)
        return kind()

    return build


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    def build(strategy: Strategy | str = "auto", **options: Any) -> L.Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(strategy=strategy, **(quiet | options))

    return build
