"""Runs an unmodified Accelerate or transformers.Trainer script with its activations offloaded.

    accelerate launch -m tidegate.run train.py ARGS
    python -m tidegate.run train.py ARGS

What may move where is said by TIDEGATE_* variables or by the file that TIDEGATE_CONFIG names. In this process, and in
those that it forks, `Accelerator.prepare_model` also attaches the model that it has prepared. Processes that the script
spawns anew know nothing of it.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tidegate._extras import load
from tidegate.config import OffloadConfig
from tidegate.errors import TidegateError
from tidegate.tiers.paths import usable_disk_paths

if TYPE_CHECKING:
    from torch import nn

    from tidegate.offload.session import OffloadSession
    from tidegate.strategies.accelerate import OffloadPlugin

__all__ = ["main"]

_log = logging.getLogger("tidegate")
_USAGE = """usage: accelerate launch -m tidegate.run SCRIPT [ARGS ...]

Runs a script that uses Accelerate or transformers.Trainer with its activations offloaded. TIDEGATE_* variables, or a
file named by TIDEGATE_CONFIG, say what may move where; `tidegate doctor` says what this machine can do."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the script that `arguments` (default: those of the command line) name.

    Raises:
        SystemExit: The script ends with one, or the command line or the settings are wrong (code 2).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        _refuse(f"there is no script {script}; the file of a script comes first, and its arguments follow")
    _say_what_happens()
    try:
        sessions = _Sessions()
    except TidegateError as error:
        _refuse(str(error))
    atexit.register(sessions.say_what_moved)  # after the script's threads have ended
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as if Python had been given the script
    module = types.ModuleType("__main__")  # stays until the end: what the script pickles is looked up there
    module.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, module.__dict__)
    except SystemExit:
        sessions.may_be_none = True  # --help, say
        raise


def _refuse(message: str) -> NoReturn:
    print(f"tidegate.run: {message}", file=sys.stderr)
    raise SystemExit(2)


class _IfNobodyElse(logging.StreamHandler[TextIO]):
    """Shows our messages unless the script has set up logging for itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _say_what_happens() -> None:
    if not _log.handlers:
        handler = _IfNobodyElse()
        handler.setFormatter(logging.Formatter("tidegate: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)


class _Sessions:
    """The sessions of the models that the script prepares. Each lives as long as its model."""

    def __init__(self) -> None:
        home = load("tidegate.strategies.accelerate", "accelerate", "tidegate.run")
        self._plugin: OffloadPlugin = home.OffloadPlugin()
        assert isinstance(self._plugin.config, OffloadConfig)
        if "disk" in self._plugin.config.tiers:
            usable_disk_paths(self._plugin.config.disk_paths)  # so that a wrong path is known before the script works
        self._opened: list[OffloadSession] = []
        self._process = os.getpid()
        self.may_be_none = False
        accelerator: Any = load("accelerate", "accelerate", "tidegate.run").Accelerator
        accelerator.prepare_model = self._attaching(accelerator.prepare_model)

    def _attaching(self, prepare_model: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(prepare_model)
        def prepare_and_attach(
            accelerator: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> nn.Module:
            prepared = prepare_model(
                accelerator, model, device_placement=device_placement, evaluation_mode=evaluation_mode
            )
            if not evaluation_mode and any(parameter.requires_grad for parameter in prepared.parameters()):
                self._attach(accelerator, prepared)
            return prepared

        return prepare_and_attach

    def _attach(self, accelerator: Any, model: nn.Module) -> None:
        session = self._plugin.open(accelerator, model)
        if session not in self._opened:
            self._opened.append(session)
            weakref.finalize(model, session.close)

    def say_what_moved(self) -> None:
        if os.getpid() != self._process:
            return
        if not self._opened and not self.may_be_none:
            self._say("nothing was offloaded in this process: it prepared no model for training with Accelerate")
        for session in self._opened:
            self._say(str(session.stats()))
            session.close()

    @staticmethod
    def _say(message: str) -> None:
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", message)
        else:  # the script's own set-up has silenced us
            print(f"tidegate: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
