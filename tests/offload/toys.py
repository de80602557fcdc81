"""A small model, a configuration that moves every saved byte of it, and its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.offload.compare import same_bits, wait_until_away
from torch import Tensor, nn

from tidegate import OffloadConfig, OffloadSession

__all__ = ["assert_same_gradients", "blocks", "everything", "gradients", "hooks_installed"]


def blocks(count: int = 4, width: int = 32) -> nn.Sequential:
    """Returns the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(count)))


def everything(path: Path, **changes: Any) -> OffloadConfig:
    """Everything eligible goes to disk."""
    settings = {"tiers": "disk", "device_budget": 0, "min_bytes": 1, "window": 1 << 20, "disk_paths": str(path)}
    return OffloadConfig(**settings | changes)


def gradients(
    model: nn.Module, session: OffloadSession | None = None, *, rows: int = 64, width: int = 32
) -> list[Tensor]:
    """Runs one step from a fixed seed; with a session, backward starts when every byte is away."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(64, 32)).square().sum()
    if session is not None:
        wait_until_away(session)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same_gradients(left: list[Tensor], right: list[Tensor]) -> None:
    assert left
    assert all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def hooks_installed() -> bool:
    """Whether this thread has saved-tensor hooks."""
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))  # type: ignore[attr-defined]
