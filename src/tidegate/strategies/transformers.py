"""Offload for transformers.Trainer: a callback, and a mixin for those who subclass the Trainer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from typing_extensions import override

from tidegate.config import OffloadConfig
from tidegate.errors import ConfigError
from tidegate.strategies.holder import SessionHolder

__all__ = ["OffloadTrainerCallback", "OffloadTrainerMixin"]


class OffloadTrainerCallback(SessionHolder, TrainerCallback, ExportableState):
    """Offloads the activations of a Trainer's model: `trainer.add_callback(OffloadTrainerCallback(config))`.

    The session opens when training begins and closes when it ends. The Trainer tells callbacks nothing of an exception:
    after one the session closes at the next forward of the model, the next training, or the model's end, whichever
    comes first. `close()` closes it at once; so does `OffloadTrainerMixin`.

    Args:
        config: An OffloadConfig, a mapping of its fields, the path of a TOML, JSON or YAML file, or None for TIDEGATE_*
            variables and defaults.

    Raises:
        ConfigError: A field cannot be meant.
    """

    def __init__(self, config: OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
        self._config = OffloadConfig.of(config)
        self._watch: _Watch | None = None

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        _refuse_what_cannot_work(args)
        model: nn.Module = kwargs["model"]
        self._open_session(model, self._config, args.process_index)
        self._watch = _Watch(model, self.close)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the session, if one is open. Idempotent."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        self._close_session()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None, "_watch": None}  # a subclass may hold more

    @override
    def state(self) -> dict[str, Any]:
        """What the Trainer writes into trainer_state.json; `from_state` makes an equal callback of it."""
        return {"args": {"config": self._config.to_dict()}, "attributes": {}}


class OffloadTrainerMixin(SessionHolder, Trainer):
    """Adds activation offload to a Trainer; put it first among the bases.

        class OffloadTrainer(OffloadTrainerMixin, Trainer): ...

        OffloadTrainer(model, args, train_dataset=data, offload=OffloadConfig(device_budget=0)).train()

    The session lives through `train()`, however that ends.

    Args:
        *args: Passed on to the Trainer beside it.
        offload: As for `OffloadTrainerCallback`.
        **kwargs: Passed on to the Trainer beside it.

    Raises:
        ConfigError: A field of `offload` cannot be meant.
    """

    def __init__(
        self,
        *args: Any,
        offload: OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offload = OffloadConfig.of(offload)
        super().__init__(*args, **kwargs)

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_what_cannot_work(self.args)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_session()

    @override
    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with self._open_session(model, self._offload, self.args.process_index).step():
            return super().training_step(model, *args, **kwargs)


class _Watch:
    """Notices, at a forward of the model, that the training that was to end the session is over.

    Args:
        model: Its forwards are watched.
        end_session: Called at the first forward that is not inside `Trainer.train`.
    """

    def __init__(self, model: nn.Module, end_session: Any) -> None:
        self._training = next((frame for frame in _callers() if frame.f_code is Trainer.train.__code__), None)
        self._thread = threading.get_ident()
        self._end_session = end_session
        self._hook: RemovableHandle = model.register_forward_pre_hook(self._look, prepend=True)

    def _look(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._training is None or self._thread != threading.get_ident():
            return
        if not any(frame is self._training for frame in _callers()):
            self._end_session()

    def end(self) -> None:
        self._hook.remove()
        self._training = None


def _callers() -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _refuse_what_cannot_work(args: TrainingArguments) -> None:
    """Raises ConfigError for settings that offload by other means, or that replicate the model in threads."""
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(args, name, None) or {}).get("offload"):
            raise ConfigError(f'{name}={{"offload": True}} offloads by itself; switch one of the two off')
    if getattr(args, "activation_offloading", False):
        raise ConfigError("activation_offloading=True offloads by itself; switch one of the two off")
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would run this model on {args.n_gpu} GPUs of one process (DataParallel); start one process "
            "for each GPU with accelerate launch or torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES"
        )
