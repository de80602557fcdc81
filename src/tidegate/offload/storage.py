"""Identity of a storage at a version, the bytes of it that a view needs, and the way back to the view."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ByteRange",
    "StorageKey",
    "ViewSpec",
    "owned_storages",
    "sharded_params",
    "unsharded_storages",
]

_WHOLE_FRACTION = 2
"""A view that spans at least 1/2 of its storage makes the whole storage travel: its siblings then travel free."""

_SPARSE_FRACTION = 4
"""A view that uses at most 1/4 of the bytes it spans travels as a dense copy."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of a storage. `dense` marks a dense copy of a sparse view instead of the range itself."""

    start: int
    stop: int
    dense: bool = False

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StorageKey:
    """What makes two saved tensors the same bytes: one storage, one version, one range.

    `handle` is the address of the StorageImpl. It is unique as long as a weak reference to the storage is
    held, which every unit does; `address` and `nbytes` catch a storage that was resized or swapped in place.
    """

    handle: int
    address: int
    nbytes: int
    version: int
    span: ByteRange
    layout: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A view relative to its storage: enough to build it again over other memory with the same bytes.

    Args:
        dtype: Element type.
        shape: Sizes.
        stride: Strides in elements.
        offset: Byte offset of the first element in the original storage.
        conj: Conjugate bit.
        neg: Negative bit.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> ViewSpec:
        return cls(
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()) * tensor.itemsize,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def physical(self) -> ViewSpec:
        """The same view of the bytes as they are, without conjugate and negative bits."""
        return dataclasses.replace(self, conj=False, neg=False)

    @property
    def extent(self) -> int:
        """Elements from the first to the last, both included; 0 for an empty view."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements, an expanded dimension counted once."""
        distinct = math.prod(size for size, step in zip(self.shape, self.stride, strict=True) if step != 0)
        return min(distinct, self.extent) * self.dtype.itemsize

    def range_in(self, storage_nbytes: int, *, alone: bool = False) -> ByteRange:
        """Chooses the bytes that travel for this view: the whole storage, its span, or a dense copy.

        Args:
            storage_nbytes: Bytes of the storage.
            alone: Other tensors may edit the rest of the storage unseen, so only the view's own bytes travel.
        """
        span = self.extent * self.dtype.itemsize
        start, stop = self.offset, self.offset + span
        sparse = self.nbytes < span if alone else self.nbytes * _SPARSE_FRACTION <= span
        if sparse and 0 not in self.stride:
            return ByteRange(start, stop, dense=True)
        if not alone and span * _WHOLE_FRACTION >= storage_nbytes:
            return ByteRange(0, storage_nbytes)
        return ByteRange(start, stop)

    def over(self, base: Tensor, shift: int) -> Tensor:
        """Builds the view over `base`, whose storage holds the original byte b at byte b + shift.

        The result shares the version counter of `base`, so that an edit of an unpacked tensor is seen later.
        """
        offset = (self.offset + shift) // self.dtype.itemsize
        typed = base if base.dtype is self.dtype else _as_type(base, self.dtype)
        view = typed.as_strided(self.shape, self.stride, offset)
        if self.conj:
            view = view.conj()
        return torch._neg_view(view) if self.neg else view


def _as_type(base: Tensor, dtype: torch.dtype) -> Tensor:
    """Views the storage of `base` as another type; `base` itself may be strided so that no such view of it exists."""
    unit = max(dtype.itemsize, base.itemsize)
    length = base.untyped_storage().nbytes() // unit * unit // base.itemsize
    return base.as_strided((length,), (1,), 0).view(dtype)


def owned_storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of every parameter and buffer; of a DTensor, its local shard."""
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield from _storages(tensor)


def sharded_params(model: nn.Module) -> list[Any]:
    """Lists what FSDP keeps for each parameter that it shards: FSDP1's flat ones, FSDP2's own; empty without FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules: list[Any] = list(model.modules())
    handles = [module._handle for module in modules if isinstance(module, fsdp.FullyShardedDataParallel)]
    flat = [handle.flat_param for handle in handles if handle is not None and _has_whole_copy(handle)]
    states = [module._get_fsdp_state() for module in modules if isinstance(module, fsdp.FSDPModule)]
    groups = [group for state in states for group in _param_groups(state)]
    return flat + [param for group in groups if group is not None for param in group.fsdp_params]


def _has_whole_copy(handle: Any) -> bool:
    return bool(handle.uses_sharded_strategy or handle._uses_param_mixed_precision)


def _param_groups(state: Any) -> Iterable[Any]:
    groups: Iterable[Any] | None = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13; one before
    return [state._fsdp_param_group] if groups is None else groups


_WHOLE = ("_unsharded_param", "_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


def unsharded_storages(param: Any) -> list[torch.UntypedStorage]:
    """Storages that hold a sharded parameter while it is whole; empty until it has been whole once.

    FSDP empties and refills them in place, so they keep their identity.
    """
    tensors = [getattr(param, name, None) for name in _WHOLE]
    tensors += getattr(param, "all_gather_outputs", ())
    return [storage for tensor in tensors if isinstance(tensor, Tensor) for storage in _storages(tensor)]


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from _storages(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or a lazy parameter without data
        return
