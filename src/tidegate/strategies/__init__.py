"""Adapters that put the engine into a trainer.

Importing this package registers the Lightning strategies: at once where Lightning is loaded, otherwise as soon as it
is. It loads no trainer by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate import _extras
from tidegate.strategies import registration

if TYPE_CHECKING:
    from tidegate.strategies.accelerate import OffloadPlugin
    from tidegate.strategies.lightning import OffloadDDPStrategy, OffloadMixin, OffloadStrategy
    from tidegate.strategies.transformers import OffloadTrainerCallback, OffloadTrainerMixin

__all__ = [
    "OffloadDDPStrategy",
    "OffloadMixin",
    "OffloadPlugin",
    "OffloadStrategy",
    "OffloadTrainerCallback",
    "OffloadTrainerMixin",
]

_HOME_OF = {
    "OffloadDDPStrategy": "lightning",
    "OffloadMixin": "lightning",
    "OffloadPlugin": "accelerate",
    "OffloadStrategy": "lightning",
    "OffloadTrainerCallback": "transformers",
    "OffloadTrainerMixin": "transformers",
}
"""Which adapter each name is from: the module below this package, and the extra."""


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF[name]
    value = getattr(_extras.load(f"tidegate.strategies.{home}", home, f"tidegate.strategies.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register_lightning()
