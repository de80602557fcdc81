"""attach(model, config) -> OffloadSession: the one object that adapters hold."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tidegate.config import OffloadConfig
from tidegate.errors import ConfigError, SessionClosedError
from tidegate.offload import functorch
from tidegate.offload.build import Surroundings, build_engine
from tidegate.offload.captured import captures, say_captured
from tidegate.offload.compiled import say_hooks_traced
from tidegate.offload.engine import Engine
from tidegate.offload.saved import Packer
from tidegate.offload.stats import OffloadStats
from tidegate.offload.step import Step, StepStack

__all__ = ["OffloadSession", "attach", "open_session"]

_log = logging.getLogger("tidegate")
_sessions: weakref.WeakKeyDictionary[nn.Module, OffloadSession] = weakref.WeakKeyDictionary()
_attach_lock = threading.Lock()


def attach(
    model: nn.Module, config: OffloadConfig | Mapping[str, Any] | None = None, *, rank: int = 0
) -> OffloadSession:
    """Makes a model's saved activations leave the device and come back in time for backward.

    The forward of `model` with grad enabled opens a step by itself; `session.step()` widens it. With torch.compile,
    compile the model's blocks one by one, or attach to what torch.compile returned: a region that is compiled together
    with the model's hooks opens no step.

    Args:
        model: The root module. Its parameters and buffers never move.
        config: What may move where: an OffloadConfig, a mapping of its fields, or None for TIDEGATE_* variables and
            defaults.
        rank: Rank of this process; spill directories carry it.

    Returns:
        The session. A second call with an equal config returns the open one.

    Raises:
        ConfigError: The config cannot be used here, the model is no module that runs hooks, or it has an open session
            with another config.
    """
    config = OffloadConfig.of(config)
    candidate: object = model
    if not isinstance(candidate, nn.Module) or isinstance(candidate, torch.jit.ScriptModule):
        raise ConfigError(f"attach needs an nn.Module that runs Python hooks, not a {type(candidate).__name__}")
    with _attach_lock:
        session = open_session(model)
        if session is not None:
            if session.config != config:
                raise ConfigError(
                    "the model already has an open offload session with another config (tidegate.attach, a strategy, a "
                    "plugin, a callback and tidegate.run open one): use one of them, or close it first: session.close()"
                )
            return session
        session = OffloadSession(model, config, rank=rank)
        _sessions[model] = session
        return session


def open_session(model: nn.Module) -> OffloadSession | None:
    """The open session of a model, if it has one."""
    session = _sessions.get(model)
    return None if session is None or session.closed else session


class OffloadSession:
    """Offload of one model. Use `attach` to make one."""

    def __init__(self, model: nn.Module, config: OffloadConfig, *, rank: int = 0) -> None:
        self.config = config
        self._rank = rank
        self._surroundings = Surroundings(model)
        self._start_engine()
        self._threads = StepStack()
        self._lock = threading.Lock()
        self._explicit = 0
        self._entered = False
        if model._compiled_call_impl is not None:
            say_hooks_traced()
        functorch.install()
        self._handles = (
            model.register_forward_pre_hook(_Enter(self), with_kwargs=True),
            model.register_forward_hook(_Leave(self), with_kwargs=True, always_call=True),
        )
        self._finalizer = weakref.finalize(self, _shut, self._engine, self._handles)

    def _start_engine(self) -> None:
        self._engine, self._tiers = build_engine(self._surroundings, self.config, self._rank)
        self._packer = Packer(self._engine, self._surroundings, self._current_step, self.config.min_bytes)
        self._step = Step()

    @contextmanager
    def step(self) -> Iterator[OffloadSession]:
        """Widens a step to the block: forward and loss, and backward if it is inside.

        A thread takes part by entering the step itself, and then joins the step that is open. Inside another
        `step()` of the same thread it does nothing.

        Raises:
            SessionClosedError: The session is closed.
        """
        if self.closed:
            raise SessionClosedError("the offload session is closed; attach the model again")
        self._threads.drop_interrupted(self._surroundings.model, entering=False)
        depth = self._threads.depth
        if captures():
            self._enter_capture(explicit=True)
            try:
                yield self
            finally:
                self._threads.leave_to(depth)
            return
        self._renew_if_interrupted()
        outermost = not self._threads.inside()
        if outermost:
            with self._lock:
                if not self._explicit:
                    self._step = Step()
                self._explicit += 1
        self._enter(explicit=True)
        try:
            yield self
        finally:
            self._threads.leave_to(depth)
            if outermost:
                with self._lock:
                    self._explicit -= 1
                self._engine.left(self._step)

    def stats(self, *, wait: bool = True) -> OffloadStats:
        """What really moved since attach or the last reset.

        Args:
            wait: Wait until the writes that have begun are over, so that the books are complete. False reads them as
                they stand, for a monitor that must not hold anything up.
        """
        return self._engine.stats(wait=wait)

    def reset_stats(self) -> None:
        """Starts counting anew, once the writes that have begun are over."""
        self._engine.reset_stats()

    def close(self) -> None:
        """Removes the hooks, ends all I/O and deletes everything on disk. Idempotent.

        A graph that still needs moved bytes raises SessionClosedError in its backward.
        """
        if not self._entered and not self.closed:
            _log.warning(
                "nothing moved: the session saw no step, which is a call of the attached model itself with grad, or a "
                "block under session.step()"
            )
        self._finalizer()
        self._threads.leave_to(0)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._engine.closed

    @property
    def spill_dirs(self) -> tuple[Path, ...]:
        """Run directories on disk; empty until something went there."""
        return self._tiers.spill_dirs()

    def __enter__(self) -> OffloadSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, *, explicit: bool) -> None:
        outermost = not self._threads.inside()
        self._entered = True
        if outermost:
            self._surroundings.refresh()
            self._engine.settle()  # may end the step before
        self._threads.enter(self._packer, explicit=explicit, hooked=outermost)

    def _enter_capture(self, *, explicit: bool) -> None:
        """While the device records a graph nothing may ask it anything, not even whether a copy is over."""
        say_captured()
        self._entered = True
        self._threads.enter(self._packer, explicit=explicit, hooked=False)

    def _renew_if_interrupted(self) -> None:
        """Goes on with a new engine after an exception has left the old one's books in doubt."""
        with self._lock:
            if not self._engine.interrupted or self.closed or self._explicit:
                return
            _log.warning(
                "an exception from outside (Ctrl-C, a timeout) interrupted the session's bookkeeping: it starts anew, "
                "and so do its figures"
            )
            old = self._engine
            self._start_engine()
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _shut, self._engine, self._handles)
        old.close()

    def _forward_begins(self) -> None:
        """Opens an implicit step: the root module's forward with grad."""
        if self.closed:  # by a hook before ours: ours are gone, and nothing will leave what is entered here
            return
        model = self._surroundings.model
        self._threads.drop_interrupted(model, entering=True)
        if captures():
            self._enter_capture(explicit=False)
            return
        self._renew_if_interrupted()
        self._engine.new_scope()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            self._engine.settle()
            self._threads.enter(self._packer, explicit=False, hooked=False)
        else:
            self._enter(explicit=False)

    def _forward_ended(self) -> None:
        if self._threads.leave_forward() and not self._explicit:
            self._engine.left(self._step)

    def _current_step(self) -> Step:
        with self._lock:
            if self._step.ended and not self._explicit:
                self._step = Step()
            return self._step

    def _stay_behind(self) -> None:
        """The process was forked, and this is the child: it has neither the workers nor the files."""
        self._finalizer.detach()
        for handle in self._handles:
            handle.remove()
        self._engine.stay_behind()


def _after_fork_in_child() -> None:
    for session in list(_sessions.values()):
        session._stay_behind()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _RootHook:
    """A forward hook that a copied or pickled model does not take along: the copy is not attached."""

    def __init__(self, session: OffloadSession | None = None) -> None:
        self._session = None if session is None else weakref.ref(session)

    def session(self) -> OffloadSession | None:
        if self._session is None:
            return None
        if torch.compiler.is_compiling():
            say_hooks_traced()
            return None
        return self._session()

    def __deepcopy__(self, memo: dict[int, Any]) -> _RootHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[_RootHook], tuple[()]]:
        return type(self), ()


# A hook that is removed while torch calls the hooks of a forward is still called, but without the keyword arguments.


class _Enter(_RootHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        session = self.session()
        if session is not None:
            session._forward_begins()


class _Leave(_RootHook):
    def __call__(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        session = self.session()
        if session is not None:
            session._forward_ended()


def _shut(engine: Engine, handles: tuple[RemovableHandle, ...]) -> None:
    for handle in handles:
        handle.remove()
    functorch.uninstall()
    engine.close()
