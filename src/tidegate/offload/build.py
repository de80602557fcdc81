"""Puts an engine together: what the model is, which tiers it may use, how much must leave."""

from __future__ import annotations

import errno
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tidegate.config import OffloadConfig, Percent
from tidegate.errors import ConfigError, TidegateError
from tidegate.memory import headroom, probe
from tidegate.memory.filesystem import filesystem_of
from tidegate.offload.course import Lane
from tidegate.offload.direct import DirectDisk
from tidegate.offload.engine import Engine
from tidegate.offload.free import FreeGate
from tidegate.offload.gate import FixedGate, Gate, HeadroomGate, ShareGate
from tidegate.offload.storage import owned_storages, sharded_params, unsharded_storages
from tidegate.offload.tierset import TierSet
from tidegate.offload.transfer import CpuMover, Mover, Movers
from tidegate.sizes import format_size
from tidegate.tiers.disk import DiskTier
from tidegate.tiers.host import HostTier, SlabPool
from tidegate.tiers.paths import disk_room, usable_disk_paths
from tidegate.tiers.tier import Staging, Tier

__all__ = ["Surroundings", "build_engine"]

_STAGING = 64 << 20
_log = logging.getLogger("tidegate")


class Surroundings:
    """The attached model seen from outside: its device, and storages that must never move."""

    def __init__(self, model: nn.Module) -> None:
        self._owned: set[int] = set()
        self._never_whole: list[Any] = []
        self.device = torch.device("cpu")
        self._model = weakref.ref(model)
        self._said_cpu = False

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    def refresh(self) -> None:
        """Reads the model anew: parameters may have been moved, added or unsharded since the last step."""
        model = self.model
        if model is None:
            return
        storages = list(owned_storages(model))
        self._never_whole = sharded_params(model)
        self._owned = {storage._cdata for storage in storages}
        self._find_whole()
        self.device = next((s.device for s in storages if s.device.type == "cuda"), torch.device("cpu"))
        if self.on_cpu and storages and not self._said_cpu:
            self._said_cpu = True
            _log.info("the model is on the CPU: the device is host RAM, and device_budget means RAM")

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage holds a parameter or a buffer."""
        if self._never_whole and storage._cdata not in self._owned:
            self._find_whole()  # FSDP2 first gathers a parameter when its module runs, inside the step
        return storage._cdata in self._owned

    def _find_whole(self) -> None:
        still = []
        for param in self._never_whole:
            storages = unsharded_storages(param)
            self._owned.update(storage._cdata for storage in storages)
            if not storages:
                still.append(param)
        self._never_whole = still

    @property
    def on_cpu(self) -> bool:
        """Whether this is a CPU run."""
        return self.device.type == "cpu"

    def may_move(self, device: torch.device) -> bool:
        """On a CUDA run tensors on the CPU stay."""
        return device.type == "cuda" or self.on_cpu


def build_engine(surroundings: Surroundings, config: OffloadConfig, rank: int) -> tuple[Engine, TierSet]:
    """Makes the engine of a session; tiers open when the first bytes leave.

    Raises:
        ConfigError: A path of `disk_paths` cannot be used.
    """
    rooms = _Rooms(surroundings, config, rank)
    tiers = TierSet([(name, functools.partial(rooms.open, name)) for name in config.tiers])
    gate = _gate(surroundings, config, functools.partial(rooms.lane, tiers))
    engine = Engine(tiers, gate, Movers(rooms.mover), window=lambda: rooms.window, verify=config.verify)
    return engine, tiers


class _Rooms:
    """Resolves budgets against what this machine has, once it is known on which device the model runs."""

    def __init__(self, surroundings: Surroundings, config: OffloadConfig, rank: int) -> None:
        self._surroundings = surroundings
        self._config = config
        self._rank = rank
        self._paths = usable_disk_paths(config.disk_paths) if "disk" in config.tiers else ()
        self._direct = DirectDisk(config.gds, config.io_threads, lambda: self.window)

    @functools.cached_property
    def window(self) -> int:
        window = self._config.window
        return headroom.auto_window(self._surroundings.device) if window == "auto" else window

    @functools.cached_property
    def _pin(self) -> bool:
        pin = self._config.pin_memory
        return not self._surroundings.on_cpu if pin == "auto" else pin

    @property
    def _staging_bytes(self) -> int:
        """Host memory through which bytes pass on their way to a disk; a larger unit does not go there."""
        return max(2 * self.window, _STAGING)

    def mover(self, device: torch.device) -> Mover:
        return CpuMover() if device.type == "cpu" else self._cuda_mover(device)

    def _cuda_mover(self, device: torch.device) -> Mover:
        from tidegate.offload.transfer_cuda import CudaMover

        return CudaMover(device, functools.partial(self._staging, device))

    def _staging(self, device: torch.device) -> Staging:
        return self._direct.staging(device) or SlabPool(self._staging_bytes, pin=self._pin)

    def open(self, name: str) -> Tier | None:
        """Opens one tier; None, said once, when it is off here."""
        return self._open_host() if name == "host" else self._open_disk()

    def _open_host(self) -> Tier | None:
        if self._surroundings.on_cpu and "tiers" not in self._config.given:
            return None  # on a CPU run the device is host RAM already
        budget = self._config.host_budget
        capacity = headroom.auto_host_budget(headroom.host_headroom()) if budget == "auto" else budget
        return HostTier(capacity, pin=self._pin) if capacity else None

    def _open_disk(self) -> Tier | None:
        if not self._paths:
            return None
        config = self._config
        direct = None if config.direct_io == "auto" else config.direct_io
        try:
            free = disk_room(self._paths)
            capacity = self._disk_capacity(free)
            if not capacity:
                why = "disk_budget is 0" if config.disk_budget == 0 else f"{format_size(free)} are free"
                _log.warning("the disk tier is off: %s under %s", why, ", ".join(self._paths))
                return None
            options: dict[str, Any] = {"threads": config.io_threads, "direct": direct, "rank": self._rank}
            return self._direct.tier(
                self._paths,
                self._surroundings.device,
                lambda pieces: DiskTier(self._paths, capacity, pieces=pieces, **options),
            )
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                _log.warning("the disk tier is off: %s: %s", error.filename, error.strerror)
                return None
            raise ConfigError(
                f"disk_paths: cannot open spill files: {error}. "
                f"Choose directories that you may write to, on a local file system"
            ) from error

    def lane(self, tiers: TierSet) -> Lane | None:
        """Measures the way to the first tier that is open, in a second or less; None, said, where it cannot be."""
        try:
            return self._measured_lane(tiers)
        except (OSError, RuntimeError) as error:  # a full disk, no device memory
            if isinstance(error, TidegateError):
                raise
            # The error itself would keep the saved tensors alive that its traceback leads to.
            _log.warning("device_budget=free: the way to the tiers cannot be measured (%s); nothing moves", str(error))
            return None

    def _measured_lane(self, tiers: TierSet) -> Lane | None:
        opened = tiers.open()
        if not opened:
            return None
        tier = opened[0]
        if isinstance(tier, HostTier):
            out, back = self._link()
            return Lane(out, back, capacity=tier.capacity)
        write, read = self._disk_rates()
        if self._surroundings.on_cpu:
            return Lane(write, read, capacity=tier.capacity)
        ring = self._direct.staging(self._surroundings.device)
        if ring is not None:
            copy = 1e9 * probe.device_copy_rate(self._surroundings.device)
            return Lane(copy, copy, store=write, load=read, depth=ring.capacity, capacity=tier.capacity)
        out, back = self._link()
        return Lane(out, back, store=write, load=read, depth=self._staging_bytes, capacity=tier.capacity)

    def _link(self) -> tuple[float, float]:
        if self._surroundings.on_cpu:
            rate = 1e9 * probe.host_copy_rate()
            return rate, rate
        link = probe.link_rate(self._surroundings.device)
        return 1e9 * link.to_host, 1e9 * link.to_device

    def _disk_rates(self) -> tuple[float, float]:
        """Of all paths together; those on one device share it."""
        devices = {filesystem_of(path).device: path for path in self._paths}
        direct = [self._direct.rate(path) for path in devices.values()]
        known = [rate for rate in direct if rate is not None]
        if len(known) == len(devices):
            return 1e9 * sum(write for write, _ in known), 1e9 * sum(read for _, read in known)
        rates = [probe.disk_rate(path, self._config.io_threads) for path in devices.values()]
        return 1e9 * sum(rate.write for rate in rates), 1e9 * sum(rate.read for rate in rates)

    def _disk_capacity(self, free: int) -> int:
        budget = self._config.disk_budget
        if budget == "auto":
            return headroom.auto_disk_budget(free)
        return budget.of(free) if isinstance(budget, Percent) else budget


def _gate(surroundings: Surroundings, config: OffloadConfig, lane: Callable[[], Lane | None]) -> Gate:
    budget = config.device_budget
    if isinstance(budget, Percent):
        return ShareGate(budget.share)
    if isinstance(budget, int):
        return FixedGate(budget)
    by_headroom = HeadroomGate(
        lambda: headroom.device_headroom(surroundings.device),
        lambda: headroom.auto_margin(surroundings.device),
    )
    return FreeGate(lane, by_headroom) if budget == "free" else by_headroom
