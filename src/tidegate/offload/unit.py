"""A unit: one storage range saved at one place of the program, and where its bytes are now."""

from __future__ import annotations

import enum
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tidegate.errors import InPlaceError
from tidegate.offload.storage import StorageKey
from tidegate.tiers.tier import Tier

__all__ = ["Arrival", "Body", "Outcome", "State", "Unit", "VersionGuard"]


class State(enum.Enum):
    """Where the bytes of record are."""

    RESIDENT = enum.auto()
    """On the device, in the tensor that was saved."""
    LEAVING = enum.auto()
    """On the device, and on their way to a tier."""
    AWAY = enum.auto()
    """In a tier only."""
    DEAD = enum.auto()
    """Nowhere: no handle is left."""


class Outcome(enum.Enum):
    """What first became of bytes that were written."""

    READ = "read"
    FORWARDED = "forwarded"
    DROPPED = "dropped"


class VersionGuard:
    """Raises when a tensor was edited in place after it was saved, as autograd's own check would.

    Installing saved-tensor hooks switches that check off for all tensors the hooks see. The alias shares the
    version counter but not the data, so it holds no memory.

    Args:
        tensor: What is saved.
        owner: The tensor itself, or the base of which it is a view.
    """

    __slots__ = ("_alias", "_counter", "_owner", "_version")

    def __init__(self, tensor: Tensor, owner: Tensor) -> None:
        self._version = tensor._version
        alias = tensor.detach()
        alias.data = _empty(tensor.dtype, tensor.device)
        self._alias = alias
        self._owner = _torch._WeakTensorRef(owner)  # keeps the address that follows unique
        self._counter = owner._cdata

    @property
    def version(self) -> int:
        return self._version

    def unchanged(self) -> bool:
        return self._alias._version == self._version

    def same_counter(self, other: VersionGuard) -> bool:
        """Whether both tensors are known to count their edits together.

        Equal versions say nothing else: the parts of torch.unsafe_chunk (in every LSTM) and `tensor.data` count for
        themselves. torch does not tell which counter a tensor has; a tensor and its views have one.
        """
        return bool(self._counter == other._counter)

    def check(self) -> None:
        """Raises InPlaceError if the tensor changed since it was saved."""
        if not self.unchanged():
            raise self.error(self._alias.dtype, self._alias._version, self._version)

    @staticmethod
    def error(dtype: torch.dtype, now: int, saved: int) -> InPlaceError:
        return InPlaceError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a saved {str(dtype).removeprefix('torch.')} tensor is at version {now}, expected version {saved}. "
            f"Clone the tensor before the edit, or edit it after backward."
        )


_torch: Any = torch._C  # type checkers do not know all of it
_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (dtype, device)
    tensor = _EMPTY.get(key)
    if tensor is None:
        tensor = _EMPTY[key] = torch.empty(0, dtype=dtype, device=device)
    return tensor


@dataclass(slots=True, eq=False)
class Arrival:
    """Bytes on their way back, or back.

    Args:
        base: One-dimensional uint8 tensor that receives them.
        shift: Byte b of the original storage is byte b + shift of `base`.
        future: Host-side part of the way; None when there is none.
        route: What the mover must remember (events, streams, staging).
        verified: The checksum was compared.
    """

    base: Tensor
    shift: int
    future: Future[int] | None = None
    route: Any = None
    verified: bool = False
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.base._version

    def unedited(self) -> bool:
        """Whether no consumer edited the bytes in place after they came back."""
        return self.base._version == self.version


class Body:
    """The bytes of a unit on the device. Only handles hold it, so that the memory goes with the graph, at once.

    Args:
        source: The saved tensor (or its dense copy); None when the bytes are away.
    """

    __slots__ = ("__weakref__", "source")

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source


@dataclass(slots=True, eq=False)
class Unit:
    """Record of a unit; the engine's lock guards it.

    Args:
        key: Identity of the bytes.
        nbytes: Bytes that travel.
        device: Where they come from and go back to.
        origin: Address of the saved storage; restored views keep its alignment.
        address: Address of the bytes that travel, in the storage or in a dense copy.
        guard: Version of the storage when saved; a later save of an edited storage is another unit.
        storage: Weak reference that keeps the identity unique.
        body: The bytes on the device, while a handle is left.
        scope: The forward that saved it.
        source_shift: Byte b of the original storage is byte b + shift of the source's storage.
        memory: Address and bytes of the source's storage.
        producer: The stream that saved it.
        savers: Other streams that have saved it since.
        home, number: The step that created it, and its number among the units of that step.
        state: Where the bytes are.
        tier, lease, future: Where they go or are, and the write.
        departure: What the mover must remember of the way out.
        refused: Tiers that failed to write them.
        onward: Their way to the next tier, while it lasts.
        arrival: The copy that came back.
        handles: Saved tensors that need the unit.
        seen: Handles that were unpacked in this turn; after the last one the copy is let go.
        turn: Counts complete passes over the handles.
        claimed: Counted against the prefetch window.
        retained: The device copy stays although a write is under way.
        outcome, written_epoch: For the books.
        checksum: In verify mode, taken when the unit left.
    """

    key: StorageKey
    nbytes: int
    device: torch.device
    origin: int
    address: int
    guard: VersionGuard
    storage: StorageWeakRef
    body: weakref.ref[Body]
    source_shift: int
    scope: int
    memory: tuple[int, int]
    producer: Any = None
    savers: tuple[Any, ...] = ()
    home: int = 0
    number: int = -1
    state: State = State.RESIDENT
    tier: Tier | None = None
    lease: Any = None
    future: Future[int] | None = None
    departure: Any = None
    refused: tuple[str, ...] = ()
    onward: Any = None
    arrival: Arrival | None = None
    handles: int = 0
    seen: int = 0
    turn: int = 0
    claimed: bool = False
    retained: bool = False
    outcome: Outcome | None = None
    written_epoch: int | None = None
    checksum: Any = None

    @property
    def source(self) -> Tensor | None:
        """The saved tensor, or its dense copy, while the bytes are on the device and a handle is left."""
        body = self.body()
        return None if body is None else body.source

    def holds(self, guard: VersionGuard, scope: int) -> bool:
        """Whether the unit's bytes are those of a tensor with an equal key that is saved now.

        It has the same storage and the same edits that autograd counts. There are others (`tensor.data`, NumPy):
        across forwards only a unit that still is the storage itself is taken to hold what is there now.
        """
        return (
            (self.scope == scope or (self.state is State.RESIDENT and not self.key.span.dense))
            and not self.storage.expired()
            and self.guard.unchanged()
            and self.guard.same_counter(guard)
        )

    def intact(self) -> bool:
        """Whether the source's storage still has the memory it had when it was saved: some programs empty storages."""
        source = self.source
        if source is None:
            return True
        storage = source.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) == self.memory
