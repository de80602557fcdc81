"""Puts an engine together: what the model is, which tiers it may use, how much must leave."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import torch
from torch import nn

from tidegate.config import DiskPath, OffloadConfig, Percent, check_disk_paths
from tidegate.memory import headroom
from tidegate.offload.engine import Engine
from tidegate.offload.gate import FixedGate, Gate, HeadroomGate, ShareGate
from tidegate.offload.storage import owned_storages
from tidegate.offload.tierset import TierSet
from tidegate.offload.transfer import CpuMover, Mover
from tidegate.tiers.tier import Tier

__all__ = ["Surroundings", "build_engine"]

_log = logging.getLogger("tidegate")


class Surroundings:
    """The attached model seen from outside: its device, and storages that must never move."""

    def __init__(self, model: nn.Module) -> None:
        self.owned: frozenset[int] = frozenset()
        self.device = torch.device("cpu")
        self._model = weakref.ref(model)
        self._said_cpu = False

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    def refresh(self) -> None:
        """Reads the model anew: parameters may have been moved, added or unsharded since the last step."""
        model = self.model
        if model is None:
            return
        storages = list(owned_storages(model))
        self.owned = frozenset(storage._cdata for storage in storages)
        self.device = next((s.device for s in storages if s.device.type == "cuda"), torch.device("cpu"))
        if self.on_cpu and storages and not self._said_cpu:
            self._said_cpu = True
            _log.info("the model is on the CPU: the device is host RAM, and device_budget means RAM")

    @property
    def on_cpu(self) -> bool:
        """Whether this is a CPU run."""
        return self.device.type == "cpu"

    def may_move(self, device: torch.device) -> bool:
        """On a CUDA run tensors on the CPU stay."""
        return device.type == "cuda" or self.on_cpu
