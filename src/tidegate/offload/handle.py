"""What autograd's graph holds for a saved tensor, and what its death leaves to be done."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from tidegate.offload.step import Step
from tidegate.offload.storage import ViewSpec
from tidegate.offload.unit import Body, Unit, VersionGuard

__all__ = ["Grave", "SavedHandle"]


class Keeper(Protocol):
    """What a handle asks of the engine."""

    def fetch(self, handle: SavedHandle) -> Tensor: ...

    def bury_later(self, handle: SavedHandle) -> Grave: ...


class Grave(weakref.ref["SavedHandle"]):
    """What is to be done when a handle dies.

    The handle's death runs no Python code of ours: an exception that a signal handler raises there (Ctrl-C) would be
    lost, and a lock taken there could be one that the same thread holds.
    """

    __slots__ = ("step", "turn", "unit")
    unit: Unit
    step: Step
    turn: int


class SavedHandle:
    """What autograd's graph holds instead of the tensor. When the graph lets go of it, the bytes are freed."""

    __slots__ = ("__weakref__", "_engine", "body", "grave", "guard", "index", "step", "unit", "view")

    def __init__(
        self, engine: Keeper, unit: Unit, body: Body, view: ViewSpec, guard: VersionGuard, step: Step, index: int
    ) -> None:
        self._engine = engine
        self.unit = unit
        self.body = body
        self.view = view
        self.guard = guard
        self.step = step
        self.index = index
        self.grave = engine.bury_later(self)

    def unpack(self) -> Tensor:
        """Returns the saved view, its bytes, strides and alignment as they were; may be called again."""
        self.guard.check()
        return self._engine.fetch(self)
