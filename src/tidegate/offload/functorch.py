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

import torch

__all__ = ["install", "uninstall"]

_lock = threading.Lock()
_installed = 0
_original: Callable[[str], AbstractContextManager[None]] | None = None


@contextmanager
def _stepping_aside(message: str, original: Callable[[str], AbstractContextManager[None]]) -> Any:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None or not getattr(top[0], "steps_aside", False):
        with original(message):
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    with ExitStack() as stack:
        stack.callback(torch._C._autograd._push_saved_tensors_default_hooks, *top)
        stack.enter_context(original(message))
        yield


def install() -> None:
    """Wraps torch's refusal; counted, so that many sessions may be open."""
    global _installed, _original
    with _lock:
        _installed += 1
        if _installed == 1:
            original = torch.autograd.graph.disable_saved_tensors_hooks
            _original = original
            torch.autograd.graph.disable_saved_tensors_hooks = lambda error_message: _stepping_aside(  # type: ignore[assignment]
                error_message, original
            )


def uninstall() -> None:
    """Undoes one `install`; the last restores torch's own function."""
    global _installed, _original
    with _lock:
        _installed -= 1
        if _installed == 0:
            torch.autograd.graph.disable_saved_tensors_hooks = _original  # type: ignore[assignment]
            _original = None
