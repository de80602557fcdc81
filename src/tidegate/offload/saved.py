"""The saved-tensor hooks: pack puts a handle into the graph, unpack gives the tensor back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tidegate.errors import TidegateError
from tidegate.offload.captured import captures, say_captured
from tidegate.offload.engine import Engine
from tidegate.offload.handle import SavedHandle
from tidegate.offload.step import Step
from tidegate.offload.storage import ByteRange, StorageKey, ViewSpec
from tidegate.offload.unit import VersionGuard

__all__ = ["Distributed", "Kept", "Packer"]

_log = logging.getLogger("tidegate")
_UNTRACKED = -1
_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # a module that type checkers do not know
_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)


class Kept:
    """A tensor that stays. Its version is checked all the same, since hooks switch autograd's own check off."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = _version(tensor)

    def unpack(self) -> Tensor:
        if self._version != _UNTRACKED and self._tensor._version != self._version:
            raise VersionGuard.error(self._tensor.dtype, self._tensor._version, self._version)
        return self._tensor


class Distributed:
    """A DTensor whose local shard was packed by itself.

    An edit of a DTensor moves the version counter of the wrapper only, so an emptied alias of it is kept.
    """

    __slots__ = ("_alias", "_context", "_parts", "_version")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self._context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        self._parts = {name: pack(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
        self._version = tensor._version
        self._alias = tensor
        tensor._local_tensor = torch.empty(0, dtype=tensor.dtype)

    def unpack(self) -> Tensor:
        if self._alias._version != self._version:
            raise VersionGuard.error(self._alias.dtype, self._alias._version, self._version)
        parts = {name: part.unpack() if hasattr(part, "unpack") else part for name, part in self._parts.items()}
        shape, stride = self._alias.shape, self._alias.stride()
        tensor: Tensor = type(self._alias).__tensor_unflatten__(parts, self._context, shape, stride)
        return tensor


class Surroundings(Protocol):
    """What pack must know of the model."""

    def owns(self, storage: torch.UntypedStorage) -> bool: ...

    def may_move(self, device: torch.device) -> bool: ...


class Packer:
    """The two hooks.

    Args:
        engine: Where units go.
        surroundings: Storages that belong to parameters and buffers, and devices whose tensors may move.
        current: Gives the step that saves now.
        min_bytes: Smaller ranges stay.
    """

    def __init__(self, engine: Engine, surroundings: Surroundings, current: Callable[[], Step], min_bytes: int) -> None:
        self._engine = engine
        self._surroundings = surroundings
        self._current = current
        self._min_bytes = max(min_bytes, 1)
        self._said: set[type] = set()

    def pack(self, tensor: Tensor) -> SavedHandle | Kept | Distributed:
        """Decides what the graph holds for a saved tensor."""
        alone = not tensor._is_view()  # over a part of a storage: the other parts do not share its version counter
        owner = tensor if alone else tensor._base
        # A saved result arrives with its own grad_fn: held by that node's handle, it would keep the graph alive.
        tensor = tensor.detach()
        if torch._C._current_graph_task_id() != -1 or self._engine.interrupted:
            return Kept(tensor)  # saved by backward itself: needed again at once
        if tensor.is_cuda and captures():
            say_captured()
            return Kept(tensor)  # a replay reads it where it was
        if type(tensor) not in _PLAIN_TYPES or not _is_plain(tensor):
            return self._pack_special(tensor)
        storage = tensor.untyped_storage()
        if isinstance(owner, nn.Parameter) or self._surroundings.owns(storage):
            return Kept(tensor)
        view = ViewSpec.of(tensor)
        span = view.range_in(storage.nbytes(), alone=alone and view.nbytes < storage.nbytes())
        travels = view.nbytes if span.dense else span.nbytes
        if travels < self._min_bytes or not self._surroundings.may_move(tensor.device):
            self._engine.exclude(view.nbytes)
            return Kept(tensor)
        assert owner is not None
        # The user's function and dispatch modes would log, count or trace what the hooks compute.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return self._save(tensor, owner, storage, view, span)

    def _save(
        self, tensor: Tensor, owner: Tensor, storage: torch.UntypedStorage, view: ViewSpec, span: ByteRange
    ) -> SavedHandle:
        guard = VersionGuard(tensor, owner)
        layout = (view.dtype, view.shape, view.stride) if span.dense else ()
        key = StorageKey(storage._cdata, storage.data_ptr(), storage.nbytes(), guard.version, span, layout)
        return self._engine.save(tensor, guard, view, key, self._current())

    pack.steps_aside = True  # type: ignore[attr-defined]  # see functorch.py

    def unpack(self, packed: SavedHandle | Kept | Distributed) -> Tensor:
        """Gives the tensor back; may run more than once."""
        if type(packed) is SavedHandle:
            if packed.unit.device.type == "cuda" and captures():
                raise TidegateError(
                    "a CUDA graph is captured over a backward whose forward was not: its replays would read freed "
                    "memory. Capture forward and backward together, or close the session first"
                )
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return packed.unpack()
        return packed.unpack()

    def _pack_special(self, tensor: Tensor) -> Kept | Distributed:
        if _is_dtensor(tensor) and not _is_fake(tensor):
            return Distributed(tensor, self.pack)
        self._say_kept(type(tensor))
        return Kept(tensor)

    def _say_kept(self, kind: type) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.info("saved tensors of kind %s stay on the device: hooks cannot carry them", kind.__name__)


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors and functorch wrappers do not track versions
        return _UNTRACKED


def _is_dtensor(tensor: Tensor) -> bool:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor


def _is_fake(tensor: Tensor) -> bool:
    return bool(_functorch.is_functorch_wrapped_tensor(tensor)) or torch._is_functional_tensor(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return not (
        _is_fake(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_inference()
        or tensor._is_zerotensor()
        or tensor.device.type not in ("cpu", "cuda")
    )
