"""Steps: the order in which units were saved, and which threads are inside one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tidegate.offload.unit import Unit

if TYPE_CHECKING:
    from tidegate.offload.free import Pilot

__all__ = ["HookPair", "Step", "StepStack"]


@dataclass(slots=True, eq=False)
class Step:
    """Order of saves and the place that backward has reached; the engine's lock guards it.

    Args:
        order: Units by save; a unit saved again appears again.
        alive: Handles that may still be unpacked.
        cursor: Prefetch has looked at every index from here up.
        lowest: Smallest index that backward has used.
        eligible: Bytes of the distinct units saved in it.
        units: Those units, by number.
        pilot: What steers them, if anything does.
        task: Autograd's graph task that is running over it.
        ended: No further forward joins.
    """

    order: list[Unit] = field(default_factory=list)
    alive: int = 0
    cursor: int = 0
    lowest: int = 0
    eligible: int = 0
    units: list[Unit] = field(default_factory=list)
    pilot: Pilot | None = None
    task: int = -1
    ended: bool = False
    _passed: list[int] = field(default_factory=list)

    def create(self, unit: Unit) -> None:
        """The step's next unit."""
        unit.home, unit.number = id(self), len(self.units)
        self.units.append(unit)
        self.eligible += unit.nbytes

    def add(self, unit: Unit) -> int:
        """Appends a save and returns its index."""
        self.order.append(unit)
        self._passed.append(self.eligible)
        self.alive += 1
        self.cursor = self.lowest = len(self.order)
        return len(self.order) - 1

    def clear(self) -> None:
        """Forgets the saves; no handle is left."""
        self.order.clear()
        self.units.clear()
        self._passed.clear()
        self.cursor = self.lowest = 0

    def number(self, unit: Unit) -> int:
        """The unit's number in this step; -1 if an earlier one created it."""
        return unit.number if unit.home == id(self) else -1

    def ahead(self) -> int:
        """Bytes of the units between what backward uses now and what prefetch looks at, kept ones included."""
        if not 0 < self.cursor <= self.lowest < len(self._passed):
            return 0
        return self._passed[self.lowest] - self._passed[self.cursor - 1]

    def reached(self, index: int, task: int) -> bool:
        """Backward unpacks the save at `index`; returns whether this backward is new to the step.

        Args:
            index: Place in the order.
            task: Autograd's graph task, -1 outside backward.
        """
        starts = task not in (-1, self.task)
        if starts:
            self.task = task
            self.cursor = self.lowest = len(self.order)
        self.cursor = min(self.cursor, index)
        self.lowest = min(self.lowest, index)
        return starts

    def next_needed(self) -> Unit | None:
        """The unit that backward needs next and prefetch has not looked at; None at the start of the step."""
        return self.order[self.cursor - 1] if self.cursor > 0 else None


class HookPair(Protocol):
    """Pack and unpack, as saved_tensors_hooks wants them."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


@dataclass(slots=True)
class _Level:
    explicit: bool
    hooks: saved_tensors_hooks | None


class StepStack(threading.local):
    """Where the current thread is: nested explicit steps and forwards of the root module.

    Saved-tensor hooks are thread-local and form a stack, so the outermost level alone holds them.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []

    def inside(self) -> bool:
        """Whether the hooks are installed in this thread."""
        return any(level.hooks is not None for level in self._levels)

    def enter(self, hooks: HookPair, *, explicit: bool, hooked: bool) -> None:
        """Goes one level down; installs the hooks if `hooked`."""
        level = _Level(explicit, saved_tensors_hooks(*_untraced(hooks)) if hooked else None)
        if level.hooks is not None:
            level.hooks.__enter__()
        self._levels.append(level)

    @property
    def depth(self) -> int:
        """Levels of this thread."""
        return len(self._levels)

    def leave_forward(self) -> bool:
        """Leaves a forward; returns whether that took the hooks away.

        A forward that an earlier hook of the module ended before it was entered is not there to be left.
        """
        if not self._levels or self._levels[-1].explicit:
            return False
        return self._pop()

    def leave_to(self, depth: int) -> None:
        """Leaves every level above `depth`, interrupted forwards included."""
        while len(self._levels) > depth:
            self._pop()

    def drop_interrupted(self, root: nn.Module | None, *, entering: bool) -> None:
        """Leaves forwards that a KeyboardInterrupt ended: torch runs always-called hooks for Exceptions only.

        Args:
            root: The root module.
            entering: A forward of it has begun that has no level yet.
        """
        if not self._levels or self._levels[-1].explicit:
            return
        running = _running_forwards(root) - entering
        while self._implicit() > running and not self._levels[-1].explicit:
            self._pop()

    def _pop(self) -> bool:
        level = self._levels.pop()
        if level.hooks is None:
            return False
        level.hooks.__exit__(None, None, None)
        return True

    def _implicit(self) -> int:
        return sum(not level.explicit for level in self._levels)


def _untraced(hooks: HookPair) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Keeps torch.compile from tracing into the hooks that run inside a compiled region."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return hooks.pack, hooks.unpack
    pack, unpack = dynamo.disable(hooks.pack), dynamo.disable(hooks.unpack)
    pack.steps_aside = True  # see functorch.py
    return pack, unpack


def _running_forwards(root: nn.Module | None) -> int:
    """Counts the forwards of `root` on this thread's Python stack."""
    count = 0
    frame: FrameType | None = sys._getframe()
    code: CodeType = nn.Module._call_impl.__code__
    while frame:
        if frame.f_code == code and frame.f_locals.get("self") is root:
            count += 1
        frame = frame.f_back
    return count
