"""Optional packages: loaded when needed, and the extra that brings each one named when it is not there."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from types import ModuleType

from tidegate.errors import MissingExtraError

__all__ = ["EXTRAS", "Extra", "load"]


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional package.

    Args:
        module: What is imported.
        distributions: Names under which it may be installed.
    """

    module: str
    distributions: tuple[str, ...]

    @property
    def version(self) -> str | None:
        """The version that is installed; nothing is imported."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


EXTRAS = {
    "lightning": Extra("lightning", ("lightning",)),
    "accelerate": Extra("accelerate", ("accelerate",)),
    "transformers": Extra("transformers", ("transformers",)),
    "deepspeed": Extra("deepspeed", ("deepspeed",)),
    "gds": Extra("kvikio", ("kvikio-cu13", "kvikio-cu12", "kvikio")),
    "gnn": Extra("torch_geometric", ("torch-geometric",)),
    "loader": Extra("spdl", ("spdl", "spdl-core")),
    "plot": Extra("matplotlib", ("matplotlib",)),
}
"""By the name of the extra of this distribution."""


def load(home: str, extra: str, what: str) -> ModuleType:
    """Imports `home`, which needs the package of `extra`.

    Args:
        home: Module to import, the optional package itself or one of ours that imports it.
        extra: Key of `EXTRAS`.
        what: Who needs it, for the message.

    Raises:
        MissingExtraError: The package is not installed. A package that is there but broken raises its own error.
    """
    package = EXTRAS[extra].module
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{what} needs {package}, which is not installed; pip install 'tidegate[{extra}]'"
        ) from error
