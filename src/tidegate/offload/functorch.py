"""Lets torch.func transforms run inside a step.

torch.func.grad, vjp, jacrev and hessian refuse to start while any saved-tensor hooks are installed. A program
that runs without tidegate must run with it, so our hooks step aside for the length of such a transform and what
it saves stays on the device. torch offers no seam for this: the one function through which the transforms
refuse is wrapped while a session is open. Hooks that are not ours are left alone and refused as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.autograd.graph

__all__ = ["install", "uninstall"]

_graph: Any = torch.autograd.graph
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  # a module that type checkers do not know
_lock = threading.Lock()
_installed = 0
_original: Callable[[str], AbstractContextManager[None]] | None = None


@contextmanager
def _stepping_aside(message: str, original: Callable[[str], AbstractContextManager[None]]) -> Any:
    with ExitStack() as stack:
        while (top := _autograd._top_saved_tensors_default_hooks(True)) and getattr(top[0], "steps_aside", False):
            _autograd._pop_saved_tensors_default_hooks()
            stack.callback(_autograd._push_saved_tensors_default_hooks, *top)
        stack.enter_context(original(message))
        yield


def install() -> None:
    """Wraps torch's refusal; counted, so that many sessions may be open."""
    global _installed, _original
    with _lock:
        _installed += 1
        if _installed == 1:
            original = _graph.disable_saved_tensors_hooks
            _original = original
            _graph.disable_saved_tensors_hooks = lambda error_message: _stepping_aside(error_message, original)


def uninstall() -> None:
    """Undoes one `install`; the last restores torch's own function."""
    global _installed, _original
    with _lock:
        _installed -= 1
        if _installed == 0:
            _graph.disable_saved_tensors_hooks = _original
            _original = None
