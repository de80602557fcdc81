"""Measured bandwidths: short probes of memory and of the link to a GPU. All rates are GB/s, 1e9 bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from tidegate.memory.pinned import Slab, copy_bytes

__all__ = ["LinkRate", "Rates", "host_copy_rate", "kvikio_status", "link_rate"]

_BLOCK = 32 << 20
_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidth of a tier.

    Args:
        write: GB/s.
        read: GB/s.
        mode: What really ran, e.g. "posix-direct".
    """

    write: float
    read: float
    mode: str

    def to_dict(self) -> dict[str, float | str]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Bandwidth between a GPU and host memory.

    Args:
        to_host: GB/s.
        to_device: GB/s.
        pinned: Whether the host memory could be page-locked.
    """

    to_host: float
    to_device: float
    pinned: bool

    def to_dict(self) -> dict[str, float | bool]:
        """Plain data."""
        return asdict(self)


def host_copy_rate() -> float:
    """Copies within host memory by one thread, in GB/s of bytes copied."""
    source, target = Slab(_BLOCK, pin=False), Slab(_BLOCK, pin=False)
    source.tensor.fill_(1)
    target.tensor.fill_(0)
    return _rate(lambda: copy_bytes(target.address, source.address, _BLOCK))


def link_rate(device: torch.device) -> LinkRate:
    """Copies between a GPU and pinned host memory, one direction at a time."""
    slab = Slab(_BLOCK, pin=True)
    block = torch.randint(256, (_BLOCK,), dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return run

    return LinkRate(_rate(copy(slab.tensor, block)), _rate(copy(block, slab.tensor)), slab.pinned)


def kvikio_status() -> str:
    """What kvikio offers here: "not installed", why its import fails, or its compatibility mode."""
    try:
        import kvikio.defaults  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # it raises RuntimeError without cuFile or driver
        return f"import fails: {error}"
    try:
        return f"compat_mode={kvikio.defaults.get('compat_mode')}"
    except Exception as error:
        return f"unusable: {error}"


def _rate(copy: Callable[[], None]) -> float:
    copy()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < _SECONDS:
        copy()
        count += 1
    return count * _BLOCK / (time.perf_counter() - started) / 1e9
