"""CUDA graphs: what is captured is left alone, and the log says so once."""

from __future__ import annotations

import logging

import torch

__all__ = ["captures", "say_captured"]

_log = logging.getLogger("tidegate")
_said: list[bool] = []


def captures() -> bool:
    """Whether the current stream records a CUDA graph. Where CUDA is not in use, the question would start it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def say_captured() -> None:
    """Tells once that saved tensors stay: a replay reads and writes the memory that was there at capture."""
    if not _said:
        _said.append(True)
        _log.info("a CUDA graph is captured: what is saved inside it stays on the device")
