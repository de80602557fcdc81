"""Puts our strategies into Lightning's registry, whichever of the two packages is imported first.

Lightning knows no entry points for strategies: a name exists once somebody has registered it. When Lightning is not
loaded yet, a finder on `sys.meta_path` waits for it, so that `import tidegate` neither loads Lightning nor has to come
after it. The finder changes nothing in Lightning's modules: it runs our registration when their import has ended.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register_lightning"]

logger = logging.getLogger(__name__)

_LIGHTNING = "lightning.pytorch"


def register_lightning() -> None:
    """Registers the Lightning strategies now or when Lightning gets loaded; idempotent."""
    if _LIGHTNING in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterLightning) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLightning())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from tidegate.strategies.lightning import OffloadDDPStrategy, OffloadStrategy

    for strategy in (OffloadStrategy, OffloadDDPStrategy):
        strategy.register_strategies(StrategyRegistry)


class _AfterLightning(MetaPathFinder):
    """Finds what the other finders find, and has `_register` run after the module's own code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            _register()
        except Exception:
            logger.warning(
                "The strategies of tidegate are not registered; import tidegate.strategies.lightning shows why.",
                exc_info=True,
            )
