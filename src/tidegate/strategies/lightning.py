"""Lightning strategies whose training steps run with their activations offloaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from tidegate.config import OffloadConfig
from tidegate.errors import ConfigError
from tidegate.strategies.holder import SessionHolder

__all__ = ["OffloadDDPStrategy", "OffloadMixin", "OffloadStrategy"]

logger = logging.getLogger(__name__)


class OffloadMixin(SessionHolder, Strategy):
    """Adds activation offload to a Lightning strategy; put it first among the bases.

    The session lives from `setup` to `teardown` of a fit. Validation, testing and prediction open nothing.

        class OffloadModelParallelStrategy(OffloadMixin, ModelParallelStrategy):
            names = {"offload_model_parallel": {}}  # for Trainer(strategy=...), after register_strategies

    Args:
        *args: Passed on to the strategy beside it.
        offload: What may move where: an OffloadConfig, a mapping of its fields, or None for TIDEGATE_* variables
            and defaults.
        **kwargs: Passed on to the strategy beside it.

    Raises:
        ConfigError: A field of `offload` cannot be meant.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names in Lightning's registry, and the arguments that each passes to the strategy. Lightning looks names up in
    lower case."""

    def __init__(self, *args: Any, offload: OffloadConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        misplaced = sorted(kwargs.keys() & OffloadConfig.__dataclass_fields__.keys())
        if misplaced:
            raise ConfigError(f"{', '.join(misplaced)}: fields of OffloadConfig go into offload=..., not beside it")
        self._offload = OffloadConfig.of(offload)
        super().__init__(*args, **kwargs)

    @property
    def offload(self) -> OffloadConfig:
        """The configuration that the next fit uses."""
        return self._offload

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            self._open_session(self.lightning_module, self._offload, getattr(self, "global_rank", 0))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._session is None or self._session.closed:
            return super().training_step(*args, **kwargs)
        # The loss belongs to the step; in automatic optimisation backward follows later, outside.
        with self._session.step():
            return super().training_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            self._close_session()
        except Exception:
            logger.warning("Closing the offload session failed after %r.", exception, exc_info=True)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            self._close_session()
        finally:
            super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the strategy under its `names`; a second call changes nothing."""
        for name, arguments in cls.names.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=cls.__doc__ or "", **arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_session": None}

    def __repr__(self) -> str:
        # pytorch_lightning and Fabric, whose base classes are other ones, show this when they refuse the strategy.
        return (
            f"<{type(self).__name__} for lightning.Trainer: import lightning, not pytorch_lightning; "
            "with Fabric, tidegate.attach(fabric.setup(model))>"
        )


class OffloadStrategy(OffloadMixin, SingleDeviceStrategy):
    """Training on one device with offloaded activations: `Trainer(strategy="tidegate", devices=1)`.

    The device is the Trainer's: `devices=[1]` takes the second GPU.

    Args:
        offload: What may move where: an OffloadConfig, a mapping of its fields, or None for TIDEGATE_* variables
            and defaults.
        accelerator: As in every Lightning strategy.
        checkpoint_io: As in every Lightning strategy.
        precision_plugin: As in every Lightning strategy.

    Raises:
        ConfigError: A field of `offload` cannot be meant, or the Trainer was given several devices or nodes.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tidegate": {}}

    def __init__(
        self,
        offload: OffloadConfig | dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            offload=offload, accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._parallel_devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device that the Trainer chose, in a list; empty until it did, and again after its run."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[object]) -> None:
        # Without this setter the Trainer would keep its choice to itself, and the root device would stay the CPU.
        if len(devices) != 1:
            raise ConfigError(
                f'strategy "tidegate" trains on one device, but the Trainer has {len(devices)}: '
                f"{', '.join(map(str, devices))}. Pass devices=1, or devices=[1] to choose one "
                '(devices="auto" takes every GPU of the machine); several devices are for strategy="tidegate_ddp"'
            )
        device = devices[0]
        if not (isinstance(device, torch.device) and device.type in ("cpu", "cuda")):
            raise ConfigError(f'strategy "tidegate" runs on CPU and CUDA devices, not on {device}')
        self._parallel_devices = [device]
        self._root_device = device

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ConfigError(
                f'strategy "tidegate" trains on one device of one node, but the Trainer has num_nodes={num_nodes}; '
                'pass num_nodes=1; several nodes are for strategy="tidegate_ddp"'
            )

    @override
    def teardown(self) -> None:
        super().teardown()
        # A Trainer asks a strategy that has devices for nothing: the next one would not be heard.
        self._parallel_devices = []


class OffloadDDPStrategy(OffloadMixin, DDPStrategy):
    """Data-parallel training with offloaded activations: `Trainer(strategy="tidegate_ddp", devices=4)`.

    Every rank has a session and spill directories of its own; budgets and paths hold for each rank.

    Args:
        offload: What may move where: an OffloadConfig, a mapping of its fields, or None for TIDEGATE_* variables
            and defaults.
        **kwargs: Those of Lightning's DDPStrategy, such as find_unused_parameters, static_graph or bucket_cap_mb.

    Raises:
        ConfigError: A field of `offload` cannot be meant.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tidegate_ddp": {},
        "tidegate_ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    }

    def __init__(self, offload: OffloadConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(offload=offload, **kwargs)
