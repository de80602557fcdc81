"""Says why little moves where torch.compile is at work; results are right either way."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from tidegate.offload.step import Step

__all__ = ["RegionWatch", "say_hooks_traced"]

_log = logging.getLogger("tidegate")
_said = False


def say_hooks_traced() -> None:
    """The compiler traces through a session's forward hooks: they cannot act from inside the region."""
    global _said
    if not _said:
        _said = True
        _log.warning(
            "nothing moves in steps that open by themselves: the model is compiled as a whole, and its forward hooks "
            "with it. Compile its blocks instead, attach to what torch.compile returned, or use session.step()"
        )


# What torch.compiler.assume_constant_result does, which would load the compiler: it runs the function while it traces.
say_hooks_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class RegionWatch:
    """Notices a compiled region that saves most of a step: in backward all of it comes back at once."""

    def __init__(self) -> None:
        self._where = (0, 0)
        self._handles = 0
        self._said = False

    def unpacked(self, step: Step) -> None:
        """A handle of `step` is unpacked by the node that autograd runs now."""
        if self._said or "torch._dynamo" not in sys.modules:
            return
        node: Any = torch._C._current_autograd_node()  # None when somebody looks at a saved tensor outside backward
        where = (id(step), id(node))
        self._handles = self._handles + 1 if where == self._where else 1
        self._where = where
        saved = len(step.order)
        if saved > 1 and 2 * self._handles > saved and node is not None and "CompiledFunction" in node.name():
            self._said = True
            _log.warning(
                "one compiled region saves most of a step: in backward all of it comes back at once, so moving it "
                "frees the device between forward and backward only. Compile the model's blocks one by one instead"
            )
