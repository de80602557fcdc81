"""Training on the memory you have.

As a step's activations rise toward what the device has left, they flow out to host RAM and NVMe, and come back before
the backward pass needs them.

    import lightning as L, tidegate

    L.Trainer(strategy="tidegate", devices=1)                   # Lightning

    session = tidegate.attach(model, tidegate.OffloadConfig())  # plain PyTorch
    with session.step():
        loss = model(batch)
    loss.backward()

Importing this package loads neither torch nor a trainer; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tidegate import strategies
from tidegate.errors import (
    ConfigError,
    CorruptionError,
    InPlaceError,
    MissingExtraError,
    SessionClosedError,
    TidegateError,
    TierIOError,
)

if TYPE_CHECKING:
    from tidegate.config import OffloadConfig
    from tidegate.offload.session import OffloadSession, attach
    from tidegate.offload.stats import OffloadStats

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CorruptionError",
    "InPlaceError",
    "MissingExtraError",
    "OffloadConfig",
    "OffloadSession",
    "OffloadStats",
    "SessionClosedError",
    "TidegateError",
    "TierIOError",
    "__version__",
    "attach",
    "strategies",
]

_HOME_OF = {
    "OffloadConfig": "tidegate.config",
    "OffloadSession": "tidegate.offload.session",
    "OffloadStats": "tidegate.offload.stats",
    "attach": "tidegate.offload.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
