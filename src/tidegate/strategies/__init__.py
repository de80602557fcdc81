"""Adapters that put the engine into a trainer.

Importing this package registers the Lightning strategies: at once where Lightning is loaded, otherwise as soon as it
is. It loads no trainer by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tidegate.errors import MissingExtraError
from tidegate.strategies import registration

if TYPE_CHECKING:
    from tidegate.strategies.lightning import OffloadMixin, OffloadStrategy

__all__ = ["OffloadMixin", "OffloadStrategy"]

_HOME_OF = {
    "OffloadMixin": ("tidegate.strategies.lightning", "lightning"),
    "OffloadStrategy": ("tidegate.strategies.lightning", "lightning"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, extra = _HOME_OF[name]
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != extra:
            raise
        raise MissingExtraError(
            f"tidegate.strategies.{name} needs {extra}, which is not installed; pip install 'tidegate[{extra}]'"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register_lightning()
